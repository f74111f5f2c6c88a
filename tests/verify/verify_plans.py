"""Plans for the tests of the verifier, and dense attention to compare the interpreter with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks
from dyncp.arrays import Float64
from dyncp.plan import Layout
from dyncp.verify import Interpreted, interpret
from paced import FAST_LINKS, SLOW_LINKS, plan_paced
from strategies import ALWAYS_THERE, named_masks_of

DIM = 3
# Nodes and ranks per node.
MACHINES = [(1, 1), (1, 4), (1, 6), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 1), (4, 2)]


@st.composite
def planned_batches(draw: Callable[..., Any]) -> tuple[Batch, Plan]:
    """Batches of up to 4 sequences with any masks, planned in any way, on up to 4 nodes."""
    lengths = draw(st.lists(st.integers(1, 18), min_size=1, max_size=4))
    names = draw(st.sampled_from([["default"], ["default", "local"]]))
    batch = Batch.of([draw(named_masks_of(length, names)) for length in lengths])
    kv_heads, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    exact = draw(st.booleans())
    shape = AttentionShape(kv_heads * repeat, kv_heads, DIM, "fp64", exact=exact)
    config = PlannerConfig(
        solver=draw(st.sampled_from(ALWAYS_THERE)),
        block_size=draw(st.none() | st.integers(1, 9)),
        head_groups=draw(st.integers(1, kv_heads)) if exact else 1,
        divisions=draw(st.integers(2, 5)),
        seed=draw(st.integers(0, 99)),
        layout=Layout(draw(st.sampled_from([1, 4, 8, 128])), draw(st.integers(1, 5))),
    )
    topology = Topology(*draw(st.sampled_from(MACHINES)), nics=draw(st.integers(1, 3)))
    rate = draw(st.sampled_from([SLOW_LINKS, FAST_LINKS]))
    return batch, plan_paced(batch, topology, shape, config, rate)


def rich_batch() -> Batch:
    """Two masks over a long, two middling and a one-token sequence."""
    return Batch.of(
        [
            {"default": masks.causal(n), "local": masks.lambda_shaped(n, sinks=2, window=5)}
            for n in (26, 9, 1, 15)
        ]
    )


def rich_plan(seed: int = 3) -> Plan:
    """Scattered over 2 nodes of 2 ranks in 2 head groups and several divisions, so that every
    kind of transfer, relays, sums, slot reuse and padding occur."""
    config = PlannerConfig(
        solver="random", block_size=4, head_groups=2, seed=seed, layout=Layout(4, 3)
    )
    return plan_paced(rich_batch(), Topology(2, 2), AttentionShape(4, 2, DIM, "fp64"), config)


@dataclass(frozen=True, eq=False)
class Inputs:
    q: Float64
    k: Float64
    v: Float64
    dout: Float64


def inputs_of(plan: Plan, seed: int = 0) -> Inputs:
    shape, tokens = plan.parts[0].shape, int(plan.parts[0].lengths.sum())
    rng = np.random.default_rng(seed)
    q, dout = rng.normal(size=(2, tokens, shape.q_heads, DIM))
    k, v = rng.normal(size=(2, tokens, shape.kv_heads, DIM))
    return Inputs(q, k, v, dout)


def run(plan: Plan, name: str, x: Inputs, scale: float | None = None) -> Interpreted:
    with_gradients = plan.parts[0].masks[name].backward is not None
    return interpret(plan, name, x.q, x.k, x.v, x.dout if with_gradients else None, scale)


def dense(batch: Batch, name: str, x: Inputs, scale: float | None = None) -> Interpreted:
    """Attention and its gradients, sequence by sequence and head by head.

    With P = softmax(S): dV = Pᵀ dO, dP = dO Vᵀ, dS = P (dP - Σ P dP), dQ = dS K, dK = dSᵀ Q.
    """
    factor = DIM**-0.5 if scale is None else scale
    repeat = x.q.shape[1] // x.k.shape[1]
    out, lse = np.zeros_like(x.q), np.full(x.q.shape[:2], -np.inf)
    dq, dk, dv = np.zeros_like(x.q), np.zeros_like(x.k), np.zeros_like(x.v)
    first = 0
    for mask in batch.masks[name]:
        rows = slice(first, first + mask.length)
        first = rows.stop
        some = mask.dense().any(axis=1)
        for head in range(x.q.shape[1]):
            q, k = x.q[rows, head], x.k[rows, head // repeat]
            v, dout = x.v[rows, head // repeat], x.dout[rows, head]
            exponential = np.exp(q @ k.T * factor) * mask.dense()
            total = exponential.sum(axis=1)
            weights = exponential / np.where(some, total, 1)[:, None]
            out[rows, head] = weights @ v
            lse[rows, head][some] = np.log(total[some])
            dweights = dout @ v.T
            dscores = weights * (dweights - (weights * dweights).sum(axis=1, keepdims=True))
            dq[rows, head] = dscores @ k * factor
            dk[rows, head // repeat] += dscores.T @ q * factor
            dv[rows, head // repeat] += weights.T @ dout
    return Interpreted(out, lse, dq, dk, dv)


def equal(given: Interpreted, expected: Interpreted, tolerance: float = 1e-12) -> bool:
    """Whether all results that were computed agree; NaN agrees with nothing."""
    pairs = [
        (getattr(given, field), getattr(expected, field))
        for field in ("out", "lse", "dq", "dk", "dv")
    ]
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs if a is not None)

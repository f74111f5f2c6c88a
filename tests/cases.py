"""Random batches with random plans, and running them on this process's ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from dense import dense_attention, relative_error
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Step,
    Topology,
    attention,
    plan_batch,
)
from dyncp.placement import SOLVERS
from dyncp.plan import Direction, Layout, batch_order
from paced import plan_paced
from strategies import named_masks_of

TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Case:
    batch: Batch
    plan: Plan
    shape: AttentionShape
    seed: int


@st.composite
def cases(
    draw: Any,
    num_ranks: int | None = None,
    dtype: str = "fp64",
    topology: Topology | None = None,
    solvers: tuple[str, ...] = tuple(sorted(SOLVERS)),
    alignments: tuple[int, ...] = (1, 8, 128),
) -> Case:
    """Batches of up to 5 short sequences, placed in any way on up to 6 ranks, or on the nodes of
    `topology`."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    names = draw(st.sampled_from([("default",), ("default", "local")]))
    batch = Batch.of([draw(named_masks_of(length, names)) for length in lengths])
    kv_heads, repeat = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3]))
    shape = AttentionShape(kv_heads * repeat, kv_heads, draw(st.sampled_from([1, 4, 8])), dtype)
    config = PlannerConfig(
        solver=draw(st.sampled_from(solvers)),
        block_size=draw(st.none() | st.integers(2, 16)),
        head_groups=draw(st.integers(1, kv_heads)),
        divisions=draw(st.integers(2, 5)),
        seed=draw(st.integers(0, 999)),
        layout=Layout(draw(st.sampled_from(alignments)), draw(st.sampled_from([1, 4]))),
    )
    seed = draw(st.integers(0, 999))
    if topology is not None:
        return Case(batch, plan_paced(batch, topology, shape, config), shape, seed)
    ranks = Topology(1, num_ranks or draw(st.integers(1, 6)))
    return Case(batch, plan_batch(batch, ranks, shape, config), shape, seed)


@dataclass(frozen=True)
class Tensors:
    """Inputs of the whole batch, tokens in batch order."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @staticmethod
    def draw(case: Case) -> "Tensors":
        rng = torch.Generator().manual_seed(case.seed)
        tokens, shape = case.batch.num_tokens, case.shape

        def normal(heads: int) -> Tensor:
            rows = torch.randn(tokens, heads, shape.head_dim, generator=rng, dtype=torch.float64)
            return rows.to(TORCH[shape.dtype])

        return Tensors(
            normal(shape.q_heads),
            normal(shape.kv_heads),
            normal(shape.kv_heads),
            normal(shape.q_heads),
        )


@dataclass(frozen=True)
class Results:
    """Output and gradients of the whole batch, tokens in batch order."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"out": self.out, "dq": self.dq, "dk": self.dk, "dv": self.dv}


def run_dense(case: Case, name: str, tensors: Tensors, dtype: torch.dtype) -> Results:
    inputs = [x.to(dtype).requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    out = dense_attention(case.batch, name, *inputs, scale=case.shape.head_dim**-0.5)
    return Results(out.detach(), *torch.autograd.grad(out, inputs, tensors.dout.to(dtype)))


def run_step(step: Step, case: Case, name: str, tensors: Tensors) -> list[Tensor]:
    """Output and gradients of this process's rows. Checks the bytes moved against the plan."""
    rows = torch.from_numpy(
        np.concatenate(
            [
                np.append(part.local_coordinates, [-1] * (part.local_rows - part.local_tokens))
                for part in step.parts
            ]
        ).astype(np.int64)
    )

    def local(values: Tensor) -> Tensor:
        taken = values[rows.clamp_min(0)].clone()
        taken[rows < 0] = 7.0  # padding rows may hold anything
        return taken

    inputs = [local(x).requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
    dout = local(tensors.dout)
    dout[rows < 0] = 0.0
    before = step.transport.bytes_sent
    out = attention(step, *inputs, mask=name)
    middle = step.transport.bytes_sent
    grads = torch.autograd.grad(out, inputs, dout)
    after = step.transport.bytes_sent
    assert middle - before == step.sent_bytes(name, Direction.FORWARD, case.shape)
    assert after - middle == step.sent_bytes(name, Direction.BACKWARD, case.shape)
    return [out.detach(), *grads]


def run_virtual(case: Case, name: str, tensors: Tensors, **options: Any) -> Results:
    """The plan on virtual ranks in this process."""
    executor = DCPExecutor(virtual_ranks=case.plan.num_ranks, **options)
    local = run_step(executor.prepare(case.plan), case, name, tensors)
    order = torch.from_numpy(batch_order(case.plan.parts[0]))
    declared = case.plan.parts[0].declared_bytes[name]
    assert executor.transport.bytes_sent == sum(declared)
    return Results(*(rows[order] for rows in local))


# Rounding of terms that nearly cancel, relative to the terms: 317 results of drawn fp32 cases whose
# terms were more than 100 times as large as their sum were off by at most 7.5e-9 of the terms.
CANCELLED = 2e-8


def assert_equal(
    given: Results,
    expected: Results,
    tolerance: float,
    terms: Mapping[str, float] | None = None,
) -> None:
    """Errors are at most `tolerance` times the largest expected value; results whose `terms` are
    more than 500 times as large (`largest_terms`) may be off by the rounding of these instead."""
    for name, value in given.tensors().items():
        wanted = expected.tensors()[name]
        size = float(wanted.abs().max()) if wanted.numel() else 0.0
        allowed = max(tolerance, CANCELLED * terms[name] / size if terms and size else 0.0)
        error = relative_error(value, wanted)
        assert error <= allowed, f"{name} is off by {error:.2e}; allowed is {allowed:.2e}"


def largest_terms(case: Case, name: str, tensors: Tensors) -> dict[str, float]:
    """The largest sum of absolute values of what is added up for any entry of each result. Where a
    row attends few keys, dq and dk can be thousands of times smaller: their terms cancel."""
    inputs = (x.double().abs() for x in (tensors.q, tensors.k, tensors.v, tensors.dout))
    q, k, v, dout = inputs
    repeat, scale = q.shape[1] // k.shape[1], case.shape.head_dim**-0.5
    largest = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for index, mask in enumerate(case.batch.masks[name]):
        rows = slice(int(case.batch.offsets[index]), int(case.batch.offsets[index + 1]))
        keys, values = (x[rows].repeat_interleave(repeat, dim=1) for x in (k, v))
        signed_keys = tensors.k[rows].double().repeat_interleave(repeat, dim=1)
        scores = torch.einsum("qhd,khd->hqk", tensors.q[rows].double(), signed_keys) * scale
        allowed = torch.from_numpy(mask.dense())
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
        weights = weights * (1 + torch.einsum("qhd,khd->hqk", q[rows], keys) * scale)
        out = torch.einsum("hqk,khd->qhd", weights, values)
        delta = (dout[rows] * out).sum(dim=-1).T.unsqueeze(-1)
        dweights = torch.einsum("qhd,khd->hqk", dout[rows], values) + delta
        dscores = weights * dweights * scale
        found = {
            "out": out,
            "dq": torch.einsum("hqk,khd->qhd", dscores, keys),
            "dk": repeat * torch.einsum("hqk,qhd->khd", dscores, q[rows]),
            "dv": repeat * torch.einsum("hqk,qhd->khd", weights, dout[rows]),
        }
        largest = {what: max(most, float(found[what].max())) for what, most in largest.items()}
    return largest

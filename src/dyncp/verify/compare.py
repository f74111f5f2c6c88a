"""Compares what a plan computes with dense attention, on random numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64
from dyncp.blocks import Batch
from dyncp.plan import Plan
from dyncp.verify.dense import attend, attend_backward
from dyncp.verify.interpret import Interpreted, interpret

# fp64 results of a right plan differ by rounding only, around 1e-15; a wrong pair shows above 1e-6.
TOLERANCE = 1e-10
# The head dimension changes no plan, so a small one will do.
HEAD_DIM = 4
# Plans that fit any head counts are run with these (q heads, kv heads).
ANY_HEADS = 2, 1
FIELDS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest relative error of each result over the whole batch; NaN: rows never written."""

    errors: Mapping[str, float]

    @property
    def largest(self) -> float:
        return float(np.max(list(self.errors.values())))

    @property
    def agrees(self) -> bool:
        return bool(self.largest <= TOLERANCE)  # NaN does not


def num_scores(plan: Plan, batch: Batch) -> int:
    """Scores that dense attention writes out: q heads × Σ length²."""
    return _heads(plan)[0] * sum(length**2 for length in batch.lengths)


def compare_with_dense(plan: Plan, batch: Batch, name: str, seed: int = 0) -> Comparison:
    """Runs the plan's mask `name` on all ranks, backward too where it has one, and dense attention
    sequence by sequence. A plan that can not be run raises PlanError. Small batches only."""
    rng, tokens = np.random.default_rng(seed), batch.num_tokens
    q_heads, kv_heads = _heads(plan)
    q, dout = rng.normal(size=(2, tokens, q_heads, HEAD_DIM))
    k, v = rng.normal(size=(2, tokens, kv_heads, HEAD_DIM))
    backward = plan.parts[0].mask_plan(name).backward is not None
    given = interpret(plan, name, q, k, v, dout if backward else None)
    expected = dense_attention(batch, name, (q, k, v), dout)
    errors = {
        field: _relative_error(getattr(given, field), getattr(expected, field))
        for field in FIELDS
        if getattr(given, field) is not None
    }
    return Comparison(errors)


def dense_attention(
    batch: Batch, name: str, inputs: tuple[Float64, Float64, Float64], dout: Float64
) -> Interpreted:
    """Attention and gradients in batch order, every sequence as one piece with all its scores."""
    scale = inputs[0].shape[2] ** -0.5
    pieces = []
    for first, mask in zip(batch.offsets[:-1].tolist(), batch.masks[name], strict=True):
        rows = slice(first, first + mask.length)
        q, k, v = (x[rows] for x in inputs)
        allowed = mask.dense()
        out, lse = attend(q, k, v, allowed, scale)
        delta = (dout[rows] * out).sum(axis=2)
        grads = attend_backward((q, k, v), allowed, scale, dout[rows], lse, delta)
        pieces.append((out, lse, *grads))
    return Interpreted(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _heads(plan: Plan) -> tuple[int, int]:
    shape = plan.parts[0].shape
    return (shape.q_heads, shape.kv_heads) if shape.exact else ANY_HEADS


def _relative_error(given: Float64, expected: Float64) -> float:
    """Largest difference over the largest value; rows without keys are −∞ on both sides."""
    finite = np.isfinite(expected)
    if not np.array_equal(given[~finite], expected[~finite]):
        return float("nan")
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    difference = float(np.abs(given[finite] - expected[finite]).max(initial=0.0))
    return difference / largest if largest else difference

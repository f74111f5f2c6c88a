"""interpret: runs a plan's programs on all ranks in fp64 numpy, from the plan alone.

It needs no batch and no mask: which pairs are allowed comes from the plan's own row ranges. So it
says what the plan means, whatever an executor does, and can be compared with dense attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Float64
from dyncp.blocks import Batch, Direction, HeadGroup
from dyncp.plan import Plan
from dyncp.verify.messages import entries_by_phase, run_programs
from dyncp.verify.numeric import NumericRank, attend, attend_backward
from dyncp.verify.verify_plan import check_parts
from dyncp.verify.violation import PlanError
from dyncp.verify.workspaces import fits


@dataclass(frozen=True, eq=False)
class Interpreted:
    """Results in batch order, fp64: `out` like q, `lse` [tokens, q heads], and the gradients where
    an output gradient was given."""

    out: Float64
    lse: Float64
    dq: Float64 | None = None
    dk: Float64 | None = None
    dv: Float64 | None = None


def interpret(
    plan: Plan,
    mask_name: str,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    dout: npt.ArrayLike | None = None,
    scale: float | None = None,
) -> Interpreted:
    """Attention of a whole batch (and its gradients, with `dout`) as the plan computes it.

    `q` and `dout` are [tokens, q_heads, head_dim], `k` and `v` [tokens, kv_heads, head_dim], tokens
    in batch order; `scale` defaults to 1/√head_dim. A plan that gets stuck, or reads what is not
    there, raises PlanError. Small batches only: every score is written out.
    """
    malformed = check_parts(plan)
    if malformed:
        raise PlanError.of(malformed)
    inputs = {name: np.asarray(x, np.float64) for name, x in (("q", q), ("k", k), ("v", v))}
    groups = _check_inputs(plan, mask_name, inputs)
    factor = float(inputs["q"].shape[2] ** -0.5) if scale is None else scale
    no_keys = np.full(inputs["q"].shape[:2], -np.inf)
    start = {**inputs, "out": np.zeros_like(inputs["q"]), "lse": no_keys}
    forward = _run(plan, mask_name, Direction.FORWARD, groups, start, factor)
    out, lse = forward["out"], forward["lse"]
    if dout is None:
        return Interpreted(out, lse)
    gradient = np.asarray(dout, np.float64)
    start = {**inputs, "dout": gradient, "lse": lse, "delta": (gradient * out).sum(axis=2)}
    start |= {f"d{name}": np.zeros_like(x) for name, x in inputs.items()}
    backward = _run(plan, mask_name, Direction.BACKWARD, groups, start, factor)
    return Interpreted(out, lse, backward["dq"], backward["dk"], backward["dv"])


def _check_inputs(
    plan: Plan, mask_name: str, inputs: Mapping[str, Float64]
) -> tuple[HeadGroup, ...]:
    part, q, k = plan.parts[0], inputs["q"], inputs["k"]
    part.mask_plan(mask_name)
    tokens = int(part.lengths.sum())
    if k.shape != inputs["v"].shape or len(q) != tokens or len(k) != tokens:
        raise ValueError(
            f"q, k and v have shapes {[x.shape for x in inputs.values()]}; the plan is for "
            f"{tokens} tokens, and k and v must be alike"
        )
    if not part.shape.exact:
        return (HeadGroup(0, k.shape[1]),)
    if (q.shape[1], k.shape[1]) != (part.shape.q_heads, part.shape.kv_heads):
        raise ValueError(
            f"q and k have {q.shape[1]} and {k.shape[1]} heads; the plan was made for "
            f"{part.shape.q_heads} and {part.shape.kv_heads}"
        )
    return part.head_groups


def _run(
    plan: Plan,
    name: str,
    direction: Direction,
    groups: tuple[HeadGroup, ...],
    start: Mapping[str, Float64],
    scale: float,
) -> dict[str, Float64]:
    """All fields at the end, in batch order."""
    for part in plan.parts:
        if not fits(part, part.masks[name].program(direction)):
            raise PlanError(f"rank {part.rank}: its slots do not fit into its workspaces")
    ranks = [NumericRank(part, part.masks[name], direction, groups, start) for part in plan.parts]
    stuck = run_programs([rank.program for rank in ranks], _NumericRun(ranks, scale))
    if stuck:
        raise PlanError(
            f"the plan is stuck ({direction.name.lower()}): {'; '.join(map(str, stuck))}"
        )
    end = {field: np.full_like(rows, np.nan) for field, rows in start.items()}
    for rank in ranks:
        for field, rows in end.items():
            rows[rank.coordinates] = rank.local(field)
    return end


class _NumericRun:
    """Instructions on real numbers; messages are flat arrays in a mailbox."""

    def __init__(self, ranks: list[NumericRank], scale: float) -> None:
        self._ranks, self._scale = ranks, scale
        self._sends = [entries_by_phase(rank.program.sends) for rank in ranks]
        self._receives = [entries_by_phase(rank.program.receives) for rank in ranks]
        self._in_flight: dict[tuple[int, int, int], Float64] = {}

    def launch(self, rank: int, phase: int, at: int) -> None:  # noqa: ARG002
        for peer, entries in self._sends[rank].get(phase, {}).items():
            if (rank, peer, phase) in self._in_flight:
                raise PlanError(f"rank {rank} launches phase {phase} while it is on its way")
            self._in_flight[rank, peer, phase] = self._ranks[rank].pack(entries)

    def wait(self, rank: int, phase: int, at: int) -> None:  # noqa: ARG002
        for peer, entries in self._receives[rank].get(phase, {}).items():
            message = self._in_flight.pop((peer, rank, phase), None)
            if message is None:
                raise PlanError(
                    f"rank {rank} waits in phase {phase} for a message that rank {peer} does "
                    "not send"
                )
            self._ranks[rank].unpack(entries, message)

    def compute(self, rank: int, division: int, at: int) -> None:
        self._ranks[rank].compute(division, at, self._scale)


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

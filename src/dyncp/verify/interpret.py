"""`interpret`: runs a plan's programs on all ranks in fp64 numpy, from the plan alone.

It needs no batch and no mask: the allowed pairs come from the plan's own row ranges. So it defines
what the plan means, independently of an executor, and can be compared with dense attention. Rows
that were never written are NaN, so that reading them shows in the results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import IS_INPUT, Batch, Direction, HeadGroup
from dyncp.plan import MaskPlan, Payload, Plan, RankPlan, Space
from dyncp.verify.coverage import decode_rows
from dyncp.verify.programs import Entry, Key, RunningRank, describe, key_of, run_programs
from dyncp.verify.verify_plan import PlanError, check_parts

# Rounding causes relative errors of about 1e-15 in fp64; a wrong pair causes more than 1e-6.
TOLERANCE = 1e-10
# Plans do not depend on the head dimension, so a small one is enough.
HEAD_DIM = 4
# (q heads, kv heads) to run plans with that fit any head counts.
ANY_HEADS = 2, 1
# The fields of each payload, and the accumulators that are reset when an input arrives.
FIELDS = {
    Payload.Q: ("q",),
    Payload.KV: ("k", "v"),
    Payload.OUT: ("out", "lse"),
    Payload.Q_DOUT: ("q", "dout", "lse", "delta"),
    Payload.DQ: ("dq",),
    Payload.DKV: ("dk", "dv"),
}
_RESET = {
    Payload.Q: {"out": 0.0, "lse": -np.inf},
    Payload.Q_DOUT: {"dq": 0.0},
    Payload.KV: {"dk": 0.0, "dv": 0.0},
}
_KEY_FIELDS = ("k", "v", "dk", "dv")


def allowed_pairs(ranges: Int64, first_key: int, last_key: int) -> Bool:
    """bool[rows, keys]: the keys of [first_key, last_key) that are in the ranges [rows, R, 2]."""
    key = np.arange(first_key, last_key)
    start, end = ranges[:, :, :1], ranges[:, :, 1:]
    return np.asarray(((key >= start) & (key < end)).any(axis=1))


def attend(
    q: Float64, k: Float64, v: Float64, allowed: Bool, scale: float
) -> tuple[Float64, Float64]:
    """Output [rows, q heads, dim] and log-sum-exp [rows, q heads]; 0 and −∞ if a row has no key."""
    scores = _scores(q, k, allowed, scale)
    top = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(axis=2, keepdims=True)
    shares = weights / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[:, :, 0].T
    return np.einsum("hqk,khd->qhd", shares, _repeat(v, q)), lse


def attend_backward(
    inputs: tuple[Float64, Float64, Float64],
    allowed: Bool,
    scale: float,
    dout: Float64,
    lse: Float64,
    delta: Float64,
) -> tuple[Float64, Float64, Float64]:
    """A tile's contributions to dq, dk and dv, from final log-sum-exps and row sums of dO·O."""
    q, k, v = inputs
    norm = np.where(lse == -np.inf, 0.0, lse).T[:, :, None]
    weights = np.exp(_scores(q, k, allowed, scale) - norm)
    dweights = np.einsum("qhd,khd->hqk", dout, _repeat(v, q))
    dscores = weights * (dweights - delta.T[:, :, None]) * scale
    dq = np.einsum("hqk,khd->qhd", dscores, _repeat(k, q))
    dk = np.einsum("hqk,qhd->khd", dscores, q)
    dv = np.einsum("hqk,qhd->khd", weights, dout)
    return dq, _reduce(dk, k), _reduce(dv, v)


def merge(out: Float64, lse: Float64, more: Float64, more_lse: Float64) -> None:
    """Merges a partial output and its log-sum-exp into `out` and `lse`, in place."""
    with np.errstate(invalid="ignore"):  # rows that were never written are NaN
        total = np.logaddexp(lse, more_lse)
    safe = np.where(total == -np.inf, 0.0, total)
    shares = (np.exp(side - safe)[:, :, None] for side in (lse, more_lse))
    out[:] = sum(part * share for part, share in zip((out, more), shares, strict=True))
    lse[:] = total


def _scores(q: Float64, k: Float64, allowed: Bool, scale: float) -> Float64:
    scores = np.einsum("qhd,khd->hqk", q, _repeat(k, q)) * scale
    return np.where(allowed, scores, -np.inf)


def _repeat(kv: Float64, q: Float64) -> Float64:
    """Repeats every kv head for each q head that it serves."""
    return np.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _reduce(grad: Float64, kv: Float64) -> Float64:
    """Sums gradients over the q heads of each kv head."""
    rows, heads, dim = kv.shape
    total: Float64 = grad.reshape(rows, heads, -1, dim).sum(axis=2)
    return total


class _NumericRank(RunningRank):
    """Runs instructions on real numbers; messages are flat arrays. `start` has every field of the
    whole batch, in batch order: inputs and initial accumulators."""

    def __init__(
        self,
        part: RankPlan,
        mask: MaskPlan,
        direction: Direction,
        groups: Sequence[HeadGroup],
        start: Mapping[str, Float64],
        scale: float,
    ) -> None:
        super().__init__(part, mask, direction)
        self._scale = scale
        self._fields = [
            {name: self._rows(name, g, group, start) for name in start}
            for g, group in enumerate(groups)
        ]
        block, _, ranges = decode_rows(part.blocks, mask.rows)
        self._ranges = {int(b): ranges[block == b] for b in np.unique(block)}

    def _rows(self, name: str, g: int, group: HeadGroup, start: Mapping[str, Float64]) -> Float64:
        """The workspace of one field and head group: local rows, then NaN."""
        heads = start[name].shape[1] // start["k"].shape[1]
        first = group.first_kv_head * heads
        own = start[name][self.part.local_coordinates, first : first + group.num_kv_heads * heads]
        space = Space.KV if name in _KEY_FIELDS else Space.Q
        count = int(self.program.workspace_rows[space, g])
        rows = np.full((count, *own.shape[1:]), np.nan)
        rows[: len(own)] = own
        return rows

    def pack(self, entries: Sequence[Entry], phase: int, at: int) -> Float64:  # noqa: ARG002
        """The concatenated fields of all payloads."""
        return np.concatenate([view.ravel() for entry in entries for view in self._views(entry)])

    def unpack(self, entries: Sequence[Entry], message: Any, phase: int, at: int) -> None:  # noqa: ARG002
        """Splits the message by this rank's own list, then fills slots and merges results."""
        expected = f"rank {self.part.rank} expects {', '.join(map(describe, entries))}"
        if message is None:
            raise PlanError(f"{expected} in phase {phase}, but no rank sends it")
        sizes = [view.size for entry in entries for view in self._views(entry)]
        if sum(sizes) != message.size:
            raise PlanError(f"{expected}: {sum(sizes)} numbers, but received {message.size}")
        pieces = iter(np.split(message, np.cumsum(sizes)[:-1]))
        for entry in entries:
            self._accept(entry, [next(pieces).reshape(v.shape) for v in self._views(entry)])

    def _views(self, entry: Entry) -> list[Float64]:
        rows, fields = self.rows_of(key_of(entry)), self._fields[entry[1]]
        return [fields[name][rows] for name in FIELDS[Payload(entry[0])]]

    def _accept(self, entry: Entry, values: list[Float64]) -> None:
        payload, views = Payload(entry[0]), self._views(entry)
        if payload is Payload.OUT:
            merge(views[0], views[1], values[0], values[1])
            return
        for view, value in zip(views, values, strict=True):
            view[:] = value if IS_INPUT[payload] else view + value
        for name, initial in _RESET.get(payload, {}).items():
            if name in self._fields[entry[1]]:
                self._fields[entry[1]][name][self.rows_of(key_of(entry))] = initial

    def compute(self, division: int, at: int) -> None:
        tiles, blocks = self.mask.tiles, self.part.blocks
        for index in np.flatnonzero(self.program.tile_division == division):
            group = int(tiles.head_group[index])
            q_block, k_block = int(tiles.q_block[index]), int(tiles.k_block[index])
            rows = self._live_rows((int(Space.Q), group, q_block), at)
            keys = self._live_rows((int(Space.KV), group, k_block), at)
            first, last = int(blocks.start[k_block]), int(blocks.end[k_block])
            allowed = allowed_pairs(self._ranges[q_block], first, last)
            fields = self._fields[group]
            inputs = fields["q"][rows], fields["k"][keys], fields["v"][keys]
            if self.direction is Direction.FORWARD:
                more = attend(*inputs, allowed, self._scale)
                merge(fields["out"][rows], fields["lse"][rows], *more)
                continue
            saved = (fields["dout"][rows], fields["lse"][rows], fields["delta"][rows])
            dq, dk, dv = attend_backward(inputs, allowed, self._scale, *saved)
            fields["dq"][rows] += dq
            fields["dk"][keys] += dk
            fields["dv"][keys] += dv

    def _live_rows(self, key: Key, at: int) -> slice:
        slots = self.program.slots
        if key in self.slot_of:
            first, last = slots.first[self.slot_of[key]], slots.last[self.slot_of[key]]
            if not first <= at <= last:
                space, group, block = key
                raise PlanError(
                    f"rank {self.part.rank} reads {Space(space).name} of block {block}, head group "
                    f"{group} at instruction {at}; its slot holds it from {first} to {last}"
                )
        return self.rows_of(key)

    def local(self, name: str) -> Float64:
        """A field of the local tokens, with the heads of all head groups."""
        count = self.part.local_tokens
        return np.concatenate([fields[name][:count] for fields in self._fields], axis=1)


@dataclass(frozen=True, eq=False)
class Interpreted:
    """Results in batch order, fp64: `out` has the shape of q, `lse` is [tokens, q heads]. Gradients
    are None unless an output gradient was given."""

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
    in batch order; `scale` defaults to 1/√head_dim. Raises PlanError if the plan deadlocks, if a
    message is not what its receiver expects, or if a block is read outside its slot's lifetime.
    Small batches only: all scores are materialised.
    """
    unsafe = check_parts(plan)
    if unsafe:
        raise PlanError.of(unsafe)
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
            f"{tokens} tokens, and k and v must have the same shape"
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
    """Runs one direction on all ranks, and returns all fields in batch order."""
    ranks = [
        _NumericRank(part, part.masks[name], direction, groups, start, scale) for part in plan.parts
    ]
    stuck = run_programs(ranks)
    if stuck:
        raise PlanError(f"the plan deadlocks ({direction.name.lower()}): {'; '.join(stuck)}")
    end = {field: np.full_like(rows, np.nan) for field, rows in start.items()}
    for rank in ranks:
        for field, rows in end.items():
            rows[rank.part.local_coordinates] = rank.local(field)
    return end


@dataclass(frozen=True, slots=True)
class Comparison:
    """Largest relative error of each result over the batch; NaN if rows were never written."""

    errors: Mapping[str, float]

    @property
    def largest(self) -> float:
        return float(np.max(list(self.errors.values())))

    @property
    def agrees(self) -> bool:
        return bool(self.largest <= TOLERANCE)  # NaN does not


def num_scores(plan: Plan, batch: Batch) -> int:
    """Number of scores that dense attention materialises: q heads × Σ length²."""
    return _heads(plan)[0] * sum(length**2 for length in batch.lengths)


def compare_with_dense(plan: Plan, batch: Batch, name: str, seed: int = 0) -> Comparison:
    """Runs mask `name` of the plan on random inputs (also backward, unless it is forward-only) and
    compares with dense attention. Raises PlanError if the plan cannot be run. Small batches only.
    """
    rng, tokens = np.random.default_rng(seed), batch.num_tokens
    q_heads, kv_heads = _heads(plan)
    q, dout = rng.normal(size=(2, tokens, q_heads, HEAD_DIM))
    k, v = rng.normal(size=(2, tokens, kv_heads, HEAD_DIM))
    backward = plan.parts[0].mask_plan(name).backward is not None
    given = interpret(plan, name, q, k, v, dout if backward else None)
    expected = dense_attention(batch, name, (q, k, v), dout)
    errors = {
        field: _relative_error(value, getattr(expected, field))
        for field, value in vars(given).items()
        if value is not None
    }
    return Comparison(errors)


def dense_attention(
    batch: Batch, name: str, inputs: tuple[Float64, Float64, Float64], dout: Float64
) -> Interpreted:
    """Attention and gradients in batch order, computed from all scores of each sequence."""
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
    """Largest difference divided by the largest value; NaN unless both are −∞ in the same rows
    (those without keys)."""
    finite = np.isfinite(expected)
    if not np.array_equal(given[~finite], expected[~finite]):
        return float("nan")
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    difference = float(np.abs(given[finite] - expected[finite]).max(initial=0.0))
    return difference / largest if largest else difference

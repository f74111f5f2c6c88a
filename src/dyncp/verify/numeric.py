"""One rank of the interpreter: plain fp64 attention over workspaces with real numbers.

Rows that nothing was written to are NaN, so that whatever reads them shows.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import Direction, HeadGroup
from dyncp.plan import INPUT_SPACE, RESULT_SPACE, MaskPlan, Payload, Program, RankPlan, Space
from dyncp.verify.coverage import decode_rows
from dyncp.verify.messages import Entry, describe
from dyncp.verify.violation import PlanError
from dyncp.verify.workspaces import local_rows


def allowed_pairs(ranges: Int64, first_key: int, last_key: int) -> Bool:
    """bool[rows, keys]: keys in [first_key, last_key) that lie in the rows' ranges [rows, R, 2]."""
    key = np.arange(first_key, last_key)
    start, end = ranges[:, :, :1], ranges[:, :, 1:]
    return np.asarray(((key >= start) & (key < end)).any(axis=1))


def attend(
    q: Float64, k: Float64, v: Float64, allowed: Bool, scale: float
) -> tuple[Float64, Float64]:
    """Output [rows, q heads, dim] and log-sum-exp [rows, q heads]; 0 and −∞ without any key."""
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
    """This tile's share of dq, dk and dv, from the final log-sum-exp and the row sums of dO·O."""
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
    with np.errstate(invalid="ignore"):  # NaN is how unfilled rows show
        total = np.logaddexp(lse, more_lse)
    safe = np.where(total == -np.inf, 0.0, total)
    shares = (np.exp(side - safe)[:, :, None] for side in (lse, more_lse))
    out[:] = sum(part * share for part, share in zip((out, more), shares, strict=True))
    lse[:] = total


def _scores(q: Float64, k: Float64, allowed: Bool, scale: float) -> Float64:
    scores = np.einsum("qhd,khd->hqk", q, _repeat(k, q)) * scale
    return np.where(allowed, scores, -np.inf)


def _repeat(kv: Float64, q: Float64) -> Float64:
    """Every kv head once for each q head that it serves."""
    return np.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _reduce(grad: Float64, kv: Float64) -> Float64:
    """Sum over the q heads of each kv head."""
    rows, heads, dim = kv.shape
    total: Float64 = grad.reshape(rows, heads, -1, dim).sum(axis=2)
    return total


# What payloads consist of, and which accumulators start anew when an input arrives.
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


class NumericRank:
    """`start` has every field in batch order: inputs, and accumulators as they begin."""

    def __init__(
        self,
        part: RankPlan,
        mask: MaskPlan,
        direction: Direction,
        groups: Sequence[HeadGroup],
        start: Mapping[str, Float64],
    ) -> None:
        self._part, self._mask, self._direction = part, mask, direction
        self.program: Program = mask.program(direction)
        self.coordinates, self._place = _layout(part)
        self._alive: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._add_slots()
        self._fields = [
            {name: self._rows(name, g, group, start) for name in start}
            for g, group in enumerate(groups)
        ]
        block, _, ranges = decode_rows(part.blocks, mask.rows)
        self._ranges = {int(b): ranges[block == b] for b in np.unique(block)}

    def _add_slots(self) -> None:
        slots = self.program.slots
        columns = (slots.space, slots.head_group, slots.block, slots.row, slots.first, slots.last)
        for space, group, block, row, first, last in zip(
            *(c.tolist() for c in columns), strict=True
        ):
            self._place[space, group, block] = row
            self._alive[space, group, block] = (first, last)

    def _rows(self, name: str, g: int, group: HeadGroup, start: Mapping[str, Float64]) -> Float64:
        """The workspace rows of one field and head group: own rows, then NaN."""
        heads = start[name].shape[1] // start["k"].shape[1]
        first = group.first_kv_head * heads
        own = start[name][self.coordinates, first : first + group.num_kv_heads * heads]
        space = Space.KV if name in _KEY_FIELDS else Space.Q
        count = int(self.program.workspace_rows[space, g])
        rows = np.full((count, *own.shape[1:]), np.nan)
        rows[: len(own)] = own
        return rows

    def _slice(self, space: Space, group: int, block: int) -> slice:
        row = self._place.get((int(space), group, block))
        if row is None:
            raise PlanError(
                f"rank {self._part.rank} has no place for {space.name} of block {block}, "
                f"head group {group}"
            )
        tokens = int(self._part.blocks.end[block] - self._part.blocks.start[block])
        return slice(row, row + tokens)

    def pack(self, entries: Sequence[Entry]) -> Float64:
        """One flat message: the fields of its payloads, one after the other."""
        return np.concatenate([view.ravel() for entry in entries for view in self._views(entry)])

    def unpack(self, entries: Sequence[Entry], message: Float64) -> None:
        """Cuts the message by this rank's own list, then fills slots and merges results."""
        sizes = [view.size for entry in entries for view in self._views(entry)]
        if sum(sizes) != message.size:
            raise PlanError(
                f"rank {self._part.rank} expects {sum(sizes)} numbers for "
                f"{', '.join(map(describe, entries))}, but {message.size} arrive"
            )
        pieces = iter(np.split(message, np.cumsum(sizes)[:-1]))
        for entry in entries:
            self._accept(entry, [next(pieces).reshape(v.shape) for v in self._views(entry)])

    def _views(self, entry: Entry) -> Iterator[Float64]:
        kind, group, block = entry
        payload = Payload(kind)
        space = INPUT_SPACE[payload] if payload in INPUT_SPACE else RESULT_SPACE[payload]
        rows = self._slice(space, group, block)
        return (self._fields[group][name][rows] for name in FIELDS[payload])

    def _accept(self, entry: Entry, values: list[Float64]) -> None:
        kind, group, block = entry
        payload, views = Payload(kind), list(self._views(entry))
        if payload is Payload.OUT:
            merge(views[0], views[1], values[0], values[1])
            return
        for view, value in zip(views, values, strict=True):
            view[:] = value if payload in INPUT_SPACE else view + value
        for name, initial in _RESET.get(payload, {}).items():
            if name in self._fields[group]:
                self._fields[group][name][self._slice(INPUT_SPACE[payload], group, block)] = initial

    def compute(self, division: int, at: int, scale: float) -> None:
        tiles = self._mask.tiles
        for index in np.flatnonzero(self.program.tile_division == division):
            group = int(tiles.head_group[index])
            q_block, k_block = int(tiles.q_block[index]), int(tiles.k_block[index])
            rows = self._live_slice(Space.Q, group, q_block, at)
            keys = self._live_slice(Space.KV, group, k_block, at)
            first, last = self._part.blocks.start[k_block], self._part.blocks.end[k_block]
            allowed = allowed_pairs(self._ranges[q_block], int(first), int(last))
            fields = self._fields[group]
            inputs = fields["q"][rows], fields["k"][keys], fields["v"][keys]
            if self._direction is Direction.FORWARD:
                merge(fields["out"][rows], fields["lse"][rows], *attend(*inputs, allowed, scale))
                continue
            saved = (fields["dout"][rows], fields["lse"][rows], fields["delta"][rows])
            dq, dk, dv = attend_backward(inputs, allowed, scale, *saved)
            fields["dq"][rows] += dq
            fields["dk"][keys] += dk
            fields["dv"][keys] += dv

    def _live_slice(self, space: Space, group: int, block: int, at: int) -> slice:
        first, last = self._alive.get((int(space), group, block), (at, at))
        if not first <= at <= last:
            raise PlanError(
                f"rank {self._part.rank} reads {space.name} of block {block}, head group {group} "
                f"at instruction {at}; its slot holds it from {first} to {last}"
            )
        return self._slice(space, group, block)

    def local(self, name: str) -> Float64:
        """A field of the own tokens, head groups side by side."""
        count = len(self.coordinates)
        return np.concatenate([fields[name][:count] for fields in self._fields], axis=1)


def _layout(part: RankPlan) -> tuple[Int64, dict[tuple[int, int, int], int]]:
    """Coordinates of the own tokens, and the first row of each own block in every workspace."""
    blocks, offset = part.blocks, np.cumsum(part.lengths, dtype=np.int64) - part.lengths
    coordinates: list[int] = []
    place: dict[tuple[int, int, int], int] = {}
    for block in np.flatnonzero(blocks.owner == part.rank).tolist():
        for space in Space:
            for group in range(len(part.head_groups)):
                place[int(space), group, block] = len(coordinates)
        first = int(offset[blocks.sequence[block]])
        coordinates.extend(range(first + blocks.start[block], first + blocks.end[block]))
    assert len(coordinates) <= local_rows(part)
    return np.asarray(coordinates, np.int64), place

"""Row work: what a call copies, packs, unpacks, merges and rounds beside its attention kernels.

Every point of a rank's program at which rows are moved is one launch, which reads and writes:

    forward    START    own q, k, v: into the workspace, where that has slots; what is sent of them
               WAIT     received inputs: into their slots
               LAUNCH   inputs that are passed on; results: every contribution, into the message
               END      every contribution to own rows, into the output
    backward   START    as forward, with dout; out and dout for the row sums; accumulators: cleared
               WAIT     as forward
               LAUNCH   as forward; results: accumulators and received results, into the message
               END      accumulators of own rows and received results, into dq, dk, dv

A contribution is what one kernel call leaves of a block's output, or what was received of it.
Backward, all calls add to the same accumulator. Where one call makes all of a rank's output, it is
written straight and nothing is merged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import IS_INPUT, OF_KEYS, AttentionShape, Direction, HeadGroup, Payload
from dyncp.cost.cost_model import CostModel


class Sent(NamedTuple):
    """Everything that travels, numbers[payloads] each; `size` in bytes."""

    phase: Int64
    source: Int64
    target: Int64
    kind: Int64
    group: Int64
    block: Int64
    size: Int64


class Touched(NamedTuple):
    """Query blocks that kernel calls meet, numbers[calls × blocks] each: one for every call (a
    `cell`, which is rank × divisions + division, and a head group) and block."""

    cell: Int64
    group: Int64
    block: Int64


class Moved(NamedTuple):
    """Bytes read and written at every point, float64[ranks] and [ranks, phases]."""

    start: Float64
    launch: Float64
    wait: Float64
    end: Float64

    def seconds(self, cost: CostModel) -> "Moved":
        """Of every point: its launch, where anything is moved, and its bytes. The profile's `copy`
        counts bytes that are read and written."""
        profile = cost.profile
        points = (
            np.where(point > 0, profile.launch_seconds + point / (2 * profile.copy), 0.0)
            for point in self
        )
        return Moved(*points)

    @property
    def bytes_per_rank(self) -> Float64:
        total: Float64 = self.start + self.end + self.launch.sum(axis=1) + self.wait.sum(axis=1)
        return total

    @property
    def launches_per_rank(self) -> Int64:
        points = (self.start[:, None], self.end[:, None], self.launch, self.wait)
        return np.asarray(sum((point > 0).sum(axis=1) for point in points), np.int64)


class RowBytes:
    """Bytes of one token's row, int64[head groups] each: of queries and of keys with values, as
    they are given, and of accumulators (`wide`); `per_head` of log-sum-exps or row sums."""

    def __init__(self, shape: AttentionShape, groups: Sequence[HeadGroup]) -> None:
        keys = np.asarray([group.num_kv_heads for group in groups], np.int64)
        heads = keys * shape.q_heads_per_kv_head
        self.q, self.kv = heads * shape.head_dim, 2 * keys * shape.head_dim
        self.q_wide, self.kv_wide = (x * shape.accumulator_bytes for x in (self.q, self.kv))
        self.q, self.kv = self.q * shape.item_bytes, self.kv * shape.item_bytes
        self.per_head = heads * shape.accumulator_bytes


def division_seconds(rows: float, direction: Direction, cost: CostModel) -> float:
    """What one more division adds to the row work of a rank with `rows` rows, about: a launch that
    unpacks, the gap before a call, and forward a contribution more to be read by the last."""
    if not cost.knows_launches:
        return 0.0
    width = RowBytes(cost.shape, cost.shape.head_groups(1))
    read = float((width.q + width.per_head).sum()) if direction is Direction.FORWARD else 0.0
    return 2 * cost.profile.launch_seconds + rows * read / (2 * cost.profile.copy)


def least_row_seconds(direction: Direction, cost: CostModel) -> float:
    """What a rank's own row takes at least, launches not counted. Backward, row sums are made of
    out and dout, accumulators are cleared, and rounded to dq, dk and dv; forward, outputs may be
    written straight."""
    if direction is Direction.FORWARD or not cost.knows_launches:
        return 0.0
    width = RowBytes(cost.shape, cost.shape.head_groups(1))
    moved = 3 * width.q + width.kv + width.per_head + 2 * (width.q_wide + width.kv_wide)
    return float(moved.sum()) / (2 * cost.profile.copy)


@dataclass(frozen=True, eq=False)
class RowCosts:
    """Who holds what in one direction of one mask: blocks with their `tokens` and `owner`s. `fixed`
    says that inputs are copied wherever anything travels, for graphs."""

    num_ranks: int
    num_phases: int
    num_divisions: int
    tokens: Int64
    owner: Int64
    direction: Direction
    widths: RowBytes
    fixed: bool

    def moved(self, sent: Sent, touched: Touched | None) -> Moved:
        """Forward needs `touched`."""
        comes, known = IS_INPUT[sent.kind], self.owner[sent.block]
        home = sent.source == known
        launch = self.by_phase(sent.source, sent, 2 * sent.size, comes & ~home)
        launch += self._results(sent, touched)
        start = 2.0 * self._by_rank(sent.source, sent.size, comes & home & self._first(sent))
        start += self._start(sent, comes)
        wait = self.by_phase(sent.target, sent, 2 * sent.size, comes)
        merged = self._by_rank(sent.target, sent.size, ~comes & (sent.target == known))
        return Moved(start, launch, wait, self._end(sent, comes, touched, merged))

    def _first(self, sent: Sent) -> Bool:
        """Payloads that several ranks get in one phase are packed once, since their messages are
        mostly the same."""
        packed = self._key(sent.kind, sent.source, sent) * self.num_phases + sent.phase
        first = np.zeros(len(packed), np.bool_)
        first[np.unique(packed, return_index=True)[1]] = True
        return first

    @property
    def own(self) -> Float64:
        return np.bincount(self.owner, self.tokens, self.num_ranks).astype(np.float64)

    def _start(self, sent: Sent, comes: Bool) -> Float64:
        """Without what is packed."""
        width, own = self.widths, self.own
        of_keys, groups = OF_KEYS[sent.kind], len(width.q)
        slots = [
            np.bincount(
                sent.target[chosen] * groups + sent.group[chosen], minlength=self.num_ranks * groups
            ).reshape(self.num_ranks, groups)
            > 0
            for chosen in (comes & ~of_keys, comes & of_keys)
        ]
        if self.fixed:  # where anything travels, all inputs are copied
            takes_part = np.bincount(sent.source, minlength=self.num_ranks) > 0
            takes_part |= np.bincount(sent.target, minlength=self.num_ranks) > 0
            slots = [some | takes_part[:, None] for some in slots]
        if self.direction is Direction.FORWARD:
            return own * (slots[0] @ (2 * width.q) + slots[1] @ (2 * width.kv))
        # dout is read for the row sums already.
        copied = slots[0] @ (3 * width.q + 2 * width.per_head) + slots[1] @ (2 * width.kv)
        sums = (2 * width.q + width.per_head).sum()
        cleared = (width.q_wide + width.kv_wide).sum()
        wide = np.where(of_keys, width.kv_wide[sent.group], width.q_wide[sent.group])
        taken = self._by_rank(sent.target, self.tokens[sent.block] * wide, comes)
        return np.asarray(own * (copied + sums + cleared) + taken, np.float64)

    def _results(self, sent: Sent, touched: Touched | None) -> Float64:
        """Of results that leave, by rank and phase: they are written, and what they are made of is
        read."""
        at = np.flatnonzero(~IS_INPUT[sent.kind])
        results = Sent(*(column[at] for column in sent))
        sizes, width = results.size, self.widths
        kind, key = results.kind, self._key(results.kind, results.source, results)
        if self.direction is Direction.BACKWARD:
            keys = OF_KEYS[kind]
            wide = np.where(keys, width.kv_wide[results.group], width.q_wide[results.group])
            sizes = sizes + self.tokens[results.block] * wide
        found = self.by_phase(results.source, results, sizes)
        order = np.argsort(key, kind="stable")
        passed = np.flatnonzero(results.target != self.owner[results.block])
        summand = Sent(*(column[passed] for column in results))
        asked = self._key(summand.kind, summand.target, summand)
        self._read(found, results, key[order], order, asked, summand.size)
        if touched is not None:
            rank = touched.cell // self.num_divisions
            away = np.flatnonzero(self.owner[touched.block] != rank)
            calls = Touched(*(column[away] for column in touched))
            asked = self._key(np.full(len(away), Payload.OUT), rank[away], calls)
            size = self.tokens[calls.block] * (width.q + width.per_head)[calls.group]
            self._read(found, results, key[order], order, asked, size)
        return found

    def _read(
        self, found: Float64, results: Sent, keys: Int64, order: Int64, asked: Int64, size: Int64
    ) -> None:
        """Adds what is read for the results with keys `asked` to their points."""
        if not len(keys):
            return
        near = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
        there = keys[near] == asked
        result = order[near[there]]
        cell = results.source[result] * self.num_phases + results.phase[result]
        read = np.bincount(cell, size[there], self.num_ranks * self.num_phases)
        found += read.reshape(found.shape)

    def _end(self, sent: Sent, comes: Bool, touched: Touched | None, merged: Float64) -> Float64:
        width, own = self.widths, self.own
        if self.direction is Direction.BACKWARD:
            every = (width.q_wide + width.kv_wide + width.q + width.kv).sum()
            return np.asarray(own * every + merged, np.float64)
        assert touched is not None, "forward, calls leave partial outputs"
        row, groups = width.q + width.per_head, len(width.q)
        rank = touched.cell // self.num_divisions
        mine = self.owner[touched.block] == rank
        read = self.tokens[touched.block] * row[touched.group]
        read_by_rank = self._by_rank(rank, read, mine)
        call = np.unique(touched.cell * groups + touched.group)
        calls = np.bincount(
            call // groups // self.num_divisions * groups + call % groups,
            minlength=self.num_ranks * groups,
        )
        several = (calls.reshape(self.num_ranks, groups) > 1).any(axis=1)
        slots = np.bincount(sent.target[comes & ~OF_KEYS[sent.kind]], minlength=self.num_ranks) > 0
        merges = several | slots | (merged > 0)
        if self.fixed:
            merges |= np.bincount(sent.source, minlength=self.num_ranks) > 0
            merges |= np.bincount(sent.target, minlength=self.num_ranks) > 0
        return np.where(merges, own * row.sum() + read_by_rank + merged, 0.0)

    def _key(self, kind: Int64, rank: Int64, what: Sent | Touched) -> Int64:
        number = (kind * self.num_ranks + rank) * len(self.widths.q) + what.group
        return np.asarray(number * len(self.tokens) + what.block, np.int64)

    def _by_rank(self, rank: Int64, size: Int64, chosen: Bool) -> Float64:
        return np.bincount(rank[chosen], size[chosen], self.num_ranks).astype(np.float64)

    def by_phase(
        self, rank: Int64, sent: Sent, size: Int64, chosen: Bool | slice = slice(None)
    ) -> Float64:
        """Sums of `size` by rank and phase."""
        cell = rank[chosen] * self.num_phases + sent.phase[chosen]
        total = np.bincount(cell, size[chosen], self.num_ranks * self.num_phases)
        return total.astype(np.float64).reshape(self.num_ranks, self.num_phases)

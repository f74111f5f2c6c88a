"""`CostModel`: seconds of tiles, kernel calls and copies, as pure functions of arrays; and
`RowCosts`: the bytes that a call copies, packs, unpacks, merges and rounds besides its attention
kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import (
    IS_INPUT,
    OF_KEYS,
    AttentionShape,
    BlockGraph,
    Direction,
    HeadGroup,
    Payload,
)
from dyncp.cost.profile import Profile

# Forward multiplies q·kᵀ and p·v; backward does q·kᵀ again and dO·vᵀ, pᵀ·dO, dS·k, dSᵀ·q.
FORWARD_PRODUCTS = 2
BACKWARD_FLOPS = 2.5
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices the attention of `shape` on ranks like `profile` says. `graphs`: whether plans are
    replayed as CUDA graphs, which spares the host most of its work."""

    profile: Profile
    shape: AttentionShape
    graphs: bool = True

    def kernel_area(self, pairs: Numbers, rows: Numbers, keys: Numbers) -> Float64:
        """Pairs that the kernel works through, those that the mask forbids included.

        Keys come in whole kernel tiles of side t; rows share theirs with neighbours. Every row ends
        somewhere inside a kernel tile, half a tile on average, unless everything is allowed:

            area = min(rows × K, pairs × K / keys + rows × t / 2),  K = keys rounded up to t

        A causal 1024 × 1024 block with t = 128 has 524,800 pairs and an area of 590,336; the kernel
        touches 36 of its 64 tiles, 589,824.
        """
        side = self.profile.kernel_tile
        keys = np.asarray(keys, np.float64)
        whole = np.ceil(keys / side) * side
        area: Float64 = np.minimum(rows * whole, pairs * (whole / keys) + rows * (side / 2))
        return area

    def edge_area(self, pairs: Numbers, rows: Numbers, keys: Numbers) -> Float64:
        """The part of `kernel_area` in kernel tiles that are not full.

        An edge of the mask runs through one kernel tile per row, and so does the end of keys that
        are no multiple of t; the end of such rows runs through all that the last rows attend.
        A causal 1024 × 1024 block with t = 128 has 8 such tiles, 131,072.
        """
        side = self.profile.kernel_tile
        area = self.kernel_area(pairs, rows, keys)
        whole = np.ceil(np.asarray(keys, np.float64) / side) * side
        across = np.where(pairs < rows * whole, rows, 0)
        along = np.where(rows % side > 0, area / np.maximum(rows, 1), 0)
        edge: Float64 = np.minimum(area, side * (across + along))
        return edge

    def flops(self, area: Numbers, heads: Numbers | int, direction: Direction) -> Float64:
        """4 × area × head_dim per q head forward, 2.5 times that backward."""
        forward = (
            2.0 * FORWARD_PRODUCTS * self.shape.head_dim * np.asarray(area, np.float64) * heads
        )
        return forward * BACKWARD_FLOPS if direction is Direction.BACKWARD else forward

    def tile_seconds(
        self,
        pairs: Numbers,
        rows: Numbers,
        keys: Numbers,
        heads: Numbers | int,
        direction: Direction,
    ) -> Float64:
        """Seconds of tiles with `pairs` allowed pairs out of rows × keys, for `heads` q heads."""
        area = self.kernel_area(pairs, rows, keys)
        more = self.edge_factor(direction) - 1
        if more:
            area = area + more * self.edge_area(pairs, rows, keys)
        return self.flops(area, heads, direction) / self.attention_rate(direction)

    def work_seconds(
        self, area: Numbers, edge: Numbers, rows: Numbers, longest: Numbers, direction: Direction
    ) -> Float64:
        """Seconds of kernel calls (`CallWork`), their overhead left out.

        `lanes` rows of kernel tiles run at a time, and each costs some keys more than it has. At
        the end lanes stand idle, for half a row on average; no call is shorter than its longest
        row."""
        lanes, side, row = self.profile.lanes, self.profile.kernel_tile, self.row_keys(direction)
        work = area + (self.edge_factor(direction) - 1) * edge + row * side * rows
        spread = work * (1 + lanes / (2 * np.maximum(rows, 1)))
        alone = lanes * side * (longest + row)
        return self.flops(np.maximum(spread, alone), 1, direction) / self.attention_rate(direction)

    def row_seconds(self, rows: float, heads: int, direction: Direction) -> float:
        """Extra seconds of a call for `rows` query rows (backward: key rows)."""
        area = np.asarray(self.row_keys(direction) * rows, np.float64)
        return float(self.flops(area, heads, direction) / self.attention_rate(direction))

    @property
    def knows_launches(self) -> bool:
        """Whether the profile says what a call takes besides its attention kernels."""
        return self.profile.launch_seconds > 0

    @property
    def host_seconds(self) -> float:
        """What the host needs to issue one instruction."""
        return self.profile.host_seconds if self.graphs else self.profile.host_seconds_eager

    def knows_rows(self, direction: Direction) -> bool:
        return self.profile.lanes > 0 or self.row_keys(direction) > 0

    def row_keys(self, direction: Direction) -> float:
        """Fixed cost of a row of kernel tiles, as a number of keys."""
        backward = direction is Direction.BACKWARD
        return self.profile.row_backward if backward else self.profile.row_forward

    def edge_factor(self, direction: Direction) -> float:
        """Seconds of a kernel tile that is not full over those of one that is."""
        backward = direction is Direction.BACKWARD
        return self.profile.edge_backward if backward else self.profile.edge_forward

    def attention_rate(self, direction: Direction) -> float:
        backward = direction is Direction.BACKWARD
        return self.profile.attention_backward if backward else self.profile.attention_forward

    def call_seconds(self, num_calls: Numbers | int) -> Float64:
        """Overhead of kernel calls, on top of their tiles; the gaps before them are left out."""
        return np.asarray(self.profile.call_seconds * num_calls, np.float64)

    def copy_seconds(self, num_bytes: Numbers | int) -> Float64:
        """Packing or unpacking of messages."""
        return np.asarray(num_bytes / self.profile.copy, np.float64)

    def heads_of(self, groups: Sequence[HeadGroup]) -> Int64:
        """Query heads of each head group."""
        per_kv = self.shape.q_heads_per_kv_head
        return np.asarray([group.num_kv_heads * per_kv for group in groups], np.int64)

    def graph_tile_seconds(self, graph: BlockGraph, name: str, direction: Direction) -> Float64:
        """Seconds of every tile of mask `name`."""
        more = self.edge_factor(direction) - 1
        area = _graph_area(self, graph, name)
        if more:
            area = area + more * _graph_area(self, graph, name, edge=True)
        return self.flops(area, 1, direction) / self.attention_rate(direction)

    def groups_for(
        self, planned: AttentionShape, groups: tuple[HeadGroup, ...]
    ) -> tuple[HeadGroup, ...]:
        """Head groups of a plan made for shape `planned` when it runs with this shape."""
        if not planned.exact:
            return self.shape.head_groups(1)
        if self.shape.kv_heads != planned.kv_heads:
            raise ValueError(
                f"the cost model has kv_heads={self.shape.kv_heads}, but the plan was made for "
                f"kv_heads={planned.kv_heads}; give CostModel the shape of the plan"
            )
        return groups


@lru_cache(maxsize=4)  # both directions are asked for, by scheduler and simulator
def _graph_area(cost: CostModel, graph: BlockGraph, name: str, *, edge: bool = False) -> Float64:
    """Kernel area × q heads of every tile, or that of kernel tiles that are not full."""
    tiles, tokens = graph.tiles[name], graph.blocks.tokens
    heads = cost.heads_of(cost.groups_for(graph.shape, graph.head_groups))
    rows, keys = tokens[tiles.q_block], tokens[tiles.k_block]
    find = cost.edge_area if edge else cost.kernel_area
    area: Float64 = find(tiles.pairs, rows, keys) * heads[tiles.head_group]
    return area


class CallTiles(NamedTuple):
    """Tiles of many kernel calls, numbers[tiles] each. Those with the same `cell` (a division of a
    rank) and `group` are one call; `heads` are the q heads of the group."""

    cell: Int64
    group: Int64
    q_block: Int64
    k_block: Int64
    pairs: Numbers
    rows: Numbers
    keys: Numbers
    heads: Int64


class CallWork(NamedTuple):
    """Kernel calls, numbers[calls] each: `area` and `edge` of the cost model, and `rows` of kernel
    tiles, all times q heads; `longest` are the keys of the longest row."""

    cell: Int64
    area: Float64
    edge: Float64
    rows: Float64
    longest: Float64

    def by_cell(self, num_cells: int) -> "CallWork":
        """Calls of a cell added up."""
        sums = [np.bincount(self.cell, column, num_cells) for column in self[1:]]
        return CallWork(np.arange(num_cells), *(x.astype(np.float64) for x in sums))


class CallBlocks(NamedTuple):
    """Blocks whose rows calls work by (forward those of queries, backward of keys), one entry for
    every call and block, ordered by call: numbers[entries]. `first` is one of their tiles, and
    `of_tile`, numbers[tiles], the entry of each tile."""

    cell: Int64
    group: Int64
    block: Int64
    first: Int64
    of_tile: Int64

    @staticmethod
    def of(tiles: CallTiles, direction: Direction) -> "CallBlocks":
        block = tiles.k_block if direction is Direction.BACKWARD else tiles.q_block
        num_groups, num_blocks = (int(x.max(initial=0)) + 1 for x in (tiles.group, block))
        key = (tiles.cell * num_groups + tiles.group) * num_blocks + block
        keys, first, of_tile = np.unique(key, return_index=True, return_inverse=True)
        call, number = np.divmod(keys, num_blocks)
        return CallBlocks(call // num_groups, call % num_groups, number, first, of_tile)


def more_seconds(
    tiles: CallTiles,
    blocks: CallBlocks,
    tile_seconds: Float64,
    num_cells: int,
    direction: Direction,
    cost: CostModel,
) -> Float64:
    """Seconds of calls in addition to `tile_seconds`, float64[cells]."""
    work = call_work(tiles, blocks, direction, cost)
    calls = np.bincount(work.cell, cost.work_seconds(*work[1:], direction), num_cells)
    return np.asarray(calls - np.bincount(tiles.cell, tile_seconds, num_cells), np.float64)


def call_work(
    tiles: CallTiles, blocks: CallBlocks, direction: Direction, cost: CostModel
) -> CallWork:
    """The calls that tiles make, ordered by cell.

    Forward, a row of kernel tiles covers what its query block attends in the call, the mean of its
    rows; backward works by key blocks. A query block of 256 rows that attends 300 keys of one block
    and 500 of another in the same call has two rows of kernel tiles, of 800 keys.
    """
    sides = tiles.pairs, tiles.rows, tiles.keys
    area, edge = cost.kernel_area(*sides), cost.edge_area(*sides)
    side = tiles.keys if direction is Direction.BACKWARD else tiles.rows
    length = np.bincount(blocks.of_tile, area / side, len(blocks.cell))
    new = (np.diff(blocks.cell, prepend=-1) != 0) | (np.diff(blocks.group, prepend=-1) != 0)
    start, of_call = np.flatnonzero(new), np.cumsum(new) - 1
    calls = blocks.cell[start]
    rows = (side * tiles.heads)[blocks.first] / cost.profile.kernel_tile
    by_call = of_call[blocks.of_tile]
    return CallWork(
        calls,
        np.bincount(by_call, area * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(by_call, edge * tiles.heads, len(calls)).astype(np.float64),
        np.bincount(of_call, rows, len(calls)).astype(np.float64),
        np.asarray(np.maximum.reduceat(length, start) if len(start) else length, np.float64),
    )


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
    """Query blocks that kernel calls read, numbers[calls × blocks] each: one entry for every call
    (a `cell`, which is rank × divisions + division, and a head group) and block."""

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
        """Seconds of every point that moves anything: one launch and its bytes. The profile's
        `copy` counts a byte that is read and written once."""
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
    """Bytes of one token's row, int64[head groups] each: of queries, of keys and values, and of
    their accumulators (`wide`); `per_head` of log-sum-exps or row sums."""

    def __init__(self, shape: AttentionShape, groups: Sequence[HeadGroup]) -> None:
        keys = np.asarray([group.num_kv_heads for group in groups], np.int64)
        heads = keys * shape.q_heads_per_kv_head
        self.q, self.kv = heads * shape.head_dim, 2 * keys * shape.head_dim
        self.q_wide, self.kv_wide = (x * shape.accumulator_bytes for x in (self.q, self.kv))
        self.q, self.kv = self.q * shape.item_bytes, self.kv * shape.item_bytes
        self.per_head = heads * shape.accumulator_bytes


def division_seconds(rows: float, direction: Direction, cost: CostModel) -> float:
    """What one more division adds to the row work of a rank with `rows` rows, approximately: a
    launch that unpacks, the gap before a call, and forward one more contribution to merge."""
    if not cost.knows_launches:
        return 0.0
    width = RowBytes(cost.shape, cost.shape.head_groups(1))
    read = float((width.q + width.per_head).sum()) if direction is Direction.FORWARD else 0.0
    return 2 * cost.profile.launch_seconds + rows * read / (2 * cost.profile.copy)


def least_row_seconds(direction: Direction, cost: CostModel) -> float:
    """Least seconds per local row, without launches. Backward, row sums are computed from out and
    dout, and accumulators cleared and rounded to dq, dk and dv; forward, outputs may be written
    directly."""
    if direction is Direction.FORWARD or not cost.knows_launches:
        return 0.0
    width = RowBytes(cost.shape, cost.shape.head_groups(1))
    moved = 3 * width.q + width.kv + width.per_head + 2 * (width.q_wide + width.kv_wide)
    return float(moved.sum()) / (2 * cost.profile.copy)


@dataclass(frozen=True, eq=False)
class RowCosts:
    """Row work of all ranks, in one direction of one mask. Blocks have `tokens` and `owner`s;
    `fixed` says that ranks with messages copy all of their inputs, for graphs.

    Every point of a rank's program at which rows are moved is one launch, which reads and writes:

        forward    START    local q, k, v into the workspace, if that has slots; inputs to send
                   WAIT     received inputs into their slots
                   LAUNCH   inputs to pass on; results: every contribution into the message
                   END      every contribution to local rows into the output
        backward   START    as forward, with dout; out and dout for row sums; accumulators cleared
                   WAIT     as forward
                   LAUNCH   as forward; results: accumulators and received results
                   END      accumulators of local rows and received results into dq, dk, dv

    A contribution is what one kernel call leaves of a block's output, or what was received of it.
    Backward, all calls add to the same accumulator. If one call makes all of a rank's output, it
    writes it directly and nothing is merged.
    """

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
        """Bytes of results to send, by rank and phase: each is written once, and its contributions
        are read."""
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
        """Adds the bytes read for the results with keys `asked` to their points."""
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

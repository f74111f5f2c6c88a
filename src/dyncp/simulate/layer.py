"""One direction of one attention layer on all ranks: its kernel calls and its row work. Row work is
everything besides attention kernels: copying, packing, unpacking, merging and rounding rows.

At every point of a rank's program that moves rows, one launch reads and writes:

    forward    START    local q, k, v into the workspace, if it has slots; inputs to send
               WAIT     received inputs into their slots
               LAUNCH   inputs to pass on; results: all contributions into the message
               END      all contributions to local rows into the output
    backward   START    as forward, with dout; out and dout for row sums; cleared accumulators
               WAIT     as forward
               LAUNCH   as forward; results: accumulators and received results
               END      accumulators of local rows and received results into dq, dk, dv

A contribution is the partial output of one kernel call for a block, or a received partial output.
Backward, all calls add to the same accumulator. If one call computes a rank's whole output, it
writes it directly, and nothing is merged.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Float64, Int64
from dyncp.blocks import IS_INPUT, OF_KEYS, Direction, HeadGroup, Payload, Tiles
from dyncp.cost import CostModel
from dyncp.cost.cost_model import RowBytes

Numbers = npt.NDArray[Any]


class Sent(NamedTuple):
    """All payloads that are sent, int64[payloads] each; `size` in bytes."""

    phase: Int64
    source: Int64
    target: Int64
    kind: Int64
    group: Int64
    block: Int64
    size: Int64

    def where(self, chosen: Bool | Int64) -> "Sent":
        return Sent(*(column[chosen] for column in self))


class CallBlocks(NamedTuple):
    """Blocks that kernel calls process row by row: query blocks forward, key blocks backward. There
    is one entry for every call (a cell and head group) and block, ordered by call: int64[entries].
    `first` is one of its tiles, and `of_tile`, int64[tiles], the entry of each tile."""

    cell: Int64
    group: Int64
    block: Int64
    first: Int64
    of_tile: Int64


@dataclass(frozen=True, eq=False)
class Layer:
    """`groups` are the head groups in the cost model's shape. `tokens`, `owner` and `sequence` have
    one entry per block. Per tile, `cell` is rank × num_divisions + division, and `tile_seconds` its
    seconds."""

    direction: Direction
    num_ranks: int
    num_divisions: int
    num_phases: int
    groups: tuple[HeadGroup, ...]
    tokens: Int64
    owner: Int64
    sequence: Int64
    tiles: Tiles
    cell: Int64
    tile_seconds: Float64
    sent: Sent

    @cached_property
    def calls(self) -> Bool:
        """Whether there is a kernel call, bool[ranks, divisions, groups]."""
        groups = len(self.groups)
        called: Bool = np.zeros(self.num_ranks * self.num_divisions * groups, np.bool_)
        called[self.cell * groups + self.tiles.head_group] = True
        return called.reshape(self.num_ranks, self.num_divisions, groups)

    @cached_property
    def call_blocks(self) -> CallBlocks:
        tiles, groups, blocks = self.tiles, len(self.groups), len(self.tokens)
        block = tiles.k_block if self.direction is Direction.BACKWARD else tiles.q_block
        key = (self.cell * groups + tiles.head_group) * blocks + block
        keys, first, of_tile = np.unique(key, return_index=True, return_inverse=True)
        call, number = np.divmod(keys, blocks)
        return CallBlocks(call // groups, call % groups, number, first, of_tile)

    def by_division(self, cell: Int64, seconds: Float64) -> Float64:
        """Sums by rank and division."""
        total = np.bincount(cell, seconds, self.num_ranks * self.num_divisions)
        return total.astype(np.float64).reshape(self.num_ranks, -1)

    def by_phase(self, sent: Sent, rank: Int64, size: Numbers) -> Float64:
        """Sums by rank and phase; `rank` and `size` have one entry per payload of `sent`."""
        cells = rank * self.num_phases + sent.phase
        total = np.bincount(cells, size, self.num_ranks * self.num_phases)
        return total.astype(np.float64).reshape(self.num_ranks, -1)

    def by_rank(self, rank: Int64, size: Numbers | None = None) -> Float64:
        """Sums by rank; counts if `size` is None."""
        return np.bincount(rank, size, self.num_ranks).astype(np.float64)


class CallWork(NamedTuple):
    """Kernel calls, one entry each: `area` and `edge` of the cost model, and the number of `rows`
    of kernel tiles, all times q heads; `longest` is the number of keys of the longest row."""

    cell: Int64
    area: Float64
    edge: Float64
    rows: Float64
    longest: Float64


def call_work(layer: Layer, cost: CostModel) -> CallWork:
    """The kernel calls of a layer, ordered by cell.

    Forward, the length of a row of kernel tiles is the mean number of keys that the rows of its
    query block attend in the call; backward, key blocks take the place of query blocks. A query
    block of 256 rows that attends 300 keys of one block and 500 of another in the same call has two
    rows of kernel tiles, of 800 keys each.
    """
    tiles, blocks = layer.tiles, layer.call_blocks
    heads = cost.heads_of(layer.groups)[tiles.head_group]
    rows, keys = layer.tokens[tiles.q_block], layer.tokens[tiles.k_block]
    area, edge = (find(tiles.pairs, rows, keys) for find in (cost.kernel_area, cost.edge_area))
    side = keys if layer.direction is Direction.BACKWARD else rows
    length = np.bincount(blocks.of_tile, area / side, len(blocks.cell))
    new = (np.diff(blocks.cell, prepend=-1) != 0) | (np.diff(blocks.group, prepend=-1) != 0)
    start, of_call = np.flatnonzero(new), np.cumsum(new) - 1
    tile_rows = (side * heads)[blocks.first] / cost.profile.kernel_tile
    of_tile = of_call[blocks.of_tile]
    return CallWork(
        blocks.cell[start],
        np.bincount(of_tile, area * heads, len(start)).astype(np.float64),
        np.bincount(of_tile, edge * heads, len(start)).astype(np.float64),
        np.bincount(of_call, tile_rows, len(start)).astype(np.float64),
        np.asarray(np.maximum.reduceat(length, start) if len(start) else length, np.float64),
    )


def more_seconds(layer: Layer, cost: CostModel) -> Float64:
    """Seconds of calls beyond the seconds of their tiles, float64[ranks, divisions]."""
    work = call_work(layer, cost)
    calls = layer.by_division(work.cell, cost.work_seconds(*work[1:], layer.direction))
    return calls - layer.by_division(layer.cell, layer.tile_seconds)


class RowCosts(NamedTuple):
    """Row work at every point of a program, float64[ranks] or [ranks, phases]: bytes read plus
    bytes written, or seconds."""

    start: Float64
    launch: Float64
    wait: Float64
    end: Float64

    def seconds(self, cost: CostModel) -> "RowCosts":
        """Converts bytes to seconds: one launch and its bytes for every point that moves any. The
        profile's `copy` rate counts a byte that is read and written once."""
        profile = cost.profile
        points = (
            np.where(point > 0, profile.launch_seconds + point / (2 * profile.copy), 0.0)
            for point in self
        )
        return RowCosts(*points)

    @property
    def per_rank(self) -> tuple[Float64, Int64]:
        """Sum over the points of every rank, and the number of points that move any rows."""
        points = np.column_stack(self)
        return points.sum(axis=1), (points > 0).sum(axis=1)


def count_row_bytes(layer: Layer, cost: CostModel) -> RowCosts:
    """Bytes of row work. With CUDA graphs, ranks that send or receive copy all of their inputs and
    results."""
    sent, width = layer.sent, RowBytes.of(cost.shape, layer.groups)
    owner, is_input = layer.owner[sent.block], IS_INPUT[sent.kind]
    inputs, results = sent.where(is_input), sent.where(~is_input)
    passed_on = sent.where(is_input & (sent.source != owner))
    packed = sent.where(is_input & (sent.source == owner) & _packed_first(layer))
    home = sent.where(~is_input & (sent.target == owner))
    in_graph: Bool = np.zeros(layer.num_ranks, np.bool_)
    if cost.graphs:
        in_graph[sent.source] = in_graph[sent.target] = True
    return RowCosts(
        2 * layer.by_rank(packed.source, packed.size) + _start(layer, inputs, in_graph, width),
        layer.by_phase(passed_on, passed_on.source, 2 * passed_on.size)
        + _sent_results(layer, results, width),
        layer.by_phase(inputs, inputs.target, 2 * inputs.size),
        _end(layer, inputs, layer.by_rank(home.target, home.size), in_graph, width),
    )


def _packed_first(layer: Layer) -> Bool:
    """Marks the first of equal payloads from one rank in one phase: a payload for several ranks is
    packed once, since their messages are mostly the same."""
    sent = layer.sent
    packed = _key(layer, sent.kind, sent.source, sent) * layer.num_phases + sent.phase
    first = np.zeros(len(packed), np.bool_)
    first[np.unique(packed, return_index=True)[1]] = True
    return first


def _own_rows(layer: Layer) -> Float64:
    return layer.by_rank(layer.owner, layer.tokens)


def _start(layer: Layer, inputs: Sent, in_graph: Bool, width: RowBytes) -> Float64:
    """Bytes moved at START, without packed messages, per rank."""
    of_keys, groups = OF_KEYS[inputs.kind], len(layer.groups)
    slots = np.repeat(in_graph, 2 * groups).reshape(layer.num_ranks, 2, groups)
    slots[inputs.target, of_keys.astype(np.int64), inputs.group] = True
    q, kv = slots[:, 0], slots[:, 1]
    own = _own_rows(layer)
    if layer.direction is Direction.FORWARD:
        return own * (q @ (2 * width.q) + kv @ (2 * width.kv))
    # The row sums read dout already.
    copied = q @ (3 * width.q + 2 * width.per_head) + kv @ (2 * width.kv)
    sums = (2 * width.q + width.per_head).sum()
    cleared = (width.q_wide + width.kv_wide).sum()
    wide = np.where(of_keys, width.kv_wide[inputs.group], width.q_wide[inputs.group])
    taken = layer.by_rank(inputs.target, layer.tokens[inputs.block] * wide)
    return np.asarray(own * (copied + sums + cleared) + taken, np.float64)


def _sent_results(layer: Layer, results: Sent, width: RowBytes) -> Float64:
    """Bytes moved for results at LAUNCH, by rank and phase: each result is written once, and all of
    its contributions are read."""
    backward, blocks, sizes = layer.direction is Direction.BACKWARD, layer.call_blocks, results.size
    if backward:
        of_keys = OF_KEYS[results.kind]
        wide = np.where(of_keys, width.kv_wide[results.group], width.q_wide[results.group])
        sizes = sizes + layer.tokens[results.block] * wide
    summands = results.where(results.target != layer.owner[results.block])
    asked, read = _key(layer, summands.kind, summands.target, summands), summands.size
    if not backward:
        rank = blocks.cell // layer.num_divisions
        away = np.flatnonzero(layer.owner[blocks.block] != rank)
        partial = layer.tokens[blocks.block] * (width.q + width.per_head)[blocks.group]
        asked = np.append(asked, _key(layer, np.int64(Payload.OUT), rank, blocks)[away])
        read = np.append(read, partial[away])
    return layer.by_phase(results, results.source, sizes) + _read(layer, results, asked, read)


def _read(layer: Layer, results: Sent, asked: Int64, size: Int64) -> Float64 | float:
    """Sums `size`, the bytes read for the results with keys `asked`, by the rank and phase that
    send these results."""
    if not len(results.phase):
        return 0.0
    key = _key(layer, results.kind, results.source, results)
    order = np.argsort(key, kind="stable")
    result = order[np.searchsorted(key, asked, sorter=order).clip(max=len(key) - 1)]
    there = key[result] == asked
    found = results.where(result[there])
    return layer.by_phase(found, found.source, size[there])


def _end(layer: Layer, inputs: Sent, merged: Float64, in_graph: Bool, width: RowBytes) -> Float64:
    """Bytes moved at END, per rank; `merged` are the bytes of received results."""
    own, blocks = _own_rows(layer), layer.call_blocks
    if layer.direction is Direction.BACKWARD:
        every = (width.q_wide + width.kv_wide + width.q + width.kv).sum()
        return np.asarray(own * every + merged, np.float64)
    row, rank = width.q + width.per_head, blocks.cell // layer.num_divisions
    read = layer.tokens[blocks.block] * row[blocks.group]
    local = layer.owner[blocks.block] == rank
    read_by_rank = layer.by_rank(rank[local], read[local])
    several = (layer.calls.sum(axis=1) > 1).any(axis=1)
    slots = layer.by_rank(inputs.target[~OF_KEYS[inputs.kind]]) > 0
    merges = several | slots | (merged > 0) | in_graph
    return np.where(merges, own * row.sum() + read_by_rank + merged, 0.0)


def _key(layer: Layer, kind: Int64 | np.int64, rank: Int64, what: Sent | CallBlocks) -> Int64:
    """A distinct number for every payload kind, rank, head group and block."""
    number = (kind * layer.num_ranks + rank) * len(layer.groups) + what.group
    return np.asarray(number * len(layer.tokens) + what.block, np.int64)

"""Builds the programs of all ranks for one mask and direction."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Bool, Int32, Int64, frozen, sorted_order
from dyncp.blocks import BlockGraph
from dyncp.placement import Placement
from dyncp.plan.by_rank import bounds_of_ranks, split_by_rank
from dyncp.plan.instructions import index_instructions, order_programs
from dyncp.plan.layout import Layout
from dyncp.plan.rank_plan import Messages, Op, Program, RankTiles, Slots, Space
from dyncp.plan.slots import INPUT_SPACES, SPACES, Lifetimes, Uses, find_lifetimes, place_slots
from dyncp.schedule import Schedule, Transfers


@dataclass(frozen=True, eq=False)
class TileTable:
    """The tiles of one mask ordered by rank; tile i here is tile `order[i]` of the graph."""

    order: Int64
    rank: Int64
    of_rank: Int64
    tiles: RankTiles

    @staticmethod
    def of(graph: BlockGraph, placement: Placement, name: str) -> "TileTable":
        tiles, rank = graph.tiles[name], placement.tile_rank[name]
        order = sorted_order((rank, placement.num_ranks))
        own = RankTiles(
            tiles.q_block[order], tiles.k_block[order], tiles.head_group[order], tiles.pairs[order]
        )
        of_rank = bounds_of_ranks(rank, placement.num_ranks)
        return TileTable(order, rank[order].astype(np.int64), of_rank, own)

    def split(self) -> list[RankTiles]:
        tiles = self.tiles
        columns = (tiles.q_block, tiles.k_block, tiles.head_group, tiles.pairs)
        return split_by_rank(RankTiles, columns, self.of_rank)


@dataclass(frozen=True, eq=False)
class MessageTable:
    """Transfers of a schedule ordered by the rank that sends (or receives) them."""

    rank: Int64
    of_rank: Int64
    messages: Messages

    @staticmethod
    def of(moved: Transfers, rank: Int32, peer: Int32, num_ranks: int) -> "MessageTable":
        order = sorted_order((rank, num_ranks))
        columns = (moved.phase, peer, moved.kind, moved.head_group, moved.block)
        messages = Messages(*(column[order] for column in columns))
        return MessageTable(
            rank[order].astype(np.int64), bounds_of_ranks(rank, num_ranks), messages
        )

    def split(self) -> list[Messages]:
        own = self.messages
        columns = (own.phase, own.peer, own.kind, own.head_group, own.block)
        return split_by_rank(Messages, columns, self.of_rank)


def build_programs(
    graph: BlockGraph, tiles: TileTable, schedule: Schedule, local_rows: Int64, layout: Layout
) -> list[Program]:
    """One program per rank; `local_rows` has the rows of each."""
    num_ranks, moved = len(local_rows), schedule.transfers
    sends = MessageTable.of(moved, moved.source, moved.target, num_ranks)
    receives = MessageTable.of(moved, moved.target, moved.source, num_ranks)
    division = schedule.tile_division[tiles.order]
    steps, first_step = _order_all(schedule, tiles.rank, division, sends, receives, num_ranks)
    width = max(schedule.num_phases, schedule.num_divisions)
    at = index_instructions(steps, first_step, width)
    spans = _find_all_lifetimes(tiles, division, sends, receives, at, len(graph.blocks))
    slots, workspace_rows = _split_slots(graph, spans, local_rows, layout.slot_alignment)
    columns = (
        split_by_rank(_only, [division], tiles.of_rank),
        split_by_rank(_only, [frozen(steps)], first_step),
        sends.split(),
        receives.split(),
        slots,
        frozen(workspace_rows),
    )
    return [Program(*values) for values in zip(*columns, strict=True)]


def _only(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column


def _order_all(
    schedule: Schedule,
    tile_rank: Int64,
    tile_division: Int32,
    sends: MessageTable,
    receives: MessageTable,
    num_ranks: int,
) -> tuple[Int64, Int64]:
    num_phases = schedule.num_phases
    receiving = _marked(receives.rank, receives.messages.phase, num_ranks, num_phases)
    sending = _marked(sends.rank, sends.messages.phase, num_ranks, num_phases)
    return order_programs(
        sending | receiving,
        receiving,
        _marked(tile_rank, tile_division, num_ranks, schedule.num_divisions),
        schedule.phase_after_division,
        schedule.phase_after_phase,
        schedule.phase_feeds,
    )


def _marked(rank: Int64, number: Int32, num_ranks: int, num_numbers: int) -> Bool:
    marked: Bool = np.zeros((num_ranks, num_numbers), np.bool_)
    marked[rank, number] = True
    return marked


def _find_all_lifetimes(
    tiles: TileTable,
    tile_division: Int32,
    sends: MessageTable,
    receives: MessageTable,
    at: Int64,
    num_blocks: int,
) -> Lifetimes:
    computed, own = at[Op.COMPUTE, tiles.rank, tile_division], tiles.tiles
    sides = ((Space.Q, own.q_block), (Space.KV, own.k_block))
    uses = [
        _uses(np.full(len(own), space), block, own.head_group, computed, tiles.of_rank)
        for space, block in sides
    ]
    sent = sends.messages
    launched = at[Op.LAUNCH, sends.rank, sent.phase]
    uses.append(_uses(SPACES[sent.kind], sent.block, sent.head_group, launched, sends.of_rank))
    space = INPUT_SPACES[receives.messages.kind]
    inputs = np.flatnonzero(space >= 0)
    rank, got = receives.rank[inputs], receives.messages
    waited = at[Op.WAIT, rank, got.phase[inputs]]
    of_rank = bounds_of_ranks(rank, len(receives.of_rank) - 1)
    received = _uses(space[inputs], got.block[inputs], got.head_group[inputs], waited, of_rank)
    return find_lifetimes(received, rank, uses, num_blocks)


def _uses(space: Int64, block: Int32, group: Int32, at: Int64, of_rank: Int64) -> Uses:
    return Uses(space, block.astype(np.int64), group.astype(np.int64), at, of_rank)


def _split_slots(
    graph: BlockGraph, spans: Lifetimes, local_rows: Int64, alignment: int
) -> tuple[list[Slots], Int64]:
    tokens = graph.blocks.tokens.astype(np.int64)
    row, rows = place_slots(spans, tokens, len(graph.head_groups), local_rows, alignment)
    columns = (spans.space, spans.head_group, spans.block, row, spans.first, spans.last)
    return split_by_rank(Slots, [frozen(column) for column in columns], spans.of_rank), rows

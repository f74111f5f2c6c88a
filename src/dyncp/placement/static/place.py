"""Puts blocks and tiles on a grid of ranks."""

from collections.abc import Callable

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import BlockGraph, TokenBlocks
from dyncp.placement.placement import Placement, Traffic
from dyncp.placement.static.grid import Grid, deal_sequences
from dyncp.placement.static.hybrid import chunk_work, packed_chunks
from dyncp.topology import Topology

# Place of every block among the ranks of its group: of blocks, sequence lengths and group size, or
# of the work of packed chunks and group size.
Spread = Callable[[TokenBlocks, Int64, int], Int64]
Deal = Callable[[Int64, int], Int64]


def place_spread(graph: BlockGraph, grid: Grid, spread: Spread) -> tuple[Int64, Int64]:
    """Group and position of every block where each sequence is cut by itself."""
    group = deal_sequences(graph, grid.groups)[graph.blocks.sequence]
    lengths = np.asarray(graph.batch.lengths, np.int64)[graph.blocks.sequence]
    return group, spread(graph.blocks, lengths, grid.degree)


def place_packed(graph: BlockGraph, grid: Grid, deal: Deal) -> tuple[Int64, Int64]:
    """Group and position of every block where a group's packed sequences are cut into chunks."""
    group = deal_sequences(graph, grid.groups)[graph.blocks.sequence]
    position = np.zeros(len(group), np.int64)
    for number in range(grid.groups):
        blocks = np.flatnonzero(group == number)
        chunk = packed_chunks(graph, blocks, grid.degree)
        work = chunk_work(graph, blocks, chunk, grid.degree)
        position[blocks] = deal(work, grid.degree)[chunk]
    return group, position


def on_grid(
    graph: BlockGraph, grid: Grid, group: Int64, position: Int64, solver: str
) -> tuple[Placement, Int64, Int64]:
    """The placement, without traffic, and ring and home of every block and head group.

    Position i of a group is context i // heads and head i % heads. A tile of head group g runs at
    head g of its query block's context; with one head, at the query block's owner.
    """
    table, context = grid.ranks, position // grid.heads
    owner = table[group, context, position % grid.heads]
    if grid.heads == 1:
        home = np.repeat(owner[:, None], len(graph.head_groups), axis=1)
        ring = np.repeat(group[:, None], len(graph.head_groups), axis=1)
    else:
        home = table[group, context]
        ring = group[:, None] * grid.heads + np.arange(grid.heads)
    tile_rank = {
        name: frozen(home[tiles.q_block, tiles.head_group]) for name, tiles in graph.tiles.items()
    }
    ranks = grid.groups * grid.degree
    return Placement(ranks, frozen(owner), tile_rank, solver, static=True), ring, home


def traffic_on(grid: Grid, pattern: str, ring: Int64, home: Int64) -> Traffic:
    return Traffic(pattern, grid.rings, frozen(ring), frozen(home))


def nodes_of(topology: Topology) -> Int64:
    """Node of every rank."""
    node: Int64 = np.arange(topology.num_ranks) // topology.ranks_per_node
    return node

"""Data parallelism: whole sequences are dealt to groups of ranks, the heaviest first."""

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import BlockGraph
from dyncp.compiled import compiled


def deal_sequences(graph: BlockGraph, num_groups: int) -> Int64:
    """Group of every sequence: the longest goes first, always to the least loaded group.

    A group's load is its share of the tokens or of the work, whichever is larger: the rank with
    most tokens sets the time of everything outside attention. Loads 5 4 3 3 3 on 2 groups:

        group 0: 5 3      group 1: 4 3 3
    """
    return deal_loads(sequence_load(graph), num_groups)


def deal_loads(load: Float64, num_groups: int) -> Int64:
    """As `deal_sequences`, from the shares that `sequence_load` gives."""
    group = np.zeros(len(load), np.int64)
    order = np.argsort(-load.max(axis=1), kind="stable")
    deal(load, order, np.zeros((num_groups, 2)), group)
    return group


@compiled
def deal(load: Float64, order: Int64, group_load: Float64, group: Int64) -> None:
    """Deals loads in this order to groups that have `group_load` already; writes their groups."""
    for sequence in order:
        least, chosen = np.inf, 0
        for g in range(len(group_load)):
            most = max(group_load[g, 0] + load[sequence, 0], group_load[g, 1] + load[sequence, 1])
            if most < least:
                least, chosen = most, g
        group[sequence] = chosen
        for what in range(2):  # adding rows would take seconds to compile
            group_load[chosen, what] += load[sequence, what]


def sequence_load(graph: BlockGraph) -> Float64:
    """Every sequence's share of the batch's tokens and work, float64[sequences, 2]."""
    tokens = np.asarray(graph.batch.lengths, np.float64)
    sequence, work = graph.blocks.sequence, np.zeros(len(tokens))
    for name, tiles in graph.tiles.items():
        work += np.bincount(sequence[tiles.q_block], graph.tile_work(name), len(tokens))
    return np.stack([tokens / tokens.sum(), work / max(work.sum(), 1.0)], axis=1)


def block_work(graph: BlockGraph) -> Int64:
    """Work of each block's query rows over all masks, int64[blocks]."""
    work = np.zeros(len(graph.blocks), np.int64)
    for name, tiles in graph.tiles.items():
        np.add.at(work, tiles.q_block, graph.tile_work(name))
    return work

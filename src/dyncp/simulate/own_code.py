"""Prices plans of static methods as their own code runs, see `cost.Implementation`."""

import numpy as np

from dyncp.arrays import Float64, Int32, Int64
from dyncp.blocks import Direction
from dyncp.cost import CostModel
from dyncp.plan import Op
from dyncp.simulate.layer import Layer


def price_own_code(
    layer: Layer, op: Int64, rank: Int64, argument: Int64, cost: CostModel
) -> tuple[Float64, Float64]:
    """Seconds of every instruction on the device, and the host's seconds to issue it."""
    code = cost.implementation
    assert code is not None
    way = int(layer.direction)
    work, host = np.zeros(len(op)), np.full(len(op), code.message_host)
    computes = op == Op.COMPUTE
    cell = rank[computes] * layer.num_divisions + argument[computes]
    seconds = _call_seconds(layer, cost) + _merge_seconds(layer, cost)
    work[computes] = seconds[cell]
    sequences = _sequences(layer)[cell]
    host[computes] = code.step_host[way]
    (work if code.reads_lengths else host)[computes] += code.sequence_host[way] * sequences
    return work, host


def _call_seconds(layer: Layer, cost: CostModel) -> Float64:
    """Seconds of every cell's attention call. The rows of every block fill whole kernel tiles of
    their own, since sequences do not share tiles."""
    tiles, side = layer.tiles, cost.profile.kernel_tile
    rows, keys = layer.tokens[tiles.q_block], layer.tokens[tiles.k_block]
    heads = cost.heads_of(layer.groups)[tiles.head_group]
    area = cost.kernel_area(tiles.pairs, rows, keys)
    edge = cost.edge_area(tiles.pairs, rows, keys)
    whole = np.ceil(rows / side) * side / np.maximum(rows, 1)
    blocks = layer.call_blocks
    along = keys if layer.direction is Direction.BACKWARD else rows
    cells = layer.num_ranks * layer.num_divisions
    tile_rows = np.ceil(along / side)[blocks.first] * heads[blocks.first]
    length = np.bincount(blocks.of_tile, area / np.maximum(along, 1), len(blocks.cell))
    longest = np.zeros(cells)
    np.maximum.at(longest, blocks.cell, length)
    work = cost.work_seconds(
        np.bincount(layer.cell, area * whole * heads, cells).astype(np.float64),
        np.bincount(layer.cell, edge * heads, cells).astype(np.float64),
        np.bincount(blocks.cell, tile_rows, cells).astype(np.float64),
        longest,
        layer.direction,
    )
    called = np.bincount(layer.cell, minlength=cells) > 0
    profile = cost.profile
    return np.where(called, work + profile.call_seconds + profile.launch_seconds, 0.0)


def _merge_seconds(layer: Layer, cost: CostModel) -> Float64:
    """Seconds of merging every cell's results into accumulators."""
    shape, code, tiles = cost.shape, cost.implementation, layer.tiles
    assert code is not None
    q = _rows(layer, tiles.q_block) * shape.q_heads * shape.head_dim
    if layer.direction is Direction.BACKWARD:
        q += _rows(layer, tiles.k_block) * 2 * shape.kv_heads * shape.head_dim
    merged = q * (code.merged[int(layer.direction)] / len(layer.groups))
    first = np.arange(len(merged)) % layer.num_divisions == 0
    if layer.direction is Direction.FORWARD:
        merged[first] = 0.0  # there is nothing to merge with
    return merged / (2 * cost.profile.copy)


def _rows(layer: Layer, block: Int32) -> Float64:
    """Rows of the distinct blocks of every cell, summed over its head groups."""
    groups, blocks = len(layer.groups), len(layer.tokens)
    key = np.unique((layer.cell * groups + layer.tiles.head_group) * blocks + block)
    cells = layer.num_ranks * layer.num_divisions
    found = np.bincount(key // blocks // groups, layer.tokens[key % blocks], cells)
    return found.astype(np.float64)


def _sequences(layer: Layer) -> Int64:
    """Number of sequences in every cell."""
    count = int(layer.sequence.max(initial=0)) + 1
    key = np.unique(layer.cell * count + layer.sequence[layer.tiles.q_block])
    return np.bincount(key // count, minlength=layer.num_ranks * layer.num_divisions)

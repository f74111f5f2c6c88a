"""The batch as one weighted hypergraph.

Vertex b is token block b together with its diagonal tile, if it has one; every other (query block,
key block) with work is a vertex of its own, over all masks and head groups. Block b has two
hyperedges, b for its query side and B + b for its key side, each with the vertex of the block and
those of the tiles on that side. Two blocks of a causal sequence:

    tiles   00            vertices  0: block 0, tile 00    edges  Q0: 0      K0: 0 2
            10 11                   1: block 1, tile 11           Q1: 1 2    K1: 1
                                    2: tile 10

An edge costs its weight for every part that it touches besides the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64, Int64, starts_of
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Payload

# The library's weights are 32 bits wide, and so are its sums of weights: of all vertices, and of
# all edges times the parts they touch.
VERTEX_TOTAL, EDGE_TOTAL = 2**30, 2**22


@dataclass(frozen=True, eq=False)
class JoinedTiles:
    """Tiles of all masks and head groups with the same blocks are one, ordered by query and key
    block. `of_mask` has, for every tile of a mask, its index here."""

    q_block: Int64
    k_block: Int64
    work: Float64
    of_mask: Mapping[str, Int64]

    def vertices(self, num_blocks: int) -> Int64:
        """The vertex of every tile."""
        diagonal = self.q_block == self.k_block
        return np.where(diagonal, self.q_block, num_blocks - 1 + np.cumsum(~diagonal))


@dataclass(frozen=True, eq=False)
class Hypergraph:
    vertex_weight: Int64  # [vertices]
    edge_weight: Int64  # [edges]
    start: Int64  # [edges + 1] into pins
    pins: Int64  # vertices of each edge

    def restrict(self, vertices: Int64) -> "Hypergraph":
        """The part on `vertices`, numbered in this order; edges with one vertex left are dropped,
        since they cost nothing anywhere."""
        label = np.full(len(self.vertex_weight), -1)
        label[vertices] = np.arange(len(vertices))
        edge, pins = np.repeat(np.arange(len(self.edge_weight)), np.diff(self.start)), self.pins
        edge, pins = edge[label[pins] >= 0], label[pins[label[pins] >= 0]]
        size = np.bincount(edge, minlength=len(self.edge_weight))
        kept = size > 1
        return Hypergraph(
            self.vertex_weight[vertices],
            self.edge_weight[kept],
            starts_of(size[kept]),
            pins[kept[edge]],
        )


def join_tiles(graph: BlockGraph) -> JoinedTiles:
    names, num_blocks = list(graph.tiles), len(graph.blocks)
    keys = [graph.tiles[n].q_block.astype(np.int64) * num_blocks + graph.tiles[n].k_block
            for n in names]  # fmt: skip
    unique, index = np.unique(np.concatenate(keys), return_inverse=True)
    work = np.concatenate([graph.tile_work(name) for name in names])
    ends = starts_of(np.array([len(key) for key in keys]))[1:-1]
    return JoinedTiles(
        unique // num_blocks,
        unique % num_blocks,
        np.bincount(index, work, len(unique)).astype(np.float64),
        dict(zip(names, np.split(index, ends), strict=True)),
    )


def build_hypergraph(graph: BlockGraph, tiles: JoinedTiles, work_share: float) -> Hypergraph:
    """Vertices weigh their share of the batch's work and of its tokens, in the ratio of
    `work_share` to the rest: there is one weight for two limits."""
    blocks, num_blocks = np.arange(len(graph.blocks)), len(graph.blocks)
    vertex, off = tiles.vertices(num_blocks), tiles.q_block != tiles.k_block
    edge = np.concatenate([blocks, tiles.q_block[off], blocks + num_blocks,
                           tiles.k_block[off] + num_blocks])  # fmt: skip
    pins = np.concatenate([blocks, vertex[off], blocks, vertex[off]])
    size = np.bincount(edge, minlength=2 * num_blocks)
    return Hypergraph(
        _vertex_weights(graph, tiles, vertex, work_share),
        _whole_numbers(_edge_bytes(graph), EDGE_TOTAL),
        starts_of(size),
        pins[np.argsort(edge, kind="stable")],
    )


def _vertex_weights(
    graph: BlockGraph, tiles: JoinedTiles, vertex: Int64, work_share: float
) -> Int64:
    num_blocks, tokens = len(graph.blocks), graph.blocks.tokens
    num_vertices = num_blocks + int((tiles.q_block != tiles.k_block).sum())
    all_work = float(tiles.work.sum())
    work_share = work_share if all_work else 0.0
    weight = np.bincount(vertex, tiles.work, num_vertices) * work_share / max(all_work, 1.0)
    weight[:num_blocks] += (1 - work_share) * tokens / tokens.sum()
    return _whole_numbers(weight.astype(np.float64), VERTEX_TOTAL)


def _edge_bytes(graph: BlockGraph) -> Float64:
    """What every hyperedge moves per further rank, forward and backward together."""
    q_kinds = [kind for side in (Q_INPUT, Q_RESULT) for kind in side.values()]
    kv_kinds = [Payload.KV, Payload.KV, Payload.DKV]
    per_token, tokens = graph.payload_bytes.sum(axis=1), graph.blocks.tokens.astype(np.float64)
    return np.concatenate([tokens * per_token[kinds].sum() for kinds in (q_kinds, kv_kinds)])


def _whole_numbers(weight: Float64, total: int) -> Int64:
    """Weights that add up to about `total`, each at least 1."""
    scale = total / float(weight.sum())
    return np.maximum(np.rint(weight * scale), 1).astype(np.int64)

"""Invariant 6: a kernel call's listed kernel tiles allow exactly the pairs of its tiles."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks import Batch
from dyncp.plan import OwnedBlocks
from dyncp.verify.violation import Findings, Violation


@dataclass(frozen=True, eq=False)
class ListedKernelTiles:
    """What a kernel works from, as plain arrays. A pair is computed where its kernel tile of
    `rows` × `columns` is listed and the key's coordinate lies in the query row's ranges."""

    rows: int
    columns: int
    q_tile: Int64  # [listed]
    k_tile: Int64  # [listed]
    ranges: Int32 | Int64  # [query rows, R, 2], coordinates, cut to the call's key blocks
    q_coordinates: Int64  # [query rows], -1 where unused
    k_coordinates: Int64  # [key rows], -1 where unused


def check_kernel_call(
    batch: Batch,
    mask_name: str,
    blocks: OwnedBlocks,
    q_block: Int32 | Int64,
    k_block: Int32 | Int64,
    listed: ListedKernelTiles,
) -> list[Violation]:
    """Compares the pairs of the tiles q_block[i] × k_block[i] with those of the kernel tiles.

    By boolean matrices over all (query, key) of the batch, so for small batches only.
    """
    findings = Findings()
    for sentence in _misplaced(batch, listed):
        findings.add(6, sentence)
    if findings:
        return findings.violations()
    asked = _pairs_of_tiles(batch, mask_name, blocks, q_block, k_block)
    given = _pairs_of_kernel_tiles(batch, listed)
    for query, key in np.argwhere(asked != given).tolist():
        findings.add(
            6,
            f"mask {mask_name!r}: the pair of coordinates ({query}, {key}) is computed "
            f"{given[query, key]} times by the kernel tiles, and belongs to {asked[query, key]} "
            "tiles of the call",
        )
    return findings.violations()


def _misplaced(batch: Batch, listed: ListedKernelTiles) -> list[str]:
    """Kernel tiles and coordinates that point at nothing."""
    sentences = []
    for name, tile, size, coordinates in (
        ("query", listed.q_tile, listed.rows, listed.q_coordinates),
        ("key", listed.k_tile, listed.columns, listed.k_coordinates),
    ):
        count = -(-len(coordinates) // size)
        if ((tile < 0) | (tile >= count)).any():
            sentences.append(f"a listed kernel tile is outside the {count} of the {name} rows")
        if ((coordinates < -1) | (coordinates >= batch.num_tokens)).any():
            sentences.append(f"a {name} row has a coordinate outside the batch")
    if len(listed.q_tile) != len(listed.k_tile) or len(listed.ranges) != len(listed.q_coordinates):
        sentences.append("the arrays of the kernel call differ in length")
    return sentences


def _pairs_of_tiles(
    batch: Batch,
    name: str,
    blocks: OwnedBlocks,
    q_block: Int32 | Int64,
    k_block: Int32 | Int64,
) -> Int64:
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    dense = {s: batch.masks[name][s].dense() for s in np.unique(blocks.sequence[q_block]).tolist()}
    for q_index, k_index in zip(q_block.tolist(), k_block.tolist(), strict=True):
        sequence = int(blocks.sequence[q_index])
        first = sum(batch.lengths[:sequence])
        rows = slice(int(blocks.start[q_index]), int(blocks.end[q_index]))
        keys = slice(int(blocks.start[k_index]), int(blocks.end[k_index]))
        shifted = (slice(first + side.start, first + side.stop) for side in (rows, keys))
        pairs[tuple(shifted)] += dense[sequence][rows, keys]
    return pairs


def _pairs_of_kernel_tiles(batch: Batch, listed: ListedKernelTiles) -> Int64:
    """How often the kernel computes each pair; overlapping ranges and rows count as often."""
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    for q_tile, k_tile in zip(listed.q_tile.tolist(), listed.k_tile.tolist(), strict=True):
        rows = slice(q_tile * listed.rows, (q_tile + 1) * listed.rows)
        columns = slice(k_tile * listed.columns, (k_tile + 1) * listed.columns)
        queries, keys = listed.q_coordinates[rows], listed.k_coordinates[columns]
        start, end = listed.ranges[rows, :, :1], listed.ranges[rows, :, 1:]
        allowed = ((keys >= start) & (keys < end)).sum(axis=1)
        allowed *= (queries >= 0)[:, None] & (keys >= 0)
        row, column = np.nonzero(allowed)
        np.add.at(pairs, (queries[row], keys[column]), allowed[row, column])
    return pairs

"""Invariant 6: a kernel call's listed kernel tiles allow exactly the pairs of its tiles."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.blocks import Batch
from dyncp.plan import OwnedBlocks
from dyncp.verify.violation import Findings, Violation


@dataclass(frozen=True, eq=False)
class ListedKernelTiles:
    """What a kernel works from, as plain arrays. Of a listed kernel tile of `rows` × `columns`, all
    pairs are computed where it is `full`, otherwise those whose key lies in the query row's ranges.

    Ranges count keys by `k_numbers`: their coordinates (`reference`), or their rows in the
    workspace, 0, 1, 2, ... (tile lists of GPU kernels)."""

    rows: int
    columns: int
    q_tile: Int64  # [listed]
    k_tile: Int64  # [listed]
    full: Bool  # [listed]
    ranges: Int32 | Int64  # [query rows, R, 2]
    k_numbers: Int64  # [key rows]
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
    given, unused = _pairs_of_kernel_tiles(batch, listed)
    for query in np.flatnonzero(unused).tolist():
        findings.add(
            6, f"mask {mask_name!r}: the query at coordinate {query} attends rows that hold no key"
        )
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
    lengths = (
        {len(listed.q_tile), len(listed.k_tile), len(listed.full)},
        {len(listed.ranges), len(listed.q_coordinates)},
        {len(listed.k_numbers), len(listed.k_coordinates)},
    )
    if max(map(len, lengths)) > 1:
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


def _pairs_of_kernel_tiles(batch: Batch, listed: ListedKernelTiles) -> tuple[Int64, Int64]:
    """How often the kernel computes each pair, [tokens, tokens], overlapping ranges and rows as
    often as they overlap; and how many unused key rows each query attends, [tokens]."""
    pairs = np.zeros((batch.num_tokens, batch.num_tokens), np.int64)
    unused = np.zeros(batch.num_tokens, np.int64)
    columns = (listed.q_tile, listed.k_tile, listed.full)
    for q_tile, k_tile, full in zip(*(column.tolist() for column in columns), strict=True):
        rows = slice(q_tile * listed.rows, (q_tile + 1) * listed.rows)
        keys = slice(k_tile * listed.columns, (k_tile + 1) * listed.columns)
        start, end = listed.ranges[rows, :, :1], listed.ranges[rows, :, 1:]
        number = listed.k_numbers[keys]
        times = ((number >= start) & (number < end)).sum(axis=1)
        times = np.ones_like(times) if full else times
        query, key = listed.q_coordinates[rows], listed.k_coordinates[keys]
        row, column = np.nonzero(times * (query >= 0)[:, None])
        real = key[column] >= 0
        np.add.at(unused, query[row[~real]], 1)
        row, column = row[real], column[real]
        np.add.at(pairs, (query[row], key[column]), times[row, column])
    return pairs, unused

"""RowRuns: the allowed key ranges of query rows, stored as runs that grow linearly.

Along a sequence, both ends of a mask's ranges mostly stay or move by one from row to row, so a few
runs say it all. Rows 0..3 of a causal mask, [0,1) [0,2) [0,3) [0,4), are one run: base [0,1), slope
[0,1). A mask without any such structure takes a run per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, frozen, starts_of
from dyncp.blocks import TokenBlocks


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of rows, ordered by block and start. Row `start + i` of a run has the ranges
    base + i × slope (sequence-relative); no run crosses a block border."""

    block: Int32  # [runs]
    start: Int32  # [runs] first row, in its sequence
    base: Int32  # [runs, R, 2]
    slope: Int32  # [runs, R, 2]

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_ranges(self) -> int:
        return int(self.base.shape[1])

    def of_blocks(self, wanted: Bool) -> "RowRuns":
        """The runs of the blocks with wanted[block]."""
        keep = wanted[self.block]
        parts = (self.block, self.start, self.base, self.slope)
        return RowRuns(*(frozen(part[keep]) for part in parts))

    def expand(self, block: int, start: int, end: int) -> Int32:
        """Ranges int32[end - start, R, 2] of the rows of one block, which spans [start, end)."""
        own = slice(*np.searchsorted(self.block, [block, block + 1]))
        first = self.start[own]
        counts = np.append(first[1:], end) - first
        assert len(first), f"plan has no key ranges for block {block}"
        step = np.arange(start, end) - np.repeat(first, counts)
        base, slope = (np.repeat(x[own], counts, axis=0) for x in (self.base, self.slope))
        return (base + slope * step[:, None, None]).astype(np.int32)


def build_row_runs(ranges: Sequence[Int32], blocks: TokenBlocks) -> RowRuns:
    """Runs of all rows of a batch; `ranges` has one int32[tokens, R, 2] per sequence."""
    rows = _stack(ranges)
    tokens = blocks.tokens
    first = starts_of(tokens)[:-1]
    slope = np.empty_like(rows)
    slope[:-1] = rows[1:] - rows[:-1]
    last = first + tokens - 1
    slope[last] = np.where((tokens > 1)[:, None, None], slope[last - 1], 0)
    new = np.empty(len(rows), np.bool_)
    new[1:] = (slope[1:] != slope[:-1]).any(axis=(1, 2))
    new[first] = True
    start: Int64 = np.flatnonzero(new)
    block = np.searchsorted(first, start, side="right") - 1
    return RowRuns(
        frozen(block),
        frozen(start - first[block] + blocks.start[block]),
        frozen(rows[start]),
        frozen(slope[start]),
    )


def _stack(ranges: Sequence[Int32]) -> Int32:
    """All rows below each other; rows with fewer ranges get empty ones behind."""
    most = max(r.shape[1] for r in ranges)
    parts = []
    for part in ranges:
        empty = np.full((len(part), most - part.shape[1], 2), len(part), np.int32)
        parts.append(np.concatenate([part, empty], axis=1) if empty.size else part)
    return np.concatenate(parts)

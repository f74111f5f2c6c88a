"""Ways to cut sequences into pieces, which are then levelled over bins (machines, or ranks)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.placement.bisection.leveling import level_all


@dataclass(frozen=True, eq=False)
class Lines:
    """Blocks in order, with the sequence they belong to (numbered from 0 without gaps), their work
    and tokens, and what a bin may have of both."""

    sequence: Int64
    load: Float64  # [blocks, 2]
    caps: Float64  # [2]

    @cached_property
    def share(self) -> Float64:
        """Of a bin's work, per block."""
        return np.asarray(self.load[:, 0] / self.caps[0])

    @cached_property
    def needed(self) -> Float64:
        """Bins that the work of every sequence would fill."""
        return np.bincount(self.sequence, self.share).astype(np.float64)

    def middles(self, column: Float64) -> tuple[Float64, Float64]:
        """Sum of `column` within the sequence up to the middle of every block, and of it all."""
        total = np.bincount(self.sequence, column)
        before = np.cumsum(column) - (np.cumsum(total) - total)[self.sequence]
        return before - column / 2, np.maximum(total, 1e-12)[self.sequence]

    def level(self, piece: Int64, bins: int) -> Int64:
        """The bin of every block when pieces stay together."""
        load = np.stack([np.bincount(piece, column) for column in self.load.T], axis=1)
        return level_all(load.astype(np.float64), self.caps, bins)[piece]


Cut = Callable[[Lines, float], Int64]


def from_the_end(lines: Lines, most: float) -> Int64:
    """Pieces that fill a share of a bin, counted from the end of a sequence: what is left over is
    its beginning, which needs and gives the fewest keys."""
    middle, total = lines.middles(lines.share)
    return _number(lines.sequence, np.floor((total - middle) / most))


def evenly(lines: Lines, most: float) -> Int64:
    """Pieces of equal work."""
    middle, total = lines.middles(lines.share)
    pieces = np.ceil(lines.needed / most)[lines.sequence]
    return _number(lines.sequence, np.floor(middle / total * pieces))


def zigzag(lines: Lines, most: float) -> Int64:
    """Pieces of one band from the beginning and one from the end, equal in tokens."""
    middle, total = lines.middles(lines.load[:, 1])
    pieces = np.ceil(lines.needed / most)[lines.sequence]
    band = np.floor(middle / total * 2 * pieces)
    return _number(lines.sequence, np.minimum(band, 2 * pieces - 1 - band))


def _number(sequence: Int64, part: Float64) -> Int64:
    key = sequence * (int(part.max(initial=0)) + 1) + part.astype(np.int64)
    _, piece = np.unique(key, return_inverse=True)
    return piece.reshape(-1)


def cut_ways(
    lines: Lines, bins: int, cuts: tuple[Cut, ...], most: tuple[float, ...]
) -> Iterator[Int64]:
    """The bin of every block, for every way to cut."""
    for cut, share in product(cuts, most):
        yield lines.level(cut(lines, share), bins)

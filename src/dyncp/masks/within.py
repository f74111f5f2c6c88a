"""Windows and chunks by position, inside any other mask: what models with local layers mean.

In branching sequences a token's position is not its row. A window of rows around an answer's token
would hold the tokens of other answers instead of the end of the question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32
from dyncp.checks import instance_of
from dyncp.masks.function import MaskFunction, Sample, integer
from dyncp.masks.mask import Mask, Runs, merge, normal_mask


@dataclass(frozen=True, eq=False, repr=False)
class WithinMask(MaskFunction):
    """What `masks.within` gives for a mask function."""

    function: MaskFunction
    window: int | None
    chunk: int | None

    def build(self, length: int, sample: Sample | None) -> Mask:
        return _within(self.function.build(length, sample), self.window, self.chunk)

    def __repr__(self) -> str:
        size = f"chunk={self.chunk}" if self.window is None else f"window={self.window}"
        return f"masks.within({self.function!r}, {size})"


@overload
def within(mask: Mask, *, window: int | None = None, chunk: int | None = None) -> Mask: ...


@overload
def within(
    mask: MaskFunction, *, window: int | None = None, chunk: int | None = None
) -> MaskFunction: ...


def within(
    mask: Mask | MaskFunction, *, window: int | None = None, chunk: int | None = None
) -> Mask | MaskFunction:
    """The pairs of a mask (or mask function) whose key is one of the last `window` positions up to
    the query's, or in the query's chunk of `chunk` positions.

    within(shared_question(answers=2, question=2), window=2), of 6 tokens    position
    █·····                                                                   0
    ██····                                                                   1
    ·██···                                                                   2
    ··██··                                                                   3
    ·█··█·                                                                   2
    ····██                                                                   3
    """
    if (window is None) == (chunk is None):
        raise ValueError(f"masks.within got window={window} and chunk={chunk}; give one of them")
    name = "window" if chunk is None else "chunk"
    integer("within", name, window if chunk is None else chunk, 1)
    if isinstance(mask, Mask):
        return _within(mask, window, chunk)
    expected = "a mask, or a mask function such as masks.causal"
    instance_of("the mask of masks.within", mask, MaskFunction, expected)
    return WithinMask(mask, window, chunk)


def _within(mask: Mask, window: int | None, chunk: int | None) -> Mask:
    position = mask.resolved_positions().astype(np.int64)
    if window is not None:
        low, high = position - window + 1, position + 1
    else:
        assert chunk is not None
        low = position // chunk * chunk
        high = low + chunk
    name = f"{mask.name} within {window if window is not None else chunk}"
    return normal_mask(_clip(mask, low, high), *mask.marks, name)


def _clip(mask: Mask, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]) -> Int32:
    """The ranges of every token, cut to keys with positions from `low` to before `high`. A range is
    cut where positions do not go on by one; between such borders they tell rows."""
    runs = Runs.of(mask.resolved_positions())
    starts, ends = [], []
    for column in range(mask.ranges.shape[1]):
        start, end = mask.ranges[:, column].T.astype(np.int64)
        while (start < end).any():
            inside = start.clip(max=mask.length - 1)
            border = np.minimum(end, runs.end[inside])
            shift = runs.shift[inside]  # from positions to rows
            starts.append(np.maximum(start, low + shift))
            ends.append(np.minimum(border, high + shift))
            ends[-1][start >= end] = 0
            start = np.maximum(start, border)
    if not starts:
        return mask.ranges
    return merge(np.array(starts, np.int32).clip(0), np.array(ends, np.int32).clip(0))

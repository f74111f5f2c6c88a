"""Runs: stretches of a sequence in which positions go on by one from row to row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dyncp.masks.ranges import IntArray


@dataclass(frozen=True, eq=False)
class Runs:
    """Of every token: the row behind its run, and what makes a row of a position there."""

    end: npt.NDArray[np.int64]
    shift: npt.NDArray[np.int64]

    @staticmethod
    def of(positions: IntArray) -> Runs:
        length = len(positions)
        borders = np.flatnonzero(np.diff(positions) != 1) + 1
        ends = np.append(borders, length)
        number = np.searchsorted(borders, np.arange(length), side="right")
        shift = np.arange(length) - positions
        return Runs(ends[number].astype(np.int64), shift.astype(np.int64))


def reach_other_runs(ranges: IntArray, positions: IntArray) -> bool:
    """Whether a token attends keys whose distance in rows is not that in positions."""
    shift = Runs.of(positions).shift
    for column in range(ranges.shape[1]):
        start, end = ranges[:, column].T
        given = start < end
        ends = np.stack([start[given], end[given] - 1])
        if (shift[ends] != shift[given]).any():
            return True
    return False

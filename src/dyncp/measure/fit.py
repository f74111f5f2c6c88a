"""Least squares of measured seconds, by relative error, with coefficients from 0 on."""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Float64


@dataclass(frozen=True, eq=False)
class Fit:
    """`coefficients` has one number per column. `errors` are fitted over measured − 1, by row."""

    coefficients: Float64
    errors: Float64

    @property
    def mean_error(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        return float(np.abs(self.errors).max())


def fit_seconds(columns: Float64, seconds: Float64) -> Fit:
    """Coefficients c ≥ 0 with columns @ c ≈ seconds, where 10 % too much counts the same at 20 µs
    and at 20 ms.

    Rows (calls, work) of 1, 10 and 1, 30 with 7 and 17 seconds give 2 seconds a call and 0.5 per
    unit of work."""
    if len(columns) < columns.shape[1]:
        raise ValueError(
            f"{len(columns)} measurements cannot tell {columns.shape[1]} coefficients apart; "
            "measure more sizes"
        )
    if not (seconds > 0).all():
        raise ValueError("measured seconds have to be above 0")
    relative = columns / seconds[:, None]
    size = np.abs(relative).max(axis=0)  # work in FLOPs and calls differ by many powers of ten
    scaled = relative / np.where(size > 0, size, 1.0)
    free, found = size > 0, np.zeros(columns.shape[1])
    while free.any():
        solved = np.linalg.lstsq(scaled[:, free], np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        free[np.flatnonzero(free)[solved.argmin()]] = False  # noise: what it says is "nothing"
    coefficients = found / np.where(size > 0, size, 1.0)
    errors: Float64 = relative @ coefficients - 1
    return Fit(coefficients, errors)

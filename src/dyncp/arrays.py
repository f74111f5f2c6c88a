"""Array types of the planning stages, and the one way to make an array read-only."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]
Int16 = npt.NDArray[np.int16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


def frozen(values: Any, dtype: type[np.generic] = np.int32) -> npt.NDArray[Any]:
    """A read-only contiguous array: stages hand on what nobody fills in later.

    A writable array that belongs to the caller is copied, so that freezing never reaches back.
    """
    array = np.ascontiguousarray(values, dtype=dtype)
    if array is values and array.flags.writeable:
        array = array.copy()
    array.flags.writeable = False
    return array


def starts_of(sizes: npt.NDArray[Any]) -> Int64:
    """Offsets of consecutive pieces and their end: sizes [3, 1, 2] give [0, 3, 4, 6]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])

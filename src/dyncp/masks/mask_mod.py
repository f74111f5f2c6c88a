"""Masks from FlexAttention-style functions `mask_mod(b, h, q, k)`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dyncp.masks.function import MaskFunction, Sample, sequence_length
from dyncp.masks.mask import Mask, normal_mask
from dyncp.masks.ranges import IntArray

MaskMod = Callable[[Any, Any, Any, Any], Any]

# Pairs evaluated at a time: 32 MiB for each index tensor that a mask_mod makes.
CHUNK_PAIRS = 1 << 22


@overload
def from_mask_mod(mask_mod: MaskMod, length: int, *, name: str | None = None) -> Mask: ...


@overload
def from_mask_mod(
    mask_mod: MaskMod, length: None = None, *, name: str | None = None
) -> MaskFunction: ...


def from_mask_mod(
    mask_mod: MaskMod, length: int | None = None, *, name: str | None = None
) -> Mask | MaskFunction:
    """The mask of `mask_mod(b, h, q, k)`, or a mask function if no length is given.

    from_mask_mod(lambda b, h, q, k: q >= k, 4096) == masks.causal(4096)

    The function gets index arrays q `[rows, 1]` and k `[1, length]` and returns a boolean for every
    pair: torch tensors on the CPU if torch is imported already, numpy arrays otherwise. b is 0. The
    mask has to be the same for all heads, so any use of h raises a ValueError. All length² pairs
    are evaluated, a few million at a time; named masks are much faster to build.
    """
    function = MaskModFunction(mask_mod, name or str(getattr(mask_mod, "__name__", "mask_mod")))
    return function if length is None else function.build(sequence_length(length), None)


@dataclass(frozen=True, eq=False, repr=False)
class MaskModFunction(MaskFunction):
    """The mask function of a `mask_mod`."""

    mask_mod: MaskMod
    name: str

    def build(self, length: int, sample: Sample | None) -> Mask:
        del sample
        step = max(1, CHUNK_PAIRS // length)
        chunks = [
            ranges_of_dense(_evaluate(self.mask_mod, first, min(first + step, length), length))
            for first in range(0, length, step)
        ]
        return normal_mask(_stacked(chunks, length), name=self.name)

    def __repr__(self) -> str:
        return f"masks.from_mask_mod({self.name})"


def ranges_of_dense(allowed: npt.NDArray[np.bool_]) -> IntArray:
    """Normal ranges of dense rows, from where a row changes.

    . 1 1 . 1  ->  changes at 1 3 4 5  ->  [1, 3) [4, 5)
    """
    rows, length = allowed.shape
    padded = np.zeros((rows, length + 2), np.int8)
    padded[:, 1:-1] = allowed
    row, key = np.nonzero(np.diff(padded, axis=1))
    changes = np.bincount(row, minlength=rows)
    ranges = np.full((rows, max(1, int(changes.max()) // 2), 2), length, np.int32)
    column = np.arange(len(row)) - np.repeat(np.cumsum(changes) - changes, changes)
    ranges.reshape(rows, -1)[row, column] = key
    return ranges


def _stacked(chunks: list[IntArray], length: int) -> IntArray:
    """Row chunks below each other, as wide as the widest."""
    ranges = np.full((length, max(chunk.shape[1] for chunk in chunks), 2), length, np.int32)
    first = 0
    for chunk in chunks:
        ranges[first : first + len(chunk), : chunk.shape[1]] = chunk
        first += len(chunk)
    return ranges


def _evaluate(mask_mod: MaskMod, first: int, last: int, length: int) -> npt.NDArray[np.bool_]:
    """Dense rows [first, last) of the mask."""
    queries, keys = np.arange(first, last)[:, None], np.arange(length)[None, :]
    torch = sys.modules.get("torch")
    if torch is None:
        result = mask_mod(np.int64(0), _AllHeads(), queries, keys)
    else:
        as_tensor = torch.from_numpy
        zero = torch.zeros((), dtype=torch.int64)
        result = mask_mod(zero, _AllHeads(), as_tensor(queries), as_tensor(keys))
        result = result.cpu().numpy() if isinstance(result, torch.Tensor) else result
    return _as_rows(np.asarray(result), (last - first, length))


def _as_rows(result: npt.NDArray[Any], shape: tuple[int, int]) -> npt.NDArray[np.bool_]:
    if result.dtype != np.bool_:
        raise ValueError(f"mask_mod returned {result.dtype}; allowed are booleans, one per pair")
    try:
        return np.broadcast_to(result, shape)
    except ValueError:
        raise ValueError(
            f"mask_mod returned shape {result.shape} for q {(shape[0], 1)} and k {(1, shape[1])}; "
            f"allowed is {shape} or what broadcasts to it"
        ) from None


def _refuse_heads(*_: object, **__: object) -> Any:
    raise ValueError(
        "this mask_mod uses its head index h; dyncp masks are the same for all heads, so only "
        "functions of q and k (and b, which is 0) can be turned into a mask"
    )


class _AllHeads:
    """Stands for the head index and refuses every use of it."""

    __slots__ = ()
    __torch_function__: Any = classmethod(_refuse_heads)

    def __getattr__(self, name: str) -> Any:
        return _refuse_heads(name)


_USES = (
    "eq ne lt le gt ge hash bool int float index len iter contains getitem call array "
    "array_ufunc array_function neg pos abs invert "
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift "
    "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor rlshift rrshift"
)

for _use in _USES.split():
    setattr(_AllHeads, f"__{_use}__", _refuse_heads)

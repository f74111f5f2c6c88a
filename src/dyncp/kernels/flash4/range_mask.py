"""The mask function that flash-attn-4 compiles into its kernels: ranges of key rows."""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute.utils import scalar_to_ssa


@cache
def range_mask(num_ranges: int) -> Callable[..., Any]:
    """Whether a key row lies in one of the `num_ranges` ranges of the query row. The one auxiliary
    tensor is int32[2 × num_ranges, rows]: starts and ends. One range and two have functions of
    their own, which cost less than the general one."""
    masks: dict[int, Callable[..., Any]] = {1: _one, 2: _two}
    return masks[num_ranges] if num_ranges in masks else _many(num_ranges)


@cute.jit
def _one(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def] # noqa: ARG001
    start = scalar_to_ssa(tensors[0][0, row[0]], cutlass.Int32)
    end = scalar_to_ssa(tensors[0][1, row[0]], cutlass.Int32)
    return (key >= start) & (key < end)


@cute.jit
def _two(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def] # noqa: ARG001
    start = scalar_to_ssa(tensors[0][0, row[0]], cutlass.Int32)
    end = scalar_to_ssa(tensors[0][1, row[0]], cutlass.Int32)
    second = scalar_to_ssa(tensors[0][2, row[0]], cutlass.Int32)
    second_end = scalar_to_ssa(tensors[0][3, row[0]], cutlass.Int32)
    return ((key >= start) & (key < end)) | ((key >= second) & (key < second_end))


def _many(num_ranges: int) -> Callable[..., Any]:
    @cute.jit
    def mask(batch, head, row, key, seqlen_info, tensors):  # type: ignore[no-untyped-def] # noqa: ARG001
        start = scalar_to_ssa(tensors[0][0, row[0]], cutlass.Int32)
        end = scalar_to_ssa(tensors[0][1, row[0]], cutlass.Int32)
        allowed = (key >= start) & (key < end)
        for r in cutlass.range_constexpr(1, num_ranges):
            start = scalar_to_ssa(tensors[0][2 * r, row[0]], cutlass.Int32)
            end = scalar_to_ssa(tensors[0][2 * r + 1, row[0]], cutlass.Int32)
            allowed = allowed | ((key >= start) & (key < end))
        return allowed

    made: Callable[..., Any] = mask
    return made

"""Derives from a rank's plan what running it needs, for any attention shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dyncp.arrays import Int64
from dyncp.executor.kernel_calls import CallBuilder
from dyncp.kernels import IndexArrays, Kernel
from dyncp.plan import (
    Contributions,
    Direction,
    KernelStyle,
    MaskPlan,
    Op,
    Program,
    RankPlan,
    find_contributions,
    has_messages,
    places_of,
)


@dataclass(frozen=True, eq=False)
class LoweredProgram:
    """One direction of one mask on one rank."""

    part: RankPlan
    mask: MaskPlan
    direction: Direction
    style: KernelStyle
    found: Contributions
    place: Int64  # first row of every block, [spaces, head groups, blocks]
    calls: Mapping[int, list[tuple[int, Any]]]  # division → (head group, the kernel's lowered call)

    @property
    def program(self) -> Program:
        return self.mask.program(self.direction)

    @property
    def backward(self) -> bool:
        return self.direction is Direction.BACKWARD

    @cached_property
    def instructions(self) -> list[tuple[Op, int]]:
        return [(Op(op), argument) for op, argument in self.program.instructions.tolist()]

    @cached_property
    def local_rows(self) -> int:
        return self.part.local_rows

    @cached_property
    def has_messages(self) -> bool:
        return has_messages(self.program)


def style_of(kernel: Kernel, *, fixed: bool = False) -> KernelStyle:
    return KernelStyle(
        kernel.merges,
        kernel.collects,
        fixed,
        kernel.row_multiple,
        kernel.dim_multiple,
        kernel.most_sequences,
    )


def lower_program(
    part: RankPlan,
    mask: MaskPlan,
    direction: Direction,
    kernel: Kernel,
    arrays: IndexArrays,
    *,
    fixed: bool = False,
) -> LoweredProgram:
    """`fixed` as in `KernelStyle`."""
    program, style = mask.program(direction), style_of(kernel, fixed=fixed)
    _check_alignment(part, kernel, style)
    found = find_contributions(part, mask, program)
    builder = CallBuilder(part, mask, program, found, style.row_multiple)
    calls = {
        division: [
            (
                call.head_group,
                kernel.lower(call, arrays, backward=direction is Direction.BACKWARD),
            )
            for call in builder.calls(division)
        ]
        for division in np.unique(program.tile_division).tolist()
    }
    return LoweredProgram(part, mask, direction, style, found, places_of(part, program), calls)


def _check_alignment(part: RankPlan, kernel: Kernel, style: KernelStyle) -> None:
    if part.slot_alignment % style.row_multiple:
        raise ValueError(
            f"the plan aligns slots to {part.slot_alignment} rows, but kernel {kernel.name!r} "
            f"needs multiples of {style.row_multiple}: plan with Layout(slot_alignment="
            f"{style.row_multiple}), or choose another kernel"
        )

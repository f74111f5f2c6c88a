"""PlanLowering: what preparing a plan takes on the host. Any thread may do it, ahead of time."""

from collections.abc import Iterator

import torch

from dyncp.executor.engine import Engine
from dyncp.executor.kernel_calls import LoweredProgram, lower_program
from dyncp.executor.layout import RankLayout, lay_out
from dyncp.kernels import IndexArrays
from dyncp.plan import AttentionShape, Direction, RankPlan


class PlanLowering:
    """Kernel calls and layouts of the ranks of this process, by mask and direction. `arrays` are
    their index arrays, which have not been sent to the device yet."""

    @torch.inference_mode(False)
    def __init__(self, parts: tuple[RankPlan, ...], engine: Engine) -> None:
        self.parts, self.engine, self.arrays = parts, engine, IndexArrays(engine.device)
        self.programs = {key: self._lower(*key) for key in self._keys()}
        self.layouts: dict[tuple[str, Direction, AttentionShape], tuple[RankLayout, ...]] = {}
        self.lay_out()

    def lay_out(self) -> None:
        """For the plan's attention shape, or that of the latest call where the plan fits any."""
        planned = self.parts[0].shape
        shape = planned if planned.exact else self.engine.shape
        for key, programs in self.programs.items():
            if shape is not None and (*key, shape) not in self.layouts:
                self.layouts[*key, shape] = lay_out_ranks(programs, shape, self.engine, self.arrays)

    def _keys(self) -> Iterator[tuple[str, Direction]]:
        for name, mask in self.parts[0].masks.items():
            yield name, Direction.FORWARD
            if mask.backward is not None:
                yield name, Direction.BACKWARD

    def _lower(self, name: str, direction: Direction) -> tuple[LoweredProgram, ...]:
        kernel, fixed = self.engine.kernel, self.engine.graphs.wanted
        return tuple(
            lower_program(part, part.masks[name], direction, kernel, self.arrays, fixed=fixed)
            for part in self.parts
        )


def lay_out_ranks(
    programs: tuple[LoweredProgram, ...],
    shape: AttentionShape,
    engine: Engine,
    arrays: IndexArrays,
) -> tuple[RankLayout, ...]:
    """Ranks of this process one after the other, in memory and in rows."""
    ranks: list[RankLayout] = []
    base = first_row = 0
    for program in programs:
        rank = lay_out(program, shape, engine.kernel, engine.row_ops, arrays, base, first_row)
        ranks.append(rank)
        base, first_row = base + rank.num_bytes, first_row + program.local_rows
    return tuple(ranks)

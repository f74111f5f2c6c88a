"""Memory: the executor's own memory of a call, in the dtypes in which rows lie there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels.accumulate import accumulator_dtype


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of one call: q and other inputs, and partial results that travel."""

    input: torch.dtype
    partial: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return accumulator_dtype(self.input)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All of it, three times: as items of the inputs' dtype, of the dtype in which partial results
    travel, and of the accumulator dtype."""

    input: Tensor
    partial: Tensor
    wide: Tensor

    @staticmethod
    def of(base: Tensor, dtypes: Dtypes) -> "Memory":
        """`base` is uint8, and its bytes a multiple of 8."""
        return Memory(*(base.view(x) for x in (dtypes.input, dtypes.partial, dtypes.wide)))

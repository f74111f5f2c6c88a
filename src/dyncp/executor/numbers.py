"""Numbers of steps: compiled graphs take tensors, so a step passes through them as one.

A graph that waits for its backward keeps the tensor, and its memory keeps what the step is made of,
also where the user has dropped the step itself. A step refers to the tensor and the memory to a
copy of the step, so that there is no circle which nothing could collect.
"""

import copy
import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dyncp.executor.step import Step

_counter = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, "Step"] = weakref.WeakValueDictionary()


class _Memory(bytearray):
    step: "Step"


def number_of(step: "Step") -> Tensor:
    """A new number for a step, int64[] on the CPU."""
    number, memory = next(_counter), _Memory(8)
    memory.step = copy.copy(step)
    _by_number[number] = memory.step
    return torch.frombuffer(memory, dtype=torch.int64)[0].fill_(number)


def step_of(number: Tensor) -> "Step":
    """The step that a number stands for."""
    found = _by_number.get(int(number))
    if found is None:
        raise ValueError(
            "a compiled graph ran with a step that is gone; keep the handle of prepare() until its "
            "backward has run"
        )
    return found

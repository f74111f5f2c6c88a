"""Guards attention calls that name the executor instead of a handle against recomputation.

Activation checkpointing runs a layer's forward again during backward. A call that names a handle
then finds its own plan; one that names the executor finds the latest plan, which is the wrong one
if another was prepared in between. Such a call raises.
"""

import sys
import weakref
from dataclasses import dataclass
from types import FrameType

import torch
import torch.utils.checkpoint

from dyncp.executor.step import Step


@dataclass(eq=False)
class CallRecord:
    """One forward call through the executor whose backward may still come."""

    step: Step
    done: bool = False


class CallLog:
    """The calls of one executor that may still be recomputed."""

    def __init__(self) -> None:
        self._with_graph: weakref.WeakSet[CallRecord] = weakref.WeakSet()
        self._reentrant: list[CallRecord] = []

    def add(self, step: Step, *, has_graph: bool) -> CallRecord:
        """Records a call. Its graph keeps the record alive; a call without one (evaluation) is
        kept only when reentrant checkpointing made it, which runs forward under no_grad."""
        record = CallRecord(step)
        if has_graph:
            self._with_graph.add(record)
        elif _inside_checkpoint():
            self._reentrant.append(record)
        return record

    def check_recomputation(self, latest: Step) -> None:
        """Raises when a recomputation may belong to another plan than the latest."""
        waiting = [record for record in self._with_graph if not record.done] + self._reentrant
        if any(record.step is not latest for record in waiting):
            raise ValueError(
                "attention was recomputed (activation checkpointing) through the executor after "
                "another plan was prepared, so its plan is not known; pass the handle of prepare() "
                "to the layers: DCPAttn.apply(step, q, kv)"
            )
        self._reentrant.clear()


def in_backward() -> bool:
    """Whether autograd is running backward on this thread, as it is during recomputation."""
    return torch._C._current_graph_task_id() != -1


def _inside_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame is not None

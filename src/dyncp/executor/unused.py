"""Notices a model that takes steps and never calls attention with them.

A Transformers model swallows keywords that it does not know: one that was never attached trains on
each rank's rows alone, without an error. Its steps are dropped unused, one after the other. Only
plans of a loader over several ranks are watched: others may well be prepared for another purpose.
"""

import logging
import weakref
from typing import Any

from dyncp.executor.step import Step

logger = logging.getLogger(__name__)

WARNED, MOST = 3, 16  # dropped in a row: a few may be skipped, or prepared for another purpose
TEXT = (
    "%d steps in a row were prepared and dropped, and attention was called with none of them: if "
    "this is training, the model sees this rank's tokens alone. A Transformers model needs "
    "attach(model); layers of your own call attention(step, q, k, v)"
)


class UnusedSteps:
    """Steps of one executor that attention has not been called with."""

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[Step], set[Any], list[Step]]] = []
        self._dropped = 0

    def add(self, step: Step) -> None:
        if len(step.plan.agreed_by) > 1:
            self._watched.append((weakref.ref(step), step.accepted, step.others))

    def check(self) -> None:
        """Warns if the latest steps that are gone were unused; raises ValueError if many were."""
        waiting = []
        for reference, accepted, others in self._watched:
            if accepted or any(other.accepted for other in others):
                self._dropped = 0
            elif reference() is None:
                self._dropped += 1
            else:
                waiting.append((reference, accepted, others))
        self._watched = waiting
        if self._dropped == WARNED:
            logger.warning(TEXT, self._dropped)
        if self._dropped >= MOST:
            dropped, self._dropped = self._dropped, 0
            raise ValueError(TEXT % dropped)

"""Notices a model that takes steps and never calls attention with them.

A Transformers model swallows keywords that it does not know: one that was never attached trains on
each rank's rows alone, without an error. Its steps are dropped unused, one after the other. Only
plans of a loader over several ranks are watched: others may well be prepared for another purpose.
"""

import weakref
from typing import Any

from dyncp.executor.step import Step

DROPPED = 3  # in a row; a batch or two may be skipped


class UnusedSteps:
    """Steps of one executor that attention has not been called with."""

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[Step], set[Any], list[Step]]] = []
        self._dropped = 0

    def add(self, step: Step) -> None:
        if len(step.plan.agreed_by) > 1:
            self._watched.append((weakref.ref(step), step.accepted, step.others))

    def check(self) -> None:
        """Raises ValueError if the latest steps that are gone were all unused."""
        waiting = []
        for reference, accepted, others in self._watched:
            if accepted or any(other.accepted for other in others):
                self._dropped = 0
            elif reference() is None:
                self._dropped += 1
            else:
                waiting.append((reference, accepted, others))
        self._watched = waiting
        if self._dropped >= DROPPED:
            self._dropped = 0
            raise ValueError(
                f"{DROPPED} steps in a row were prepared and dropped, and attention was called "
                "with none of them: the model sees this rank's tokens alone. A Transformers model "
                "needs attach(model); layers of your own call attention(step, q, k, v)"
            )

"""Parts of a candidate: one mask and direction each, scheduled and simulated by itself."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dyncp.blocks import Direction
from dyncp.schedule import Schedule
from dyncp.simulate import AttentionTimes

Part = tuple[str, Direction]


@dataclass(frozen=True, eq=False)
class PartRun:
    """A part's schedule in at most so many steps, its simulation, and what scheduling took."""

    divisions: int
    schedule: Schedule
    times: AttentionTimes
    cpu_seconds: float

    @property
    def input_steps(self) -> int:
        """Divisions that wait for inputs."""
        feeds = self.schedule.phase_feeds
        return len(np.unique(feeds[feeds < self.schedule.num_divisions]))


Runs = Mapping[Part, PartRun]

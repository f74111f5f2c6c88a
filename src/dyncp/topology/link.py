"""Link: how long messages take."""

import math
from dataclasses import dataclass

from dyncp.checks import instance_of


@dataclass(frozen=True, slots=True)
class Link:
    """`latency` in seconds per message, `bandwidth` in bytes per second each way.

    Inside a machine the bandwidth is that of one rank's port, between machines that of all of a
    machine's NICs together.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for field in ("latency", "bandwidth"):
            instance_of(f"Link.{field}", getattr(self, field), (int, float), "a number")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"Link.latency is {self.latency}; seconds from 0 on are allowed")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(
                f"Link.bandwidth is {self.bandwidth}; "
                "a finite number of bytes per second above 0 is needed"
            )

    def scaled(self, bandwidth: float, latency: float) -> "Link":
        return Link(self.latency * latency, self.bandwidth * bandwidth)

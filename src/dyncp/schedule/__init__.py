"""Fourth stage: tiles get divisions, transfers get phases."""

from dyncp.schedule.all_gather import build_all_gather_schedule
from dyncp.schedule.divide import build_schedule
from dyncp.schedule.pace import Pace
from dyncp.schedule.ring import build_ring_schedule
from dyncp.schedule.schedule import Schedule, Transfers

# By the pattern that a placement asks for.
BUILDERS = {
    "minimal": build_schedule,
    "ring": build_ring_schedule,
    "all_gather": build_all_gather_schedule,
}

__all__ = [
    "BUILDERS",
    "Pace",
    "Schedule",
    "Transfers",
    "build_all_gather_schedule",
    "build_ring_schedule",
    "build_schedule",
]

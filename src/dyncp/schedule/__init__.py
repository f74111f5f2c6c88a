"""Fourth stage: tiles get divisions, transfers get phases."""

from dyncp.schedule.divide import build_schedule
from dyncp.schedule.schedule import Schedule, Transfers

__all__ = ["Schedule", "Transfers", "build_schedule"]

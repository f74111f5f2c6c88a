"""Event simulation: how long a plan takes, and what every rank and link does meanwhile."""

from dyncp.simulate.attention_times import AttentionTimes
from dyncp.simulate.entries import (
    join_times,
    layers_by_mask,
    rows_per_rank,
    simulate_plan,
    simulate_schedule,
    simulate_schedules,
)
from dyncp.simulate.simulated import Simulated
from dyncp.simulate.timeline import Activity, Lane, Timeline, make_timeline
from dyncp.simulate.trace import trace

__all__ = [
    "Activity",
    "AttentionTimes",
    "Lane",
    "Simulated",
    "Timeline",
    "join_times",
    "layers_by_mask",
    "make_timeline",
    "rows_per_rank",
    "simulate_plan",
    "simulate_schedule",
    "simulate_schedules",
    "trace",
]

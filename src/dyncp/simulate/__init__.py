"""Event simulation: how long a plan takes, and what every rank and link does in that time."""

from dyncp.simulate.flow import Flow, FlowMessages, Programs, layer_of_plan
from dyncp.simulate.layer import Layer, RowCosts, Sent, call_work, count_row_bytes, more_seconds
from dyncp.simulate.results import (
    AttentionTimes,
    Simulated,
    join_times,
    layers_by_mask,
    rows_per_rank,
    run_flow,
    simulate_plan,
    simulate_schedule,
    simulate_schedules,
)
from dyncp.simulate.timeline import Span, Track, make_timeline, trace

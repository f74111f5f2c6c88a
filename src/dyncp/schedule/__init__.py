"""Fourth stage: assigns tiles to divisions and transfers to phases."""

from dyncp.blocks import BlockGraph, Direction
from dyncp.placement import Placement
from dyncp.schedule.dynamic import build_dynamic_schedule
from dyncp.schedule.pace import Pace
from dyncp.schedule.routes import find_crossings, find_uses
from dyncp.schedule.schedule import Schedule, Transfers
from dyncp.schedule.static import build_static_schedule


def build_schedule(
    graph: BlockGraph,
    placement: Placement,
    name: str,
    direction: Direction,
    num_divisions: int,
    pace: Pace | None = None,
) -> Schedule:
    """Schedule of one mask and direction, static or dynamic as the placement requires. `pace` has
    the links and costs; without it, all ranks are in one node with the rates of `DEFAULT_PROFILE`.
    """
    if placement.traffic is not None:
        return build_static_schedule(graph, placement, name, direction, num_divisions)
    pace = pace or Pace.assumed(graph, placement.num_ranks)
    return build_dynamic_schedule(graph, placement, name, direction, num_divisions, pace)

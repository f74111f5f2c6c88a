"""Lower bounds on step time, so that the planner can skip candidates without simulating them."""

from collections.abc import Mapping

import numpy as np

from dyncp.arrays import Float64
from dyncp.blocks import Direction, Payload, bytes_per_token
from dyncp.cost import CostModel
from dyncp.placement import Bound
from dyncp.planner.task import Part, Placed, Task
from dyncp.schedule import find_crossings, find_uses
from dyncp.simulate import Simulated


def bound_misses(task: Task, bound: Bound) -> float:
    """Lower bound on how far a static method misses the requested limits."""
    ranks = task.topology.num_ranks
    return task.config.limits.missed(bound.work * ranks, bound.tokens * ranks)


def per_token_seconds(task: Task, placed: Placed) -> float:
    """Seconds of per-token work on the most loaded rank."""
    return task.token_seconds * float((_tokens_per_rank(placed) / task.topology.rank_speeds).max())


def _tokens_per_rank(placed: Placed) -> Float64:
    placement, tokens = placed.placement, placed.graph.blocks.tokens
    return np.bincount(placement.block_rank, tokens, placement.num_ranks).astype(np.float64)


def part_seconds(task: Task, placed: Placed) -> dict[Part, float]:
    """Lower bound on the seconds of all layers, by mask and direction: the busiest rank computes
    without waiting, and the busiest NIC sends without a break."""
    cost, topology, held, found = task.cost, task.topology, _tokens_per_rank(placed), {}
    for name, layers in task.layers.items():
        rank = placed.placement.tile_rank[name]
        for direction in task.directions:
            seconds = cost.graph_tile_seconds(placed.graph, name, direction)
            touched = _touched_rows_seconds(task, placed, name, direction)
            kernels = np.bincount(rank, seconds, topology.num_ranks) + touched
            busy = kernels / topology.rank_speeds + held * cost.least_row_seconds(direction)
            border = _border_seconds(task, placed, name, direction)
            found[name, direction] = layers * max(float(busy.max()) + _overhead(cost, 1), border)
    return found


def _touched_rows_seconds(
    task: Task, placed: Placed, name: str, direction: Direction
) -> Float64 | float:
    """Seconds per rank for the rows of all blocks that its tiles touch, each counted once."""
    cost, graph, ranks = task.cost, placed.graph, task.topology.num_ranks
    if not cost.row_keys(direction):
        return 0.0
    tiles, blocks = graph.tiles[name], len(graph.blocks)
    block = tiles.k_block if direction is Direction.BACKWARD else tiles.q_block
    heads = cost.heads_of(cost.groups_for(graph.shape, graph.head_groups))
    touched = np.zeros((ranks, len(heads) * blocks), np.bool_)
    touched[placed.placement.tile_rank[name], tiles.head_group * blocks + block] = True
    rows = touched @ np.outer(heads, graph.blocks.tokens).reshape(-1).astype(np.float64)
    return np.asarray(rows * cost.row_seconds(1.0, 1, direction), np.float64)


def _overhead(cost: CostModel, calls: int) -> float:
    """Seconds that calls add to their tiles: call overhead, and the launches of calls and of the
    unpacking between them."""
    return cost.profile.call_seconds * calls + cost.profile.launch_seconds * (2 * calls - 1)


def least_overhead(task: Task, part: Part) -> float:
    """Lower bound on what a layer adds to its tiles on an average rank: one call that loads its
    rows, and row work."""
    cost, ranks, (_, direction) = task.cost, task.topology.num_ranks, part
    loaded = cost.row_seconds(task.fewest_rows[part] / ranks, cost.shape.q_heads, direction)
    moved = task.batch.num_tokens / ranks * cost.least_row_seconds(direction)
    return loaded / float(task.topology.rank_speeds.max()) + moved + _overhead(cost, 1)


def reachable_seconds(task: Task, step: Simulated) -> float:
    """The ideal step with what hardly any plan avoids: messages that slow kernels down, one call
    that loads all rows of a rank, and its row work. No bound: masks may leave rows out."""
    cost, topology = task.cost, task.topology
    speeds, rows = float(topology.rank_speeds.sum()), task.batch.num_tokens / topology.num_ranks
    tokens = task.token_seconds * task.batch.num_tokens / speeds
    seconds = tokens + (step.ideal_seconds - tokens) * cost.profile.overlap_slowdown
    for name, direction in task.parts:
        more = cost.row_seconds(rows, cost.shape.q_heads, direction) + _overhead(cost, 1)
        seconds += task.layers[name] * (more + rows * cost.least_row_seconds(direction))
    return seconds


def _border_seconds(task: Task, placed: Placed, name: str, direction: Direction) -> float:
    """Lower bound on the seconds of inter-node traffic on the busiest NIC."""
    topology, placement = task.topology, placed.placement
    if placement.pattern == "ring":  # blocks come from neighbours
        return 0.0
    traffic = placement.traffic
    # Relays spread the traffic of a node over its NICs; otherwise every rank uses its own NIC.
    by_rank = placement.static and (traffic is None or traffic.node is None)
    ranks = topology.ranks_per_nic if by_rank else topology.ranks_per_node
    uses = find_uses(placed.graph, placement, name, direction)
    at = find_crossings(uses, topology, joined=not by_rank).firsts
    user, owner = uses.rank[at] // ranks, uses.owner[at] // ranks
    sent, back, places = uses.num_bytes[at], uses.result_bytes[at], topology.num_ranks
    into = np.bincount(user, sent, places) + np.bincount(owner, back, places)
    out = np.bincount(owner, sent, places) + np.bincount(user, back, places)
    bandwidth = topology.nic_bandwidth if by_rank else topology.inter.bandwidth
    return float(max(into.max(), out.max())) / bandwidth


def static_seconds(task: Task, bound: Bound, pairs: Mapping[str, float]) -> float:
    """Lower bound on the step seconds of a static method. `pairs` are the allowed pairs of the
    batch, by mask."""
    cost, topology = task.cost, task.topology
    work = bound.work if len(task.batch.masks) == 1 else 1 / topology.num_ranks
    fastest = float(topology.rank_speeds.max())
    payloads = bytes_per_token(cost.shape, cost.shape.head_groups(1))[:, 0]
    # The host issues a COMPUTE for every call, and LAUNCH and WAIT, or the start and the end.
    host = 3 * bound.calls * cost.host_seconds
    seconds = task.token_seconds * bound.tokens * task.batch.num_tokens / fastest
    for name, direction in task.parts:
        flops = float(cost.flops(np.asarray(pairs[name]), cost.shape.q_heads, direction))
        whole = flops / cost.attention_rate(direction) / fastest
        mean = whole / topology.num_ranks + least_overhead(task, (name, direction))
        compute = max(work * whole, mean)
        keys = float(payloads[Payload.KV]) * (1 + direction) * bound.seconds_per_byte
        compute += _overhead(cost, bound.calls) - _overhead(cost, 1)
        seconds += task.layers[name] * max(compute, keys, host)
    return seconds

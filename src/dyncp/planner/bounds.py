"""Lower bounds on step time, so that the planner can skip candidates without simulating them."""

from collections.abc import Mapping

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import K_KINDS, Q_KINDS, Payload, bytes_per_token
from dyncp.cost import CostModel
from dyncp.placement import Bound, RemoteUses, find_remote_uses
from dyncp.planner.task import Part, Placed, Task


def bound_misses(task: Task, bound: Bound) -> float:
    """Lower bound on how far a static method misses the requested limits."""
    ranks = task.topology.num_ranks
    return task.config.limits.missed(bound.work * ranks, bound.tokens * ranks)


def per_token_seconds(task: Task, placed: Placed) -> float:
    """Seconds of per-token work on the most loaded rank."""
    placement, tokens = placed.placement, placed.graph.blocks.tokens
    held = np.bincount(placement.block_rank, tokens, placement.num_ranks)
    return task.token_seconds * float((held / task.topology.rank_speeds).max())


def part_seconds(task: Task, placed: Placed) -> dict[Part, float]:
    """Lower bound on the seconds of all layers, by mask and direction: the busiest rank computes
    without waiting, and the busiest NIC sends without a break."""
    ranks, speed, found = task.topology.num_ranks, task.topology.rank_speeds, {}
    for name, layers in task.layers.items():
        rank, border = placed.placement.tile_rank[name], _border_seconds(task, placed, name)
        for direction, crossed in zip(task.directions, border, strict=True):
            seconds = task.cost.graph_tile_seconds(placed.graph, name, direction)
            busy = float((np.bincount(rank, seconds, ranks) / speed).max())
            found[name, direction] = layers * max(busy + _overhead(task.cost, 1), crossed)
    return found


def _overhead(cost: CostModel, calls: int) -> float:
    """Seconds that calls add to their tiles: call overhead, and the launches of calls and of the
    unpacking between them."""
    return cost.profile.call_seconds * calls + cost.profile.launch_seconds * (2 * calls - 1)


def _border_seconds(task: Task, placed: Placed, name: str) -> list[float]:
    """Lower bound on the seconds of inter-node traffic on the busiest NIC, by direction."""
    topology, placement, tokens = task.topology, placed.placement, placed.graph.blocks.tokens
    if placement.pattern == "ring":  # blocks come from neighbours
        return [0.0 for _ in task.directions]
    traffic = placement.traffic
    by_rank = placement.static and (traffic is None or traffic.node is None)
    ranks = topology.ranks_per_nic if by_rank else topology.ranks_per_node
    places = -(-topology.num_ranks // ranks)
    moved = np.zeros((len(task.directions), 2, places))  # into and out of NICs, or nodes
    for keys in (False, True):
        uses = find_remote_uses(placed.graph, placement, name, keys=keys)
        owner = placement.block_rank[uses.block].astype(np.int64)
        at = _crossing(uses, owner, topology.ranks_per_node, once=not by_rank)
        user, owner = uses.rank[at] // ranks, owner[at] // ranks
        size = placed.graph.payload_bytes[:, uses.head_group[at]] * tokens[uses.block[at]]
        for way, direction in enumerate(task.directions):
            there, *back = (K_KINDS if keys else Q_KINDS)[direction]
            for kind, into, out in ((there, user, owner), *((kind, owner, user) for kind in back)):
                moved[way, 0] += np.bincount(into, size[kind], places)
                moved[way, 1] += np.bincount(out, size[kind], places)
    bandwidth = topology.nic_bandwidth if by_rank else topology.inter.bandwidth
    return [float(own.max()) / bandwidth for own in moved]


def _crossing(uses: RemoteUses, owner: Int64, ranks_per_node: int, *, once: bool) -> Int64:
    """Indices of uses of other nodes' blocks; with `once`, one per node and block."""
    node = uses.rank // ranks_per_node
    far = np.flatnonzero(node != owner // ranks_per_node)
    if not once:
        return far
    blocks, groups = (int(x.max(initial=0)) + 1 for x in (uses.block, uses.head_group))
    what = (node[far] * blocks + uses.block[far]) * groups + uses.head_group[far]
    return far[np.unique(what, return_index=True)[1]]


def static_seconds(task: Task, bound: Bound, pairs: Mapping[str, float]) -> float:
    """Lower bound on the step seconds of a static method. `pairs` are the allowed pairs of the
    batch, by mask."""
    cost, topology = task.cost, task.topology
    work = bound.work if len(task.batch.masks) == 1 else 1 / topology.num_ranks
    fastest = float(topology.rank_speeds.max())
    payloads = bytes_per_token(cost.shape, cost.shape.head_groups(1))[:, 0]
    seconds = task.token_seconds * bound.tokens * task.batch.num_tokens / fastest
    for name, direction in task.parts:
        flops = float(cost.flops(np.asarray(pairs[name]), cost.shape.q_heads, direction))
        compute = work * flops / cost.attention_rate(direction) / fastest
        keys = float(payloads[Payload.KV]) * (1 + direction) * bound.seconds_per_byte
        swapped = float(payloads[[*Q_KINDS[direction], *K_KINDS[direction]]].sum())
        swap = swapped * bound.swap_seconds_per_byte
        seconds += task.layers[name] * max(compute + _overhead(cost, bound.calls), keys, swap)
    return seconds

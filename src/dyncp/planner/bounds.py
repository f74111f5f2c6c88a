"""Lower bounds on step time, so that the planner can skip candidates without simulating them."""

from collections.abc import Mapping

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import K_KINDS, Q_KINDS, Direction, Payload, bytes_per_token
from dyncp.cost import CostModel
from dyncp.placement import Bound, RemoteUses, find_remote_uses
from dyncp.planner.task import Part, Placed, Task


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
        rank, border = placed.placement.tile_rank[name], _border_seconds(task, placed, name)
        for direction, crossed in zip(task.directions, border, strict=True):
            seconds = cost.graph_tile_seconds(placed.graph, name, direction)
            touched = _touched_rows_seconds(task, placed, name, direction)
            kernels = np.bincount(rank, seconds, topology.num_ranks) + touched
            busy = kernels / topology.rank_speeds + held * cost.least_row_seconds(direction)
            found[name, direction] = layers * max(float(busy.max()) + _overhead(cost, 1), crossed)
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
    # The host issues a COMPUTE for every call, and LAUNCH and WAIT, or the start and the end.
    host = 3 * bound.calls * cost.host_seconds
    seconds = task.token_seconds * bound.tokens * task.batch.num_tokens / fastest
    for name, direction in task.parts:
        flops = float(cost.flops(np.asarray(pairs[name]), cost.shape.q_heads, direction))
        compute = work * flops / cost.attention_rate(direction) / fastest
        keys = float(payloads[Payload.KV]) * (1 + direction) * bound.seconds_per_byte
        swapped = float(payloads[[*Q_KINDS[direction], *K_KINDS[direction]]].sum())
        swap = swapped * bound.swap_seconds_per_byte
        compute += _overhead(cost, bound.calls)
        seconds += task.layers[name] * max(compute, keys, swap, host)
    return seconds

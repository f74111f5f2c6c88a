"""What candidates need at least: bounds that spare the planner from simulating them."""

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import Q_INPUT, Q_RESULT, BlockGraph, Direction, Payload
from dyncp.cost import CostModel
from dyncp.cost.cost_model import least_row_seconds
from dyncp.placement import Bound, find_remote_uses, whole_rows
from dyncp.planner.candidate import Part, Placed
from dyncp.planner.task import Task

# How much of an estimate counts as certain.
CERTAIN = 0.95
# Kernel tiles from which on a sequence is long.
LONG = 16


def bound_misses(task: Task, bound: Bound) -> float:
    """By how much a static method misses the limits asked for at least."""
    ranks = task.topology.num_ranks
    return task.config.limits.missed(bound.work * ranks, bound.tokens * ranks)


def placed_seconds(task: Task, placed: Placed) -> float:
    """Step seconds that a placement needs at least, whatever its schedule."""
    return sum(part_seconds(task, placed).values()) + held_seconds(task, placed)


def held_seconds(task: Task, placed: Placed) -> float:
    """What the per-token work of the fullest rank takes."""
    return task.token_seconds * float((_held(placed) / task.topology.rank_speeds).max())


def part_seconds(task: Task, placed: Placed) -> dict[Part, float]:
    """What all layers of each mask and direction need at least."""
    held, found = _held(placed), {}
    for name, layers in task.layers.items():
        least = _attention_seconds(task, placed, name, held) if layers else [0.0] * 2
        for direction, seconds in zip(task.directions, least, strict=False):
            found[name, direction] = layers * seconds
    return found


def _held(placed: Placed) -> Float64:
    """Tokens of every rank."""
    placement, tokens = placed.placement, placed.graph.blocks.tokens
    return np.bincount(placement.block_rank, tokens, placement.num_ranks).astype(np.float64)


def _attention_seconds(task: Task, placed: Placed, name: str, held: Float64) -> list[float]:
    """Of one layer with mask `name`, by direction, at least."""
    graph, ranks, speed = placed.graph, task.topology.num_ranks, task.topology.rank_speeds
    calls, border = _least_calls(placed, name), _border_seconds(task, placed, name)
    overhead, host = _overhead(task.cost, calls), _host_seconds(task.cost, calls).max()
    least = []
    for direction in task.directions:
        seconds = task.cost.graph_tile_seconds(graph, name, direction)
        busy = np.bincount(placed.placement.tile_rank[name], seconds, ranks) / speed
        rows = held * least_row_seconds(direction, task.cost)
        met = _met_seconds(task, placed, name, direction) / speed
        compute = float((busy + met + overhead + rows).max())
        heads = _all_to_all_seconds(task, placed, direction)
        least.append(max(compute, border * (1 + direction), heads, float(host)))
    return least


def _met_seconds(task: Task, placed: Placed, name: str, direction: Direction) -> Float64 | float:
    """What the rows of blocks cost every rank that some of its calls meets: each counts once."""
    cost, graph, ranks = task.cost, placed.graph, task.topology.num_ranks
    if not cost.row_keys(direction):
        return 0.0
    tiles, blocks = graph.tiles[name], len(graph.blocks)
    block = tiles.k_block if direction is Direction.BACKWARD else tiles.q_block
    heads = cost.heads_of(cost.groups_for(graph.shape, graph.head_groups))
    met = np.zeros((ranks, len(heads) * blocks), np.bool_)
    met[placed.placement.tile_rank[name], tiles.head_group * blocks + block] = True
    rows = met @ np.outer(heads, graph.blocks.tokens).reshape(-1).astype(np.float64)
    return np.asarray(rows * cost.row_seconds(1.0, 1, direction), np.float64)


def _overhead(cost: CostModel, calls: Int64) -> Float64:
    """What calls add to their tiles: their own overhead, and the launches of calls and of what is
    unpacked between them."""
    launches = 2 * calls - 1
    return np.asarray(cost.call_seconds(calls) + launches * cost.profile.launch_seconds)


def _host_seconds(cost: CostModel, calls: Int64) -> Float64:
    """What the host needs to issue calls: start and end, and launch and wait of what further ones
    wait for."""
    return np.asarray(3 * calls * cost.host_seconds, np.float64)


def _least_calls(placed: Placed, name: str) -> Int64:
    """Kernel calls of every rank: one, and in rings one for every rank whose keys it uses."""
    placement, ranks = placed.placement, placed.placement.num_ranks
    traffic, tiles = placement.traffic, placed.graph.tiles[name]
    if traffic is None or traffic.pattern != "ring":
        return np.ones(ranks, np.int64)
    home = traffic.home[tiles.k_block, tiles.head_group].astype(np.int64)
    used = np.zeros((ranks, ranks), np.bool_)
    used[placement.tile_rank[name], home] = True
    calls: Int64 = np.maximum(used.sum(axis=1), 1)
    return calls


def _all_to_all_seconds(task: Task, placed: Placed, direction: Direction) -> float:
    """What moving heads from owners to homes and their results back needs at least on the busiest
    NIC, outwards."""
    graph, traffic = placed.graph, placed.placement.traffic
    if traffic is None or traffic.pattern != "ring" or len(graph.head_groups) == 1:
        return 0.0
    topology = task.topology
    owner = np.broadcast_to(placed.placement.block_rank[:, None], traffic.home.shape)
    per_machine = topology.ranks_per_machine
    far = owner // per_machine != traffic.home // per_machine
    sends = [Q_INPUT[direction], Payload.KV]
    returns = [Q_RESULT[direction], *([Payload.DKV] if direction is Direction.BACKWARD else [])]
    leaving = np.zeros(topology.num_ranks)
    for rank, kinds in ((owner, sends), (traffic.home, returns)):
        size = graph.blocks.tokens[:, None] * graph.payload_bytes[kinds].sum(axis=0)
        leaving += np.bincount(rank[far], size[far], topology.num_ranks)
    by_nic = np.bincount(np.arange(len(leaving)) // topology.ranks_per_nic, leaving)
    return float(by_nic.max()) / topology.nic_bandwidth


def _border_seconds(task: Task, placed: Placed, name: str) -> float:
    """What keys and values need at least on the busiest NIC, forward: every machine gets a block
    once, or, in static methods, every rank."""
    topology, placement, k_block = task.topology, placed.placement, placed.graph.tiles[name].k_block
    ranks = topology.ranks_per_machine
    crosses = placement.tile_rank[name] // ranks != placement.block_rank[k_block] // ranks
    if placement.pattern == "ring" or not crosses.any():  # in rings, blocks come from neighbours
        return 0.0
    keys = find_remote_uses(placed.graph, placement, name, k_block)
    owner = placement.block_rank[keys.block]
    machine = keys.rank // topology.ranks_per_machine
    far = machine != owner // topology.ranks_per_machine
    size = placed.graph.payload_bytes[Payload.KV, keys.head_group[far]]
    size = size * placed.graph.blocks.tokens[keys.block[far]]
    traffic = placement.traffic
    if placement.static and (traffic is None or traffic.machine is None):
        busiest = np.bincount(keys.rank[far] // topology.ranks_per_nic, size, 1).max()
        return float(busiest) / topology.nic_bandwidth
    what = (machine[far] * len(placed.graph.blocks) + keys.block[far]) * len(
        placed.graph.head_groups
    ) + keys.head_group[far]
    _, first = np.unique(what, return_index=True)
    busiest = np.bincount(machine[far][first], size[first], 1).max()
    return float(busiest) / topology.inter.bandwidth


def whole_seconds(task: Task, graph: BlockGraph) -> dict[str, list[float]]:
    """Attention seconds of the batch on one rank at least, by mask, forward and backward.

    Those of its pairs, or, of long sequences, nearly those of the uncut sequence: cutting adds to
    what kernels work through, save for rounding to kernel tiles."""
    heads, cost, found = task.cost.shape.q_heads, task.cost, {}
    for name in graph.tiles:
        pairs, rows = whole_rows(graph, name)
        is_long = rows >= LONG * cost.profile.kernel_tile
        least = np.where(is_long, CERTAIN * cost.kernel_area(pairs, rows, rows), pairs)
        found[name] = [
            float(cost.flops(least, heads, direction).sum()) / cost.attention_rate(direction)
            for direction in task.directions
        ]
    return found


def static_seconds(task: Task, whole: dict[str, list[float]], bound: Bound) -> float:
    """Step seconds that a static method needs at least; `whole` are those of `whole_seconds`."""
    cost, ranks = task.cost, task.topology.num_ranks
    work = bound.work if len(task.batch.masks) == 1 else 1 / ranks
    kv_bytes = 2 * cost.shape.kv_heads * cost.shape.head_dim * cost.shape.item_bytes
    speed = float(task.topology.rank_speeds.max())
    calls = np.asarray(bound.calls)
    overhead, host = float(_overhead(cost, calls)), float(_host_seconds(cost, calls))
    attention = 0.0
    for name, layers in task.layers.items():
        for direction, seconds in zip(task.directions, whole[name], strict=True):
            compute = work * seconds / speed + overhead
            moved = kv_bytes * (2 if direction is Direction.BACKWARD else 1)
            attention += layers * max(compute, moved * bound.seconds_per_byte, host)
    return attention + task.token_seconds * bound.tokens * task.batch.num_tokens / speed

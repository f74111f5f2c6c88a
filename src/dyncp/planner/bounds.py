"""Lower bounds on step time, with which the planner skips candidates without simulating them."""

from functools import cache

import numpy as np

from dyncp.arrays import Float64, Int64
from dyncp.blocks import (
    K_KINDS,
    Q_KINDS,
    BlockGraph,
    Direction,
    Payload,
    bytes_per_token,
)
from dyncp.cost import CostModel
from dyncp.placement import Bound, RemoteUses, find_remote_uses, whole_rows
from dyncp.planner.task import Part, Placed, Task

# Share of an estimated kernel area that counts as a bound.
CERTAIN = 0.95
# Kernel tiles from which on a sequence is long.
LONG = 16


def bound_misses(task: Task, bound: Bound) -> float:
    """Lower bound on how far a static method misses the requested limits."""
    ranks = task.topology.num_ranks
    return task.config.limits.missed(bound.work * ranks, bound.tokens * ranks)


def placed_seconds(task: Task, placed: Placed) -> float:
    """Lower bound on the step seconds of a placement, whatever its schedule."""
    return sum(part_seconds(task, placed).values()) + per_token_seconds(task, placed)


def per_token_seconds(task: Task, placed: Placed) -> float:
    """Seconds of per-token work on the most loaded rank."""
    return task.token_seconds * float((_tokens_per_rank(placed) / task.topology.rank_speeds).max())


def part_seconds(task: Task, placed: Placed) -> dict[Part, float]:
    """Lower bound on the seconds of all layers, by mask and direction."""
    held, found = _tokens_per_rank(placed), {}
    for name, layers in task.layers.items():
        least = _attention_seconds(task, placed, name, held) if layers else [0.0] * 2
        for direction, seconds in zip(task.directions, least, strict=False):
            found[name, direction] = layers * seconds
    return found


def _tokens_per_rank(placed: Placed) -> Float64:
    """Tokens of every rank."""
    placement, tokens = placed.placement, placed.graph.blocks.tokens
    return np.bincount(placement.block_rank, tokens, placement.num_ranks).astype(np.float64)


def _attention_seconds(task: Task, placed: Placed, name: str, held: Float64) -> list[float]:
    """Lower bound on the seconds of one layer with mask `name`, by direction."""
    graph, ranks, speed = placed.graph, task.topology.num_ranks, task.topology.rank_speeds
    calls, border = _least_calls(placed, name), _border_seconds(task, placed, name)
    overhead, host = _overhead(task.cost, calls), _host_seconds(task.cost, calls).max()
    least = []
    for direction, crossed in zip(task.directions, border, strict=True):
        seconds = task.cost.graph_tile_seconds(graph, name, direction)
        busy = np.bincount(placed.placement.tile_rank[name], seconds, ranks) / speed
        rows = held * task.cost.least_row_seconds(direction)
        met = _touched_rows_seconds(task, placed, name, direction) / speed
        compute = float((busy + met + overhead + rows).max())
        heads = _all_to_all_seconds(task, placed, direction)
        least.append(max(compute, crossed, heads, float(host)))
    return least


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
    met = np.zeros((ranks, len(heads) * blocks), np.bool_)
    met[placed.placement.tile_rank[name], tiles.head_group * blocks + block] = True
    rows = met @ np.outer(heads, graph.blocks.tokens).reshape(-1).astype(np.float64)
    return np.asarray(rows * cost.row_seconds(1.0, 1, direction), np.float64)


def _overhead(cost: CostModel, calls: Int64) -> Float64:
    """Seconds that calls add to their tiles: call overhead, and the launches of calls and of the
    unpacking between them."""
    launches = 2 * calls - 1
    return np.asarray(cost.profile.call_seconds * calls + launches * cost.profile.launch_seconds)


def _host_seconds(cost: CostModel, calls: Int64) -> Float64:
    """Host seconds to issue calls: start and end, and LAUNCH and WAIT for each further call."""
    return np.asarray(3 * calls * cost.host_seconds, np.float64)


def _least_calls(placed: Placed, name: str) -> Int64:
    """Kernel calls per rank: one; in rings, one for every rank whose keys it uses."""
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
    """Lower bound on the seconds of the head all-to-all and its return, on the busiest NIC,
    outbound."""
    graph, traffic = placed.graph, placed.placement.traffic
    if traffic is None or traffic.pattern != "ring" or len(graph.head_groups) == 1:
        return 0.0
    topology = task.topology
    owner = np.broadcast_to(placed.placement.block_rank[:, None], traffic.home.shape)
    per_node = topology.ranks_per_node
    far = owner // per_node != traffic.home // per_node
    of_queries, of_keys = Q_KINDS[direction], K_KINDS[direction]
    sends, returns = [of_queries[0], of_keys[0]], [*of_queries[1:], *of_keys[1:]]
    leaving = np.zeros(topology.num_ranks)
    for rank, kinds in ((owner, sends), (traffic.home, returns)):
        size = graph.blocks.tokens[:, None] * graph.payload_bytes[kinds].sum(axis=0)
        leaving += np.bincount(rank[far], size[far], topology.num_ranks)
    by_nic = np.bincount(np.arange(len(leaving)) // topology.ranks_per_nic, leaving)
    return float(by_nic.max()) / topology.nic_bandwidth


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


class StaticSeconds:
    """Lower bounds on the step seconds of static methods; `graph` is any graph of the batch."""

    def __init__(self, task: Task, graph: BlockGraph) -> None:
        self._task, cost = task, task.cost
        self._rows = {name: whole_rows(graph, name) for name in graph.tiles}
        self._area = {name: _whole_area(cost, *own) for name, own in self._rows.items()}
        self._rates = [
            float(cost.flops(np.ones(()), cost.shape.q_heads, direction))
            / cost.attention_rate(direction)
            for direction in task.directions
        ]
        payloads = bytes_per_token(cost.shape, cost.shape.head_groups(1))[:, 0]
        self._keys = float(payloads[Payload.KV])
        self._cut_areas = cache(self._cut_area)

    def of(self, bound: Bound, sizes: Int64) -> float:
        """For a method with this bound that cuts sequences into blocks of these sizes."""
        task, ranks = self._task, self._task.topology.num_ranks
        work = bound.work if len(task.batch.masks) == 1 else 1 / ranks
        speeds, calls = task.topology.rank_speeds, np.asarray(bound.calls)
        fastest, all_of_them = float(speeds.max()), float(speeds.sum())
        overhead = float(_overhead(task.cost, calls))
        host = float(_host_seconds(task.cost, calls))
        cut, attention = self._cut_areas(sizes.tobytes()), 0.0
        for name, layers in task.layers.items():
            area = max(work * self._area[name].sum() / fastest, cut[name] / all_of_them)
            for direction, rate in enumerate(self._rates):
                keys = self._keys * (1 + direction) * bound.seconds_per_byte
                attention += layers * max(area * rate + overhead, keys, host)
        return attention + task.token_seconds * bound.tokens * task.batch.num_tokens / fastest

    def _cut_area(self, sizes: bytes) -> dict[str, float]:
        """Kernel area of the batch in blocks of these sizes at least, by mask: every block is
        rounded up to kernel tiles, and the last one of a sequence may be shorter."""
        side, found = self._task.cost.profile.kernel_tile, {}
        for name, (pairs, rows) in self._rows.items():
            size = np.minimum(rows, np.frombuffer(sizes, np.int64))
            ends = np.stack([size, (rows - 1) % size + 1])
            rounding = (-(-ends // side) * side / ends).min(axis=0)
            found[name] = float(np.maximum(self._area[name], pairs * rounding).sum())
        return found


def _whole_area(cost: CostModel, pairs: Int64, rows: Int64) -> Float64:
    """Least kernel area of every sequence: its pairs, or, of long ones, nearly that of the uncut
    sequence: cutting adds to what kernels work through, save for rounding to kernel tiles."""
    is_long = rows >= LONG * cost.profile.kernel_tile
    area = np.where(is_long, CERTAIN * cost.kernel_area(pairs, rows, rows), pairs)
    return np.asarray(area, np.float64)

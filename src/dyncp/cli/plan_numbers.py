"""The numbers of a plan, as `dyncp plan --json` prints them."""

from typing import Any

import numpy as np

from dyncp.planner import Candidate, Task
from dyncp.schedule import Schedule
from dyncp.topology import Topology


def describe_candidate(candidate: Candidate, task: Task) -> dict[str, Any]:
    """Solver, sizes, traffic, balance and simulated times."""
    simulated, topology = task.simulate(candidate), task.topology
    pairs = list(candidate.schedules.values())
    return {
        "solver": candidate.placement.solver,
        "num_blocks": len(candidate.graph.blocks),
        "num_tiles": sum(len(tiles) for tiles in candidate.graph.tiles.values()),
        "forward": describe_traffic(candidate, topology, [forward for forward, _ in pairs]),
        "backward": describe_traffic(
            candidate, topology, [backward for _, backward in pairs if backward]
        ),
        "compute_max_over_mean": candidate.balance.compute_max_over_mean,
        "tokens_max_over_mean": candidate.balance.tokens_max_over_mean,
        "balance_reason": candidate.balance.reason,
        "simulated": {
            "forward_seconds": simulated.forward_seconds,
            "backward_seconds": simulated.backward_seconds,
            "exposed_seconds": simulated.exposed_seconds,
            "token_seconds": simulated.token_seconds,
            "step_seconds": simulated.step_seconds,
            "ideal_seconds": simulated.ideal_seconds,
        },
    }


def describe_traffic(
    candidate: Candidate, topology: Topology, schedules: list[Schedule]
) -> dict[str, int]:
    """Bytes of one direction over all masks."""
    graph, ranks = candidate.graph, topology.num_ranks
    sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    between = 0
    for schedule in schedules:
        moved = schedule.transfers
        size = graph.payload_bytes[moved.kind, moved.head_group] * graph.blocks.tokens[moved.block]
        np.add.at(sent, moved.source, size)
        np.add.at(received, moved.target, size)
        machine = topology.ranks_per_machine
        between += int(size[moved.source // machine != moved.target // machine].sum())
    return {
        "bytes": int(sent.sum()),
        "inter_machine_bytes": between,
        "max_rank_send_bytes": int(sent.max()),
        "max_rank_recv_bytes": int(received.max()),
        "divisions": max((schedule.num_divisions for schedule in schedules), default=0),
    }


def dump_placement(candidate: Candidate) -> dict[str, Any]:
    """Blocks and tiles with their ranks and forward divisions, for independent checks."""
    graph, placement = candidate.graph, candidate.placement
    blocks = graph.blocks
    columns = (blocks.sequence, blocks.start, blocks.end, placement.block_rank)
    tiles = []
    for name, own in graph.tiles.items():
        division = candidate.schedules[name][0].tile_division
        rank = placement.tile_rank[name]
        fields = (own.q_block, own.k_block, own.head_group, rank, division, own.pairs)
        tiles += np.stack([field.astype(np.int64) for field in fields], axis=1).tolist()
    return {
        "head_groups": [[g.first_kv_head, g.num_kv_heads] for g in graph.head_groups],
        "blocks": np.stack(columns, axis=1).tolist(),
        "tiles": tiles,
    }

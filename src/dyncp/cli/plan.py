"""`dyncp plan`: plans one batch and shows what the plan costs."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from dyncp.cli import arguments
from dyncp.cli.arguments import Progress, option
from dyncp.placement import static_candidates
from dyncp.plan import save_plan
from dyncp.planner import Candidate, Task, assemble_choice, choose, surviving
from dyncp.schedule import Schedule
from dyncp.topology import Topology

TIMES = ("forward", "backward", "exposed", "token", "traffic", "step", "ideal")

LEGEND = (
    "MB sent per attention layer, (inter) between nodes; compute, tokens: largest rank / mean; "
    "attn: one layer, forward and backward"
)
EXAMPLES = (
    "dyncp plan --sample ldc:0 --mask lambda_shaped --compare",
    "dyncp plan --sample ldc:0 --model llama3-8b --solver auto",
    "dyncp plan --lengths 65536,4096,4096,512 --nodes 1 --model llama3-8b --json",
)


def add_options(parser: ArgumentParser) -> None:
    arguments.add_lengths_options(parser, listed=True)
    option(parser, "--tokens", "tokens of a --sample batch", 131072, metavar="N")
    arguments.add_planning_options(parser)
    text = "tokens of a block (default: chosen per sequence)"
    option(parser, "--block-size", text, type=int, metavar="N")
    option(parser, "--seed", "random seed of the solver", 0, metavar="N")
    text = "also plan with all static methods"
    parser.add_argument("--compare", action="store_true", help=text)
    text = "write the plan with its batch, for `dyncp verify`"
    option(parser, "--save", text, type=Path, metavar="FILE")
    text = "write blocks and tiles with their ranks as JSON"
    option(parser, "--dump-placement", text, type=Path, metavar="FILE")
    arguments.add_json_option(parser)


def run(args: Namespace) -> int:
    arguments.check_outputs(save=args.save, dump_placement=args.dump_placement)
    model, config = arguments.model_of(args), arguments.config_of(args)
    cost = arguments.cost_of(args, model)
    topology = arguments.topology_of(args, cost.profile)
    batch = arguments.make_batch(args.mask, arguments.lengths_of(args))
    config = replace(config, block_size=args.block_size)
    progress = Progress()
    where = f"{topology.num_ranks} ranks, profile {cost.profile.name}"
    progress.say(f"planning {batch.num_tokens:,} tokens for {where} ...")

    for _ in range(2):  # the first time compiles, the second is timed
        start = process_time()
        task = Task.of(batch, topology, cost.shape, config, cost, model)
        choice = choose(task)
        chosen = process_time()
        plan = assemble_choice(task, choice)
        end = process_time()
    candidate = choice.candidate
    if args.save:
        save_plan(args.save, plan, batch)
    if args.dump_placement:
        args.dump_placement.write_text(json.dumps(dump_placement(candidate)), encoding="utf-8")
    seconds = dict(candidate.cpu_seconds) | {"assemble": end - chosen, "total": end - start}
    result = describe_candidate(candidate, task) | {
        "cpu_seconds": seconds,
        "peak_workspace_bytes": plan.memory().peak,
        "why": choice.explain(),
    }
    if args.compare:
        result["baselines"], others = {}, []
        for static in static_candidates(batch.lengths, cost.shape, topology):
            progress.show(f"comparing with {static.name} ...")
            other = task.follow(task.place(static))
            result["baselines"][static.name] = describe_candidate(other, task)
            others.append(other)
        progress.clear()
        result["surviving"] = surviving(task, candidate, others)
    arguments.show(args, result, _lines(result))
    return 0


def _lines(result: dict[str, Any]) -> Iterator[str]:
    ms = {stage: f"{1e3 * seconds:.1f}" for stage, seconds in result["cpu_seconds"].items()}
    yield (
        f"{result['num_blocks']:,} blocks, {result['num_tiles']:,} tiles, solver "
        f"{result['solver']}; planned in {ms['total']} ms of CPU time (blocks {ms['blocks']}, "
        f"placement {ms['placement']}, schedule {ms['schedule']}, assemble {ms['assemble']})"
    )
    yield ""
    yield (
        f"{'':<28}{'fwd MB':>9}{'(inter)':>10}{'bwd MB':>9}{'(inter)':>10}{'compute':>9}"
        f"{'tokens':>8}{'attn ms':>9}{'step ms':>9}"
    )
    yield _row(result["solver"], result)
    for name, numbers in result.get("baselines", {}).items():
        yield _row(name, numbers)
    yield ""
    ideal = 1e3 * result["simulated"]["ideal_seconds"]
    yield LEGEND
    yield f"ideal without communication and imbalance: {ideal:.2f} ms per step"
    if "surviving" in result:
        parts = [f"{name} {ratio:.2f}" for name, ratio in result["surviving"].items()]
        yield f"{IF_NOT_AS_ASSUMED}: {', '.join(parts)}"
    if result["why"]:
        yield f"\n{result['why']}"
    if result["balance_reason"]:
        yield f"balance: {result['balance_reason']}"


IF_NOT_AS_ASSUMED = (
    "if the cluster is not as assumed, with the same plans, the best static method takes this many "
    "times as long"
)


def _row(name: str, numbers: dict[str, Any]) -> str:
    traffic = "".join(
        f"{numbers[way]['bytes'] / 1e6:>9.1f}{numbers[way]['inter_node_bytes'] / 1e6:>10.1f}"
        for way in ("forward", "backward")
    )
    times = numbers["simulated"]
    attention = 1e3 * (times["forward_seconds"] + times["backward_seconds"])
    return (
        f"{name:<28}{traffic}{numbers['compute_max_over_mean']:>9.3f}"
        f"{numbers['tokens_max_over_mean']:>8.3f}{attention:>9.2f}"
        f"{1e3 * times['step_seconds']:>9.2f}"
    )


def describe_candidate(candidate: Candidate, task: Task) -> dict[str, Any]:
    """The solver, sizes, traffic, balance and simulated times of a candidate."""
    simulated, topology = candidate.simulated, task.topology
    forward, backward = zip(*candidate.schedules.values(), strict=True)
    return {
        "solver": candidate.placement.solver,
        "num_blocks": len(candidate.graph.blocks),
        "num_tiles": sum(len(tiles) for tiles in candidate.graph.tiles.values()),
        "forward": describe_traffic(candidate, topology, forward),
        "backward": describe_traffic(candidate, topology, [x for x in backward if x]),
        "compute_max_over_mean": candidate.balance.compute_max_over_mean,
        "tokens_max_over_mean": candidate.balance.tokens_max_over_mean,
        "balance_reason": candidate.balance.reason,
        "simulated": {f"{part}_seconds": getattr(simulated, f"{part}_seconds") for part in TIMES},
    }


def describe_traffic(
    candidate: Candidate, topology: Topology, schedules: Sequence[Schedule]
) -> dict[str, int]:
    """Bytes that these schedules, one per mask, move in one attention layer of each mask."""
    graph, ranks = candidate.graph, topology.num_ranks
    sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    between = 0
    for schedule in schedules:
        moved = schedule.transfers
        size = graph.payload_bytes[moved.kind, moved.head_group] * graph.blocks.tokens[moved.block]
        np.add.at(sent, moved.source, size)
        np.add.at(received, moved.target, size)
        node = topology.ranks_per_node
        between += int(size[moved.source // node != moved.target // node].sum())
    return {
        "bytes": int(sent.sum()),
        "inter_node_bytes": between,
        "max_rank_send_bytes": int(sent.max()),
        "max_rank_recv_bytes": int(received.max()),
        "divisions": max((schedule.num_divisions for schedule in schedules), default=0),
    }


def dump_placement(candidate: Candidate) -> dict[str, Any]:
    """Blocks and tiles with their ranks and forward divisions, for checks by other programs."""
    graph, placement = candidate.graph, candidate.placement
    blocks = graph.blocks
    columns = (blocks.sequence, blocks.start, blocks.end, placement.block_rank)
    rows = []
    for name, tiles in graph.tiles.items():
        division = candidate.schedules[name][0].tile_division
        rank = placement.tile_rank[name]
        fields = (tiles.q_block, tiles.k_block, tiles.head_group, rank, division, tiles.pairs)
        rows += np.stack([field.astype(np.int64) for field in fields], axis=1).tolist()
    return {
        "head_groups": [[g.first_kv_head, g.num_kv_heads] for g in graph.head_groups],
        "blocks": np.stack(columns, axis=1).tolist(),
        "tiles": rows,
    }

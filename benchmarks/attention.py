"""`dyncp bench attention`: measures plans rank by rank and compares with predictions."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.attention_times import (
    METHODS,
    AttentionSetting,
    bench_ranks,
    bench_virtual_ranks,
    check_methods,
    kernel_name,
)
from dyncp.calibrate import Repeats, Tools, World, open_world, under_torchrun
from dyncp.calibrate.calls import executor_options
from dyncp.calibrate.world import device_name, device_text
from dyncp.cli.arguments import (
    Progress,
    add_kernel_option,
    add_lengths_options,
    add_measuring_options,
    add_profile_options,
    add_shape_options,
    check_outputs,
    comma_separated,
    lengths_of,
    make_batch,
    option,
    profile_of,
    shape_of,
    shape_text,
    show,
)
from dyncp.cost import CostModel
from dyncp.planner import Task
from dyncp.topology import Topology

RANKS = {"cpu": 4, "cuda": 32}
TOKENS = {"cpu": 4096, "cuda": 131072}
RANKS_PER_NODE = 8
DIRECTIONS = ("forward", "backward")

EXAMPLES = (
    "dyncp bench attention --virtual-ranks 8 --sample ldc:0 --methods auto,zigzag",
    "dyncp bench attention --virtual-ranks 32 --profile mine.json --json",
    "torchrun --nproc-per-node 8 -m dyncp bench attention --tokens 131072",
)


def add_options(parser: ArgumentParser) -> None:
    add_rank_options(
        parser, "ranks that this device runs sequentially", "; under torchrun: real ranks"
    )
    add_lengths_options(parser, listed=True, sample="ldc:0")
    text = f"tokens of a --sample batch (default {TOKENS['cuda']}, on CPUs {TOKENS['cpu']})"
    option(parser, "--tokens", text, type=int)
    add_profile_options(parser)
    text = f"methods to measure: all, or some of {', '.join(METHODS)}; auto is dyncp's planner"
    option(parser, "--methods", text, "auto,zigzag")
    add_kernel_option(parser)
    add_shape_options(parser)
    add_measuring_options(parser, 5)


def add_rank_options(parser: ArgumentParser, ranks: str, more: str = "") -> None:
    text = f"{ranks} (default {RANKS['cuda']}, on CPUs {RANKS['cpu']}{more})"
    option(parser, "--virtual-ranks", text, type=int, metavar="N")
    text = f"virtual ranks of each node (default {RANKS_PER_NODE}, or all if there are fewer)"
    option(parser, "--ranks-per-node", text, type=int)


def run(args: Namespace) -> int:
    if under_torchrun() and args.virtual_ranks is not None:
        raise ValueError(
            f"--virtual-ranks is {args.virtual_ranks}, but torchrun starts real ranks; use one or "
            "the other"
        )
    check_outputs(raw=args.raw)
    with open_world(args.device) as world:
        setting = _setting(args, world)
        progress = Progress(quiet=not world.first)
        bench = bench_ranks if under_torchrun() else bench_virtual_ranks
        found = bench(setting, progress.show)
        progress.clear()
        if world.first:
            about = _about(args, world, setting)
            show(args, about | found, _lines(about, setting, found))
    return 0


def _setting(args: Namespace, world: World) -> AttentionSetting:
    kind = world.device.type
    args.tokens = TOKENS[kind] if args.tokens is None else args.tokens
    shape = shape_of(args, kind)
    fixed = executor_options(args.kernel).get("deterministic", True)
    cost = CostModel(profile_of(args, device_name(world.device)), shape, deterministic=fixed)
    batch = make_batch(args.mask, lengths_of(args))
    task = Task.of(batch, _topology(args, world, cost), shape, None, cost)
    tools = Tools(shape, args.kernel, world.device, Repeats(timed=args.repeats))
    return AttentionSetting(task, check_methods(comma_separated(args.methods)), tools)


def _topology(args: Namespace, world: World, cost: CostModel) -> Topology:
    if under_torchrun():
        return cost.profile.topology(world.nodes, world.ranks_per_node)
    return virtual_topology(args, world.device.type, cost)


def virtual_topology(args: Namespace, kind: str, cost: CostModel) -> Topology:
    """The topology of the virtual ranks; `kind` of device decides their default number."""
    ranks = RANKS[kind] if args.virtual_ranks is None else args.virtual_ranks
    if ranks < 1:
        raise ValueError(f"--virtual-ranks is {ranks}; at least 1 is needed")
    per_node = args.ranks_per_node or min(ranks, RANKS_PER_NODE)
    if per_node < 1 or ranks % per_node:
        raise ValueError(
            f"--ranks-per-node is {per_node}, which does not divide the {ranks} virtual ranks"
        )
    return cost.profile.topology(ranks // per_node, per_node)


def _about(args: Namespace, world: World, setting: AttentionSetting) -> dict[str, Any]:
    topology = setting.topology
    return {
        "device": device_text(world.device),
        "kernel": args.kernel,
        "kernel_name": kernel_name(args.kernel, world.device),
        "shape": asdict(setting.cost.shape),
        "mask": args.mask,
        "lengths": list(setting.batch.lengths),
        "profile": asdict(setting.cost.profile),
        "nodes": topology.nodes,
        "ranks_per_node": topology.ranks_per_node,
        "virtual": not under_torchrun(),
    }


def _lines(
    about: dict[str, Any], setting: AttentionSetting, found: dict[str, Any]
) -> Iterator[str]:
    batch, count = setting.batch, len(setting.batch.lengths)
    kernel, name = about["kernel"], about["kernel_name"]
    kind = "virtual" if about["virtual"] else "real"
    chosen = f" ({name})" if name not in kernel else ""
    yield f"{about['device']}, kernel {kernel}{chosen}; {shape_text(setting.cost.shape)}"
    yield (
        f"{batch.num_tokens:,} tokens in {count} sequence{'s' if count > 1 else ''}, "
        f"mask {about['mask']}; {about['nodes']} × {about['ranks_per_node']} {kind} ranks, "
        f"profile {about['profile']['name']}"
    )
    yield ""
    yield from (draw_virtual if about["virtual"] else draw_ranks)(found)


def draw_virtual(found: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds of kernels and calls over ranks, compared with one rank and with predictions;
    then the simulated attention layer."""
    yield from _alone(found["alone"])
    yield (
        f"{'':<22}{'':>9}{'kernels ms':^18}{'other kernels ms':^18}{'call ms':^18}{'host ms':>9}"
        f"{'host / call':^18}{'kernels × alone':^18}{'call × alone':^18}"
        f"{'predicted − measured: kernels, call':^44}"
    )
    yield (
        f"{'':<22}{'':>9}" + f"{'worst':>9}{'mean':>9}" * 3 + f"{'worst':>9}"
        + f"{'worst':>9}{'mean':>9}" * 3 + f"{'worst':>11}{'mean':>11}" * 2
    )  # fmt: skip
    for name, method in found["methods"].items():
        for direction in DIRECTIONS:
            if direction in method["summary"]:
                label = name if direction == DIRECTIONS[0] else ""
                yield f"{label:<22}{direction:>9}" + _summary(method["summary"][direction])
    yield ""
    yield from _steps(found["methods"])


def _alone(alone: Mapping[str, Any]) -> Iterator[str]:
    if alone["reason"]:
        yield f"the whole batch on one rank could not be measured: {alone['reason']}"
        return
    for direction in DIRECTIONS:
        if direction in alone:
            times = alone[direction]
            yield (
                f"the whole batch on one rank, {direction}: kernels "
                f"{1e3 * times['kernel_seconds']:.2f} ms, call {1e3 * times['call_seconds']:.2f} ms"
            )
    yield ""


def _summary(summary: Mapping[str, Any]) -> str:
    columns = ("kernel_seconds", "other_seconds", "call_seconds")
    text = "".join(_worst_and_mean(summary[column], 1e3, 2) for column in columns)
    text += f"{1e3 * summary['host_seconds']['worst']:>9.2f}"
    for column in ("host_over_call", "over_alone", "call_over_alone"):
        text += _worst_and_mean(summary[column], 1, 3)
    for column in ("prediction_error", "call_prediction_error"):
        error = summary[column]
        text += f"{100 * error['worst']:>+9.1f} %{100 * error['mean']:>9.1f} %"
    return text


def _worst_and_mean(found: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if found is None:
        return f"{'–':>9}" * 2
    return "".join(f"{factor * found[which]:>9.{digits}f}" for which in ("worst", "mean"))


def _steps(methods: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'one attention layer, ms':<31}{'predicted':^27}{'with measured kernels':^27}"
        f"{'× first':>9}"
    )
    yield f"{'':<31}" + f"{'forward':>9}{'backward':>9}{'both':>9}" * 2
    first = next(iter(methods.values()), None)
    for name, method in methods.items():
        text = f"{name + ' (' + method['solver'] + ')':<31}"
        for times in (method["predicted"], method["with_measured_kernels"]):
            for column in ("forward_seconds", "backward_seconds", "attention_seconds"):
                text += f"{1e3 * times[column]:>9.2f}"
        assert first is not None
        base = first["with_measured_kernels"]["attention_seconds"]
        yield text + f"{method['with_measured_kernels']['attention_seconds'] / base:>9.3f}"


def draw_ranks(found: Mapping[str, Any]) -> Iterator[str]:
    """Measured and predicted milliseconds of the slowest rank."""
    yield f"{'one attention layer, ms':<31}{'measured':>10}{'predicted':>11}{'difference':>12}"
    for name, method in found["methods"].items():
        for direction, measured in method["measured"].items():
            label = f"{name} ({method['solver']})" if direction == DIRECTIONS[0] else ""
            seconds, predicted = measured["seconds"], method["predicted"][direction]
            yield (
                f"{label:<22}{direction:>9}{1e3 * seconds:>10.2f}{1e3 * predicted:>11.2f}"
                f"{100 * (predicted / seconds - 1):>+10.1f} %"
            )

"""`dyncp bench attention`: plans measured rank by rank, predicted times beside measured ones."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dyncp.blocks import Batch
from dyncp.cli.attention_table import draw_ranks, draw_virtual
from dyncp.cli.command import Command
from dyncp.cli.measure_options import (
    add_device_option,
    add_output_options,
    add_repeats_option,
    add_shape_options,
    check_raw,
    preset_for,
    repeats_of,
    shape_of,
    shape_text,
    show,
    words,
)
from dyncp.cli.options import (
    add_lengths_options,
    add_profile_option,
    lengths_of,
    make_batch,
    profile_of,
)
from dyncp.cli.progress import Progress
from dyncp.cli.torchrun import open_world, under_torchrun
from dyncp.cost import CostModel
from dyncp.measure.method_plans import METHODS, check_methods
from dyncp.planner import Task
from dyncp.topology import PRESETS as TOPOLOGIES
from dyncp.topology import Topology

if TYPE_CHECKING:
    from dyncp.measure.attention_bench import AttentionSetting
    from dyncp.measure.world import World

RANKS = {"cpu": 4, "cuda": 32}
TOKENS = {"cpu": 4096, "cuda": 131072}
RANKS_PER_MACHINE = 8


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--virtual-ranks",
        type=int,
        metavar="N",
        help=f"ranks that this device runs one after the other (default {RANKS['cuda']}, on CPUs "
        f"{RANKS['cpu']}; under torchrun: its real ranks instead)",
    )
    add_lengths_options(parser, listed=True, sample="ldc:0")
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"tokens of a --sample batch (default {TOKENS['cuda']}, on CPUs {TOKENS['cpu']})",
    )
    parser.add_argument(
        "--topology",
        metavar="PRESET",
        help=f"links and predicted rates: {', '.join(TOPOLOGIES)} (default: those of the device)",
    )
    add_profile_option(parser)
    parser.add_argument(
        "--ranks-per-machine",
        type=int,
        help=f"of virtual ranks (default {RANKS_PER_MACHINE}, or all where there are fewer)",
    )
    parser.add_argument(
        "--methods",
        default="auto,zigzag",
        help=f"auto is dyncp's planner; choose from {', '.join(METHODS)}, or all "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--kernel",
        default="auto",
        help="NAME, NAME:fast or NAME:deterministic (default %(default)s)",
    )
    add_shape_options(parser)
    add_device_option(parser)
    add_repeats_option(parser, 5)
    add_output_options(parser)


def run(args: Namespace) -> int:
    if under_torchrun() and args.virtual_ranks is not None:
        raise ValueError(
            f"--virtual-ranks is {args.virtual_ranks}, but torchrun runs real ranks; give one or "
            "the other"
        )
    check_raw(args)
    with open_world(args.device) as world:
        setting = _setting(args, world)
        progress = Progress()

        def tell(text: str) -> None:
            if world.first:
                progress.show_seldom(text)

        found = _measure(setting, tell)
        progress.clear()
        if world.first:
            about = _about(args, world, setting)
            show(args, about | found, _lines(about, setting, found))
    return 0


def _measure(setting: "AttentionSetting", tell: Any) -> dict[str, Any]:
    from dyncp.measure.attention_bench import bench_virtual_ranks
    from dyncp.measure.attention_ranks import bench_ranks

    return bench_ranks(setting, tell) if under_torchrun() else bench_virtual_ranks(setting, tell)


def _setting(args: Namespace, world: "World") -> "AttentionSetting":
    from dyncp.measure.attention_bench import AttentionSetting
    from dyncp.measure.ours import KernelChoice

    kind = world.device.type
    args.topology = args.topology or preset_for(world.device)
    args.tokens = TOKENS[kind] if args.tokens is None else args.tokens
    shape = shape_of(args, world.device)
    cost = CostModel(profile_of(args), shape)
    task = Task.of(
        make_batch(args, lengths_of(args)), _topology(args, world, cost), shape, None, cost
    )
    return AttentionSetting(
        task,
        check_methods(words(args.methods)),
        KernelChoice.of(args.kernel),
        world.device,
        repeats_of(args),
    )


def _topology(args: Namespace, world: "World", cost: CostModel) -> Topology:
    if under_torchrun():
        return cost.profile.topology(world.machines, world.ranks_per_machine)
    return virtual_topology(args, world.device.type, cost)


def virtual_topology(args: Namespace, kind: str, cost: CostModel) -> Topology:
    """The machines that `--virtual-ranks` and `--ranks-per-machine` ask for, on this kind of
    device."""
    ranks = RANKS[kind] if args.virtual_ranks is None else args.virtual_ranks
    if ranks < 1:
        raise ValueError(f"--virtual-ranks is {ranks}; at least 1 is needed")
    per_machine = args.ranks_per_machine or min(ranks, RANKS_PER_MACHINE)
    if per_machine < 1 or ranks % per_machine:
        raise ValueError(
            f"--ranks-per-machine is {per_machine}, which does not divide the {ranks} virtual ranks"
        )
    return cost.profile.topology(ranks // per_machine, per_machine)


def _about(args: Namespace, world: "World", setting: "AttentionSetting") -> dict[str, Any]:
    from dyncp.measure.ours import kernel_name
    from dyncp.measure.world import device_text

    topology = setting.topology
    return {
        "device": device_text(world.device),
        "kernel": str(setting.choice),
        "kernel_name": kernel_name(setting.choice, world.device),
        "shape": asdict(setting.cost.shape),
        "mask": args.mask,
        "lengths": list(setting.batch.lengths),
        "profile": asdict(setting.cost.profile),
        "machines": topology.machines,
        "ranks_per_machine": topology.ranks_per_machine,
        "virtual": not under_torchrun(),
    }


def _lines(
    about: dict[str, Any], setting: "AttentionSetting", found: dict[str, Any]
) -> Iterator[str]:
    batch, kernel, name = setting.batch, about["kernel"], about["kernel_name"]
    kind = "virtual" if about["virtual"] else "real"
    chosen = f" ({name})" if name not in kernel else ""
    yield f"{about['device']}, kernel {kernel}{chosen}; {shape_text(setting.cost.shape)}"
    yield (
        f"{batch.num_tokens:,} tokens in {_sequences(batch)}, mask {about['mask']}; "
        f"{about['machines']} × {about['ranks_per_machine']} {kind} ranks, "
        f"profile {about['profile']['name']}"
    )
    yield ""
    yield from (draw_virtual if about["virtual"] else draw_ranks)(found)


def _sequences(batch: Batch) -> str:
    count = len(batch.lengths)
    return f"{count} sequence{'s' if count > 1 else ''}"


command = Command(
    name="attention",
    summary="measure the attention of plans on virtual or real ranks, beside what is predicted",
    examples=(
        "dyncp bench attention --virtual-ranks 8 --sample ldc:0 --methods auto,zigzag",
        "dyncp bench attention --virtual-ranks 32 --profile mine.json --json",
        "torchrun --nproc-per-node 8 -m dyncp bench attention --tokens 131072",
    ),
    add_options=add_options,
    run=run,
)

"""`dyncp calibrate`: measures this machine into a profile for planner and simulator."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dyncp.calibrate import CalibrateSetting, Calibration, World, calibrate
from dyncp.calibrate.calls import device_name, device_text, executor_options, find_mask
from dyncp.calibrate.timing import Repeats, Tools
from dyncp.cli.arguments import (
    Progress,
    add_kernel_option,
    add_measuring_options,
    add_shape_options,
    check_folder,
    comma_separated,
    open_world,
    option,
    positive_integers,
    preset_for,
    shape_of,
    shape_text,
    show,
)
from dyncp.cost import PROFILES, Profile, find_profile, save_profile

SIZES = {"cpu": "128,256,512,1024,2048", "cuda": "8192,16384,32768,65536"}
MASKS = "causal,full,document_causal,lambda_shaped,shared_question"
# Label, field of the profile, and how many of its units make one of the label's.
RATES = (
    ("attention forward, TFLOP/s", "attention_forward", 1e12),
    ("attention backward, TFLOP/s", "attention_backward", 1e12),
    ("linear layers, TFLOP/s", "dense", 1e12),
    ("kernel tiles with an edge, forward, ×", "edge_forward", 1),
    ("kernel tiles with an edge, backward, ×", "edge_backward", 1),
    ("a row of kernel tiles, forward, keys", "row_forward", 1),
    ("a row of kernel tiles, backward, keys", "row_backward", 1),
    ("rows of kernel tiles at a time", "lanes", 1),
    ("kernel call, µs", "call_seconds", 1e-6),
    ("between kernels, µs", "launch_seconds", 1e-6),
    ("host per instruction, graphs, µs", "host_seconds", 1e-6),
    ("host per instruction, no graphs, µs", "host_seconds_eager", 1e-6),
    ("copying rows, GB/s", "copy", 1e9),
)
EXAMPLES = (
    "dyncp calibrate --save mine.json",
    "torchrun --nproc-per-node 8 -m dyncp calibrate --save mine.json",
)


def add_options(parser: ArgumentParser) -> None:
    option(parser, "--save", "where to write", Path("profile.json"), type=Path)
    option(parser, "--name", "of the profile", "calibrated")
    base = f"for what cannot be measured here: {', '.join(PROFILES)} (default: the device's)"
    option(parser, "--base", base, metavar="PRESET")
    add_kernel_option(parser)
    option(parser, "--masks", "to fit with", MASKS)
    option(parser, "--sizes", f"tokens to fit with (default {SIZES['cuda']}; CPUs up to 2048)")
    add_shape_options(parser)
    add_measuring_options(parser, 5)


def run(args: Namespace) -> int:
    check_folder("--save", args.save)
    check_folder("--raw", args.raw)
    with open_world(args.device) as world:
        setting = _setting(args, world)
        progress = Progress(quiet=not world.first)
        found = calibrate(setting, progress.show)
        progress.clear()
        if world.first:
            save_profile(found.profile, args.save)
            where, shape = device_text(world.device), shape_text(setting.tools.shape)
            lines = [
                f"{where}; {shape}; {world.num_ranks} rank{'s' if world.num_ranks > 1 else ''}",
                "",
                *draw_calibration(setting.base, found),
                "",
                f"Written to {args.save}; use it as `dyncp plan --profile {args.save}`.",
            ]
            show(args, {"device": where} | _as_json(setting, found), lines)
    return 0


def _setting(args: Namespace, world: World) -> CalibrateSetting:
    kind = world.device.type
    names = comma_separated(args.masks)
    for mask in names:
        find_mask(mask)
    executor_options(args.kernel)
    repeats = Repeats(timed=args.repeats, flush=False)
    base = find_profile(args.base) if args.base else preset_for(device_name(world.device), "--base")
    return CalibrateSetting(
        base=base,
        name=args.name,
        masks=names,
        sizes=positive_integers(args.sizes or SIZES[kind], "--sizes"),
        world=world,
        tools=Tools(shape_of(args, kind), args.kernel, world.device, repeats),
    )


def _as_json(setting: CalibrateSetting, found: Calibration) -> dict[str, Any]:
    numbers = asdict(found)
    numbers["all_gather_bytes_per_second"] = numbers.pop("all_gather")
    for overlap, entry in zip(found.overlaps, numbers["overlaps"], strict=True):
        entry["slowdown"] = overlap.slowdown
    return {"shape": asdict(setting.tools.shape)} | numbers


def draw_calibration(base: Profile, found: Calibration) -> Iterator[str]:
    profile, rates = found.profile, found.rates
    yield f"{'':<40}{'measured':>14}{base.name:>14}"
    for label, field, unit in RATES:
        mine, theirs = (getattr(p, field) / unit for p in (profile, base))
        yield f"{label:<40}{mine:>14.4g}{theirs:>14.4g}"
    for label, name in (("inside a node", "intra"), ("between nodes", "inter")):
        known = getattr(found, name) is not None  # else it is the preset's
        links = [getattr(p, name) for p in (profile, base)]
        for measure, numbers in (
            ("GB/s", [link.bandwidth / 1e9 for link in links]),
            ("µs", [1e6 * link.latency for link in links]),
        ):
            measured = f"{numbers[0]:.4g}" if known else "as assumed"
            yield f"{f'{label}, {measure}':<40}{measured:>14}{numbers[1]:>14.4g}"
    if found.all_gather is not None:
        yield f"{'all-gather into a rank, GB/s':<40}{found.all_gather / 1e9:>14.4g}"
    for overlap in found.overlaps:
        label = f"attention beside {overlap.kind} copies, ×"
        yield f"{label:<40}{overlap.slowdown:>14.3f}"
    yield ""
    yield (
        f"{len(found.samples)} kernel timings; the fit is off by {100 * rates.mean_error:.1f} % on "
        f"average, {100 * rates.worst_error:.0f} % at worst; a call takes "
        f"{1e6 * rates.host_seconds:.0f} µs of host time"
    )
    if found.rows is not None:
        yield (
            f"{len(found.calls)} whole calls; what they take besides kernels is off by "
            f"{100 * found.rows.mean_error:.1f} % on average, {100 * found.rows.worst_error:.0f} % "
            "at worst"
        )

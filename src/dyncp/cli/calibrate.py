"""`dyncp calibrate`: measures this machine into a profile for planner and simulator."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyncp.cli.arguments import (
    Progress,
    add_device_option,
    add_kernel_option,
    add_output_options,
    add_repeats_option,
    add_shape_options,
    check_raw,
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

if TYPE_CHECKING:
    from dyncp.calibrate import CalibrateSetting, Calibration, World
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

SUMMARY = "measure this machine into a profile that planner and simulator use"
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
    add_device_option(parser)
    add_repeats_option(parser, 5)
    add_output_options(parser)


def run(args: Namespace) -> int:
    from dyncp.calibrate import calibrate
    from dyncp.calibrate.calls import device_text

    if not args.save.parent.is_dir():
        raise ValueError(f"--save is {args.save}; the folder {args.save.parent} does not exist")
    check_raw(args)
    with open_world(args.device) as world:
        setting = _setting(args, world)
        progress = Progress()
        found = calibrate(setting, progress.show_seldom if world.first else lambda _: None)
        progress.clear()
        if world.first:
            save_profile(found.profile, args.save)
            ranks, where = world.num_ranks, device_text(world.device)
            lines = [
                f"{where}; {shape_text(setting.shape)}; {ranks} rank{'s' if ranks > 1 else ''}",
                "",
                *draw_calibration(setting.base, found),
                "",
                f"Written to {args.save}; use it as `dyncp plan --profile {args.save}`.",
            ]
            show(args, {"device": where} | _as_json(setting, found), lines)
    return 0


def _setting(args: Namespace, world: "World") -> "CalibrateSetting":
    from dyncp.calibrate import CalibrateSetting
    from dyncp.calibrate.calls import KernelChoice, find_mask
    from dyncp.calibrate.timing import Repeats

    sizes = SIZES[world.device.type] if args.sizes is None else args.sizes
    for mask in comma_separated(args.masks):
        find_mask(mask)
    return CalibrateSetting(
        base=find_profile(args.base or preset_for(world.device)),
        name=args.name,
        shape=shape_of(args, world.device),
        choice=KernelChoice.of(args.kernel),
        masks=comma_separated(args.masks),
        sizes=positive_integers(sizes, "--sizes"),
        world=world,
        repeats=Repeats(timed=args.repeats, flush=False),
    )


def _as_json(setting: "CalibrateSetting", found: "Calibration") -> dict[str, Any]:
    numbers = asdict(found)
    numbers["all_gather_bytes_per_second"] = numbers.pop("all_gather")
    for overlap, entry in zip(found.overlaps, numbers["overlaps"], strict=True):
        entry["slowdown"] = overlap.slowdown
    return {"shape": asdict(setting.shape)} | numbers


def draw_calibration(base: Profile, found: "Calibration") -> Iterator[str]:
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

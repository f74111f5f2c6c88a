"""`dyncp calibrate`: measures this machine and writes a profile for planner and simulator."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dyncp.calibrate import Calibration, Repeats, Tools, calibrate, open_world
from dyncp.calibrate.calls import executor_options, find_mask, make_executor
from dyncp.calibrate.world import device_name, device_text
from dyncp.cli.arguments import (
    Progress,
    add_kernel_option,
    add_measuring_options,
    add_shape_options,
    check_outputs,
    comma_separated,
    option,
    positive_integers,
    preset_for,
    shape_of,
    shape_text,
    show,
)
from dyncp.cost import POOR_FIT, PROFILES, Profile, find_profile, save_profile

SIZES = {"cpu": "128,256,512,1024,2048", "cuda": "8192,16384,32768,65536"}
MASKS = "causal,full,document_causal,lambda_shaped,shared_question"
# Label, field of the profile, and the label's unit in units of the field.
RATES = (
    ("attention forward, TFLOP/s", "attention_forward", 1e12),
    ("attention backward, TFLOP/s", "attention_backward", 1e12),
    ("linear layers, TFLOP/s", "dense", 1e12),
    ("partial / full kernel tile, forward", "edge_forward", 1),
    ("partial / full kernel tile, backward", "edge_backward", 1),
    ("cost per row of tiles, forward, keys", "row_forward", 1),
    ("cost per row of tiles, backward, keys", "row_backward", 1),
    ("rows of tiles that run at once", "lanes", 1),
    ("overhead per kernel call, µs", "call_seconds", 1e-6),
    ("gap between kernels, µs", "launch_seconds", 1e-6),
    ("host per instruction, graphs, µs", "host_seconds", 1e-6),
    ("host per instruction, no graphs, µs", "host_seconds_eager", 1e-6),
    ("copying rows, GB/s", "copy", 1e9),
)
OVERLAPS = {
    "link": "messages",
    "thread": "copies by a thread",
    "host": "copies from the host",
    "device": "copies on the device",
}
LINKS = (("link inside a node", "intra"), ("link between nodes", "inter"))
EXAMPLES = (
    "dyncp calibrate --save mine.json",
    "torchrun --nproc-per-node 8 -m dyncp calibrate --save mine.json",
)


def add_options(parser: ArgumentParser) -> None:
    option(parser, "--save", "profile to write", Path("profile.json"), type=Path, metavar="FILE")
    option(parser, "--name", "name of the profile", "calibrated")
    base = f"source of what cannot be measured here: {', '.join(PROFILES)}"
    option(parser, "--base", f"{base} (default: the preset of the device)", metavar="PRESET")
    add_kernel_option(parser)
    option(parser, "--masks", "masks of the batches that are timed", MASKS)
    sizes = f"tokens of these batches (default {SIZES['cuda']}, on CPUs {SIZES['cpu']})"
    option(parser, "--sizes", sizes, metavar="N,...")
    add_shape_options(parser)
    parser.add_argument(
        "--accept-poor-fit",
        action="store_true",
        help=f"write the profile even if a fit is off by more than {100 * POOR_FIT:.0f} %% in the "
        "mean; commands that use it warn",
    )
    add_measuring_options(parser, 5)


def run(args: Namespace) -> int:
    check_outputs(save=args.save, raw=args.raw)
    masks = comma_separated(args.masks, "--masks")
    for mask in masks:
        find_mask(mask)
    executor_options(args.kernel)
    with open_world(args.device) as world:
        device, kind = world.device, world.device.type
        sizes = positive_integers(SIZES[kind] if args.sizes is None else args.sizes, "--sizes")
        base = (
            preset_for(device_name(device), "--base")
            if args.base is None
            else find_profile(args.base)
        )
        repeats = Repeats(timed=args.repeats, flush=False)
        tools = Tools(shape_of(args, kind), args.kernel, device, repeats)
        make_executor(args.kernel, device, virtual_ranks=1)  # refuses unknown kernels
        progress = Progress(quiet=not world.first)
        found = calibrate(world, tools, base, masks, sizes, name=args.name, tell=progress.show)
        progress.clear()
        if world.first:
            complaint = found.complaint
            if complaint and not args.accept_poor_fit:
                raise ValueError(
                    f"{complaint}, or write this profile with --accept-poor-fit. {args.save} was "
                    "not written"
                )
            if complaint:
                progress.say(f"dyncp: warning: {complaint}")
            save_profile(found.profile, args.save)
            where, ranks = device_text(device), world.num_ranks
            lines = [
                f"{where}; {shape_text(tools.shape)}; {ranks} rank{'s' if ranks > 1 else ''}",
                "",
                *draw_calibration(base, found),
                "",
                f"Written to {args.save}; use it as `dyncp plan --profile {args.save}`.",
            ]
            show(args, {"device": where, "shape": asdict(tools.shape)} | _as_json(found), lines)
    return 0


def _as_json(found: Calibration) -> dict[str, Any]:
    numbers = asdict(found)
    numbers["all_gather_bytes_per_second"] = numbers.pop("all_gather")
    for overlap, entry in zip(found.overlaps, numbers["overlaps"], strict=True):
        entry["slowdown"] = overlap.slowdown
    return numbers


def draw_calibration(base: Profile, found: Calibration) -> Iterator[str]:
    profile, rates = found.profile, found.rates
    yield f"{'':<40}{'measured':>14}{base.name:>14}"
    for label, field, unit in RATES:
        mine, theirs = (getattr(p, field) / unit for p in (profile, base))
        yield f"{label:<40}{mine:>14.4g}{theirs:>14.4g}"
    for label, name in LINKS:
        links = [getattr(p, name) for p in (profile, base)]
        for measure, (mine, theirs) in (
            ("GB/s", [link.bandwidth / 1e9 for link in links]),
            ("µs", [1e6 * link.latency for link in links]),
        ):
            measured = "not measured" if getattr(found, name) is None else f"{mine:.4g}"
            yield f"{f'{label}, {measure}':<40}{measured:>14}{theirs:>14.4g}"
    if found.all_gather is not None:
        yield f"{'all-gather into a rank, GB/s':<40}{found.all_gather / 1e9:>14.4g}"
    for overlap in found.overlaps:
        label = f"attention during {OVERLAPS[overlap.kind]}, ×"
        yield f"{label:<40}{overlap.slowdown:>14.3f}"
    yield ""
    yield (
        f"The fit of {len(found.samples)} kernel timings is off by {100 * rates.mean_error:.1f} % "
        f"on average, {100 * rates.worst_error:.0f} % at worst; an attention call takes the host "
        f"{1e6 * rates.host_seconds:.0f} µs."
    )
    if found.rows is not None:
        yield (
            f"The fit of the time outside kernels in {len(found.calls)} whole calls is off by "
            f"{100 * found.rows.mean_error:.1f} % on average, {100 * found.rows.worst_error:.0f} % "
            "at worst."
        )

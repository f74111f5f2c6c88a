"""`dyncp calibrate`: measures this machine into a profile for planner and simulator."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyncp.cli.calibrate_table import draw_calibration
from dyncp.cli.command import Command
from dyncp.cli.measure_options import (
    add_device_option,
    add_output_options,
    add_repeats_option,
    add_shape_options,
    check_raw,
    numbers,
    preset_for,
    shape_of,
    shape_text,
    show,
    words,
)
from dyncp.cli.progress import Progress
from dyncp.cli.torchrun import open_world
from dyncp.cost import PROFILES, find_profile, save_profile

if TYPE_CHECKING:
    from dyncp.measure.calibrate import CalibrateSetting, Calibration
    from dyncp.measure.world import World

SIZES = {"cpu": "128,256,512,1024,2048", "cuda": "8192,16384,32768,65536"}
MASKS = "causal,full,document_causal,lambda_shaped,shared_question"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--save", type=Path, default="profile.json", help="where to write (default %(default)s)"
    )
    parser.add_argument("--name", default="calibrated", help="of the profile (default %(default)s)")
    parser.add_argument(
        "--base",
        metavar="PRESET",
        help=f"for what cannot be measured here: {', '.join(PROFILES)} (default: the device's)",
    )
    parser.add_argument(
        "--kernel",
        default="auto",
        help="NAME, NAME:fast or NAME:deterministic (default %(default)s)",
    )
    parser.add_argument("--masks", default=MASKS, help="to fit with (default %(default)s)")
    parser.add_argument(
        "--sizes",
        help=f"tokens to fit with (default {SIZES['cuda']}; CPUs up to 2048)",
    )
    add_shape_options(parser)
    add_device_option(parser)
    add_repeats_option(parser, 5)
    add_output_options(parser)


def run(args: Namespace) -> int:
    from dyncp.measure.calibrate import calibrate

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
            show(args, _as_json(setting, found), _lines(args, setting, found))
    return 0


def _setting(args: Namespace, world: "World") -> "CalibrateSetting":
    from dyncp.measure.calibrate import CalibrateSetting
    from dyncp.measure.mask_cases import mask_case
    from dyncp.measure.ours import KernelChoice
    from dyncp.measure.timing import Repeats

    sizes = SIZES[world.device.type] if args.sizes is None else args.sizes
    for mask in words(args.masks):
        mask_case(mask, 1)
    return CalibrateSetting(
        base=find_profile(args.base or preset_for(world.device)),
        name=args.name,
        shape=shape_of(args, world.device),
        choice=KernelChoice.of(args.kernel),
        masks=words(args.masks),
        sizes=numbers(sizes, "--sizes"),
        world=world,
        repeats=Repeats(timed=args.repeats, flush=False),
    )


def _lines(args: Namespace, setting: "CalibrateSetting", found: "Calibration") -> Iterator[str]:
    from dyncp.measure.world import device_text

    ranks = setting.world.num_ranks
    yield (
        f"{device_text(setting.world.device)}; {shape_text(setting.shape)}; "
        f"{ranks} rank{'s' if ranks > 1 else ''}"
    )
    yield ""
    yield from draw_calibration(setting.base, found)
    yield ""
    yield f"Written to {args.save}; use it as `dyncp plan --profile {args.save}`."


def _as_json(setting: "CalibrateSetting", found: "Calibration") -> dict[str, Any]:
    from dyncp.measure.world import device_text

    return {
        "device": device_text(setting.world.device),
        "shape": asdict(setting.shape),
        "profile": asdict(found.profile),
        "rates": asdict(found.rates),
        "rows": None if found.rows is None else asdict(found.rows),
        "samples": [asdict(sample) for sample in found.samples],
        "calls": [asdict(call) for call in found.calls],
        "intra": None if found.intra is None else asdict(found.intra),
        "inter": None if found.inter is None else asdict(found.inter),
        "all_gather_bytes_per_second": found.all_gather,
        "overlaps": [asdict(o) | {"slowdown": o.slowdown} for o in found.overlaps],
    }


command = Command(
    name="calibrate",
    summary="measure this machine into a profile that planner and simulator use",
    examples=(
        "dyncp calibrate --save mine.json",
        "torchrun --nproc-per-node 8 -m dyncp calibrate --save mine.json",
    ),
    add_options=add_options,
    run=run,
)

"""Options of the commands that measure; what they leave open depends on the device."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyncp.blocks import ITEM_BYTES, AttentionShape
from dyncp.cost import profile_for_device, tell_profile

if TYPE_CHECKING:
    import torch

    from dyncp.measure.timing import Repeats

# q heads, kv heads, head dim and dtype of what is measured, by kind of device.
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(32, 8, 128, "bf16")}


def add_device_option(parser: ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")


def add_shape_options(parser: ArgumentParser) -> None:
    cpu, cuda = SHAPES["cpu"], SHAPES["cuda"]
    for name in ("q_heads", "kv_heads", "head_dim"):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help=f"of one layer (default {getattr(cuda, name)}, on CPUs {getattr(cpu, name)})",
        )
    parser.add_argument(
        "--dtype",
        help=f"{', '.join(ITEM_BYTES)} (default {cuda.dtype}, on CPUs {cpu.dtype})",
    )


def add_repeats_option(parser: ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--repeats",
        type=int,
        default=default,
        help="timed calls, of which the median counts (default %(default)s)",
    )


def add_output_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--raw", type=Path, metavar="FILE", help="write that JSON object, whatever is printed"
    )


def check_raw(args: Namespace) -> None:
    """Before anything is measured."""
    if args.raw is not None and not args.raw.parent.is_dir():
        raise ValueError(f"--raw is {args.raw}; the folder {args.raw.parent} does not exist")


def show(args: Namespace, numbers: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the JSON object or the lines, and writes the file that was asked for."""
    text = json.dumps(numbers)
    if args.raw is not None:
        args.raw.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else "\n".join(lines))


def shape_of(args: Namespace, device: "torch.device") -> AttentionShape:
    default = SHAPES[device.type]
    values = (
        getattr(args, name) if getattr(args, name) is not None else getattr(default, name)
        for name in ("q_heads", "kv_heads", "head_dim", "dtype")
    )
    return AttentionShape(*values)


def preset_for(device: "torch.device") -> str:
    """The preset of what is measured."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tell_profile(name, "--topology, --base or --profile choose another")
    return profile_for_device(name).name


def repeats_of(args: Namespace) -> "Repeats":
    from dyncp.measure.timing import Repeats

    return Repeats(timed=args.repeats)


def shape_text(shape: AttentionShape) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head dim {shape.head_dim}, "
        f"{shape.dtype}"
    )


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{option} is {text!r}; expected whole numbers from 1 on, as in 1024,2048")
    return found


def words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))

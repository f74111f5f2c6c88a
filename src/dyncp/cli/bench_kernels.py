"""`dyncp bench kernels`: masks × lengths × kernels, beside torch's and flash-attn-4's."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dyncp.cli.command import Command
from dyncp.cli.kernels_table import draw_kernels
from dyncp.cli.measure_options import (
    add_device_option,
    add_output_options,
    add_repeats_option,
    add_shape_options,
    check_raw,
    numbers,
    repeats_of,
    shape_of,
    shape_text,
    show,
    words,
)
from dyncp.cli.progress import Progress

if TYPE_CHECKING:
    from dyncp.measure.kernels_bench import KernelRow, KernelsSetting

LENGTHS = {"cpu": "1024,2048", "cuda": "16384,32768"}
KERNELS = {"cpu": "cpu", "cuda": "flash4:fast,flash4:deterministic,triton"}
MASKS = (
    "causal", "full", "document_causal", "lambda_shaped", "shared_question", "causal_blockwise",
    "sliding_window",
)  # fmt: skip
BASELINES = ("sdpa_flash", "sdpa_cudnn", "sdpa_mask", "flex", "flash_attn_4")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--masks", default=",".join(MASKS), help="separated by commas (default %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        help=f"tokens, as in 4096,8192 (default {LENGTHS['cuda']}, on CPUs {LENGTHS['cpu']})",
    )
    parser.add_argument(
        "--kernels",
        help="dyncp's kernels: NAME, NAME:fast or NAME:deterministic "
        f"(default {KERNELS['cuda']}, on CPUs {KERNELS['cpu']})",
    )
    parser.add_argument(
        "--baselines",
        default=",".join(BASELINES),
        help="others' kernels, used where they can run; '' for none (default %(default)s)",
    )
    add_shape_options(parser)
    add_device_option(parser)
    add_repeats_option(parser, 7)
    parser.add_argument(
        "--check",
        default="smallest",
        help="lengths whose results are compared with dense attention in fp64: smallest, all (up "
        "to 16,384 tokens) or none (default %(default)s)",
    )
    add_output_options(parser)


def run(args: Namespace) -> int:
    from dyncp.measure.kernels_bench import bench_kernels
    from dyncp.measure.world import device_text, open_device

    check_raw(args)
    device = open_device(args.device)
    setting = _setting(args, device)
    progress, rows = Progress(), list["KernelRow"]()
    for row in bench_kernels(setting, progress.show_seldom):
        rows.append(row)
    progress.clear()
    head = f"{device_text(device)}; {shape_text(setting.shape)}; median of {args.repeats}\n"
    show(args, _as_json(setting, device_text(device), rows), [head, *draw_kernels(rows)])
    return 0


def _setting(args: Namespace, device: object) -> "KernelsSetting":
    import torch

    from dyncp.measure.kernels_bench import KernelsSetting
    from dyncp.measure.ours import KernelChoice

    assert isinstance(device, torch.device)
    lengths = LENGTHS[device.type] if args.lengths is None else args.lengths
    kernels = KERNELS[device.type] if args.kernels is None else args.kernels
    return KernelsSetting(
        masks=words(args.masks),
        lengths=numbers(lengths, "--lengths"),
        kernels=tuple(KernelChoice.of(word) for word in words(kernels)),
        baselines=words(args.baselines),
        shape=shape_of(args, device),
        device=device,
        repeats=repeats_of(args),
        check=args.check,
    )


def _as_json(
    setting: "KernelsSetting", device: str, rows: Sequence["KernelRow"]
) -> dict[str, object]:
    return {
        "device": device,
        "shape": asdict(setting.shape),
        "rows": [asdict(row) for row in rows],
    }


command = Command(
    name="kernels",
    summary="measure attention kernels on many masks, beside torch's and flash-attn-4's",
    examples=(
        "dyncp bench kernels",
        "dyncp bench kernels --masks causal,lambda_shaped --lengths 4096 --check all --json",
    ),
    add_options=add_options,
    run=run,
)

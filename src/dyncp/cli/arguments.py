"""What commands share: options, what is printed (progress on stderr, then a table or one JSON
object), and the ranks that torchrun started."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyncp import masks
from dyncp.blocks import ITEM_BYTES, AttentionShape, Batch
from dyncp.checks import whole_number
from dyncp.cost import (
    DEFAULT_PROFILE,
    MODELS,
    PROFILES,
    CostModel,
    ModelConfig,
    Profile,
    find_model,
    find_profile,
    load_profile,
    profile_for_device,
    tell_profile,
)
from dyncp.cost import from_transformers_config as read_model
from dyncp.placement import DEFAULT_TOLERANCES, Limits
from dyncp.planner import AUTO, EFFORTS, OBJECTIVES, PlannerConfig
from dyncp.samplers import NAMES, parse_sample, read_lengths, sample_lengths

# What commands that measure run by default, by kind of device.
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(32, 8, 128, "bf16")}
# Importing torch takes seconds, and without one of these files it sees no GPU.
DRIVER_FILES = ("nvidiactl", "dxg")
CLEAR_LINE = "\r\x1b[K"
SELDOM_SECONDS = 2.0


def option(parser: Any, name: str, text: str, default: Any = None, **options: Any) -> None:
    """Adds an option. Its help ends with the default, if any, whose type is that of values."""
    if default is not None:
        text = f"{text} (default %(default)s)".strip()
        options.setdefault("type", type(default))
    parser.add_argument(name, help=text, default=default, **options)


# Batches


def add_lengths_options(parser: ArgumentParser, *, listed: bool, sample: str | None = None) -> None:
    """Where sequence lengths come from: a file, a distribution or, with `listed`, the command line.
    Without a default `sample`, one of them is required."""
    lengths = parser.add_mutually_exclusive_group(required=sample is None)
    if listed:
        lengths.add_argument("--lengths", help="sequence lengths, as in 4096,512,512")
    lengths.add_argument("--lengths-file", type=Path, help="one length per line, or a JSON list")
    text = f"a length distribution, as in ldc:0; NAME is one of {', '.join(NAMES)}"
    option(lengths, "--sample", text, sample, metavar="NAME:SEED")
    option(parser, "--mask", "NAME[:key=value,...]; `dyncp masks` lists them", "causal")


def lengths_of(args: Namespace) -> list[int]:
    """The sequence lengths of one batch."""
    if args.lengths_file is not None:
        return read_lengths(args.lengths_file)
    if args.lengths is not None:
        return list(positive_integers(args.lengths, "--lengths"))
    return draw_lengths(args, args.sample)


def draw_lengths(args: Namespace, sample: str, number: int = 0) -> list[int]:
    """Batch `number` of a sample: --tokens tokens, drawn with its seed plus that number."""
    name, seed = parse_sample(sample)
    return sample_lengths(name, whole_number("--tokens", args.tokens, 1), seed + number)


def make_batch(mask: str, lengths: Sequence[int]) -> Batch:
    """One sequence of each length, all with this mask."""
    function = masks.by_name(mask)
    return Batch.of([function(length) for length in lengths])


# Clusters, models and planning


def add_profile_options(parser: ArgumentParser) -> None:
    default = f"(default: that of the GPU of this machine, or {DEFAULT_PROFILE})"
    text = f"kind of cluster, its links and rates: {', '.join(PROFILES)} {default}"
    option(parser, "--topology", text, metavar="PRESET")
    text = "rates and links that `dyncp calibrate` measured, instead of the preset's"
    option(parser, "--profile", text, type=Path, metavar="FILE")


def profile_of(args: Namespace, device: str | None = None) -> Profile:
    """The profile asked for, or the preset of a device (default: of this machine's GPU)."""
    if args.profile is not None:
        return load_profile(args.profile)
    if args.topology is not None:
        return find_profile(args.topology)
    return preset_for(device or gpu_name(), "--topology PRESET or --profile FILE")


def preset_for(device: str | None, options: str) -> Profile:
    """The preset of a device, as torch names it; `options` choose another."""
    tell_profile(device, f"{options} choose another")
    return profile_for_device(device)


def gpu_name() -> str | None:
    """The GPU of this machine, as torch names it; None without a GPU or without torch."""
    if not any((Path("/dev") / name).exists() for name in DRIVER_FILES):
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def add_planning_options(parser: ArgumentParser) -> None:
    """Cluster, attention and model, and how to plan for them."""
    add_profile_options(parser)
    option(parser, "--nodes", "", 4)
    option(parser, "--ranks-per-node", "", 8)
    for name, default in (("q-heads", 8), ("kv-heads", 2), ("head-dim", 128)):
        option(parser, f"--{name}", "of one layer", default)
    option(parser, "--dtype", ", ".join(ITEM_BYTES), "bf16")
    option(parser, "--model", "llama3-8b or a config.json: adds the per-token work")
    solvers = "a name, a static method with degrees (zigzag/cp8), or auto: the best of all"
    option(parser, "--solver", solvers, AUTO)
    option(parser, "--effort", " or ".join(EFFORTS), "fast")
    option(parser, "--objective", f"what auto minimises: {' or '.join(OBJECTIVES)}", "time")
    counts: dict[str, Any] = {"type": _count_or_auto, "metavar": "N|auto"}
    groups = "groups of kv heads that are placed independently"
    option(parser, "--head-groups", groups, 1, **counts)
    divisions = "maximum number of divisions (default: searched)"
    option(parser, "--divisions", divisions, **counts)
    compute, tokens = DEFAULT_TOLERANCES
    text = (
        "fraction by which the most loaded rank may exceed the mean (default: about "
        f"{compute}, and more only where that makes the step shorter)"
    )
    option(parser, "--compute-tolerance", text, type=float)
    text = (
        f"the same for tokens (default: about {tokens}; with --model, where tokens cost time, as "
        "little as pays)"
    )
    option(parser, "--token-tolerance", text, type=float)


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)


def config_of(args: Namespace) -> PlannerConfig:
    """`--objective bytes` always has limits."""
    limits = Limits(args.compute_tolerance, args.token_tolerance)
    return PlannerConfig(
        solver=args.solver,
        effort=args.effort,
        objective=args.objective,
        head_groups=args.head_groups,
        divisions=args.divisions,
        limits=Limits(*limits.tolerances.tolist()) if args.objective == "bytes" else limits,
        seed=args.seed,
    )


def cost_of(args: Namespace) -> CostModel:
    shape = AttentionShape(args.q_heads, args.kv_heads, args.head_dim, args.dtype)
    return CostModel(profile_of(args), shape)


def model_of(name: str) -> ModelConfig:
    """A known model, or that of a config.json."""
    if name.endswith(".json"):
        return read_model(name)
    written = name.replace("-", "_")
    return find_model(written if written in MODELS else name)


# Measuring


def add_measuring_options(parser: ArgumentParser, repeats: int) -> None:
    add_device_option(parser)
    option(parser, "--repeats", "timed calls, of which the median counts", repeats)
    add_json_option(parser)
    text = "also write the JSON object to this file"
    option(parser, "--raw", text, type=Path, metavar="FILE")


def check_folder(option: str, path: Path | None) -> None:
    """Before anything is measured: whether a file can be written there."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{option} is {path}; the folder {path.parent} does not exist")


def add_device_option(parser: ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")


def add_kernel_option(parser: ArgumentParser) -> None:
    option(parser, "--kernel", "NAME, NAME:fast or NAME:deterministic", "auto")


def add_shape_options(parser: ArgumentParser) -> None:
    cpu, cuda = SHAPES["cpu"], SHAPES["cuda"]
    for name in ("q_heads", "kv_heads", "head_dim"):
        text = f"of one layer (default {getattr(cuda, name)}, on CPUs {getattr(cpu, name)})"
        option(parser, f"--{name.replace('_', '-')}", text, type=int)
    text = f"{', '.join(ITEM_BYTES)} (default {cuda.dtype}, on CPUs {cpu.dtype})"
    option(parser, "--dtype", text)


def shape_of(args: Namespace, kind: str) -> AttentionShape:
    """`kind` is that of the device."""
    names = ("q_heads", "kv_heads", "head_dim", "dtype")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(SHAPES[kind], **given)


def shape_text(shape: AttentionShape) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head dim {shape.head_dim}, "
        f"{shape.dtype}"
    )


# Lists, progress and results


def positive_integers(text: str, option: str) -> tuple[int, ...]:
    """Those of a comma-separated list."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{option} is {text!r}; expected positive integers, as in 1024,2048")
    return found


def comma_separated(text: str) -> tuple[str, ...]:
    """The words of a comma-separated list, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


class Progress:
    """Says what is being done now, on stderr; `quiet` on all ranks but the first."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._in_place = quiet, sys.stderr.isatty()
        self._shown = -SELDOM_SECONDS

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._print(f"{text}\n")

    def show(self, text: str) -> None:
        """A line that the next one replaces; where that is impossible, one every two seconds."""
        if self._in_place:
            self._print(CLEAR_LINE + text)
        elif time.monotonic() - self._shown >= SELDOM_SECONDS:
            self._shown = time.monotonic()
            self._print(f"{text}\n")

    def clear(self) -> None:
        if self._in_place:
            self._print(CLEAR_LINE)

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=sys.stderr, flush=True)


def add_json_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(raw=None)


def show(args: Namespace, numbers: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the JSON object or the lines, and writes the file that was asked for."""
    text = json.dumps(numbers)
    if args.raw is not None:
        args.raw.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else "\n".join(lines))

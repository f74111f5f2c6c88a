"""What commands share: options, progress on stderr, and results on stdout (a table or one JSON
object)."""

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dyncp import masks
from dyncp.blocks import ITEM_BYTES, AttentionShape, Batch
from dyncp.checks import MOST_TOKENS, whole_number
from dyncp.cost import (
    ALIASES,
    DEFAULT_PROFILE,
    MODELS,
    PROFILES,
    CostModel,
    ModelConfig,
    Profile,
    StepTraffic,
    find_model,
    find_profile,
    load_profile,
    profile_for_device,
    tell_profile,
    usual_decoder,
)
from dyncp.cost.step_traffic import GATHERED, GRADIENTS
from dyncp.masks.function import check_mask_memory
from dyncp.placement import DEFAULT_TOLERANCES, Limits
from dyncp.planner import AUTO, EFFORTS, OBJECTIVES, PlannerConfig
from dyncp.samplers import NAMES, parse_sample, read_lengths, sample_lengths
from dyncp.topology import Topology

# Default attention shape of the commands that measure, by kind of device.
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(32, 8, 128, "bf16")}
# The attention of plans without a model: Llama-3-8B's on one of 4 tensor-parallel ranks.
SHAPE = AttentionShape(8, 2, 128)
# Without one of these files there is no GPU, and importing torch, which takes seconds, is not
# necessary.
DRIVER_FILES = ("nvidiactl", "dxg")
CLEAR_LINE = "\r\x1b[K"
SELDOM_SECONDS = 2.0  # between lines of progress that cannot replace each other


def option(parser: Any, name: str, text: str, default: Any = None, **options: Any) -> None:
    """Adds an option. A default is shown at the end of the help, and its type is the option's."""
    if default is not None:
        text = f"{text} (default %(default)s)".strip()
        options.setdefault("type", type(default))
    parser.add_argument(name, help=text, default=default, **options)


# Batches


def add_lengths_options(parser: ArgumentParser, *, listed: bool, sample: str | None = None) -> None:
    """Adds the sources of sequence lengths: a file, a distribution and, with `listed`, the command
    line. One of them is required unless `sample` is a default."""
    lengths = parser.add_mutually_exclusive_group(required=sample is None)
    if listed:
        option(lengths, "--lengths", "sequence lengths, as in 4096,512,512", metavar="N,...")
    text = "sequence lengths, one per line or as a JSON list"
    option(lengths, "--lengths-file", text, type=Path, metavar="FILE")
    text = f"draw lengths from a distribution, as in ldc:0; NAME is one of {', '.join(NAMES)}"
    option(lengths, "--sample", text, sample, metavar="NAME:SEED")
    text = "NAME[:key=value,...]; `dyncp masks` lists the names"
    option(parser, "--mask", text, "causal")


def lengths_of(args: Namespace) -> list[int]:
    """The sequence lengths of one batch."""
    if args.lengths_file is not None:
        return read_lengths(args.lengths_file)
    if args.lengths is not None:
        return list(positive_integers(args.lengths, "--lengths"))
    return draw_lengths(args, args.sample)


def draw_lengths(args: Namespace, sample: str, number: int = 0) -> list[int]:
    """The lengths of batch `number` of a sample: --tokens tokens, drawn with SEED + `number`."""
    name, seed = parse_sample(sample)
    return sample_lengths(name, whole_number("--tokens", args.tokens, 1), seed + number)


def make_batch(mask: str, lengths: Sequence[int]) -> Batch:
    """One sequence of each length, all with this mask."""
    function = masks.by_name(mask)
    if max(lengths) <= MOST_TOKENS:  # otherwise the mask says so
        total = whole_number("the number of tokens of the batch", sum(lengths), 1)
        check_mask_memory(function, total)
    return Batch.of([function(length) for length in lengths])


# Clusters, models and planning


def add_profile_options(parser: ArgumentParser) -> None:
    default = f"(default: the preset of this machine's GPU, or {DEFAULT_PROFILE})"
    names = ", ".join((*PROFILES, *ALIASES))
    text = f"rates and links of a known cluster: {names} {default}"
    option(parser, "--topology", text, metavar="PRESET")
    text = "use the rates and links that `dyncp calibrate` wrote to FILE instead of a preset"
    option(parser, "--profile", text, type=Path, metavar="FILE")


def profile_of(args: Namespace, device: str | None = None) -> Profile:
    """The requested profile, or the preset of `device` (default: of this machine's GPU)."""
    if args.profile is not None:
        return load_profile(args.profile)
    if args.topology is not None:
        return find_profile(args.topology)
    return preset_for(device or gpu_name(), "--topology PRESET or --profile FILE")


def preset_for(device: str | None, options: str) -> Profile:
    """The preset of a device, named as in torch. Logs the choice, and which `options` change it."""
    tell_profile(device, f"{options} choose another")
    return profile_for_device(device)


def gpu_name() -> str | None:
    """Torch's name of this machine's GPU; None without a GPU or without torch."""
    if not any((Path("/dev") / name).exists() for name in DRIVER_FILES):
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def add_planning_options(parser: ArgumentParser) -> None:
    """Adds options for cluster, attention shape, model and planner."""
    add_profile_options(parser)
    option(parser, "--nodes", "nodes of the cluster", 4, metavar="N")
    text = "ranks of each node (default: the profile's, divided by --tp)"
    option(parser, "--ranks-per-node", text, type=int, metavar="N")
    for name, text in (
        ("q-heads", "query heads of one layer"),
        ("kv-heads", "key and value heads of one layer"),
        ("head-dim", "size of a head"),
    ):
        default = getattr(SHAPE, name.replace("-", "_"))
        usual = f"(default: the model's, or {default})"
        option(parser, f"--{name}", f"{text} {usual}", type=int, metavar="N")
    text = f"one of {', '.join(ITEM_BYTES)} (default: the model's, or {SHAPE.dtype})"
    option(parser, "--dtype", text)
    text = f"{', '.join(MODELS)}, a Transformers config.json or its folder"
    text = f"model with the work outside attention (default: a usual decoder): {text}"
    option(parser, "--model", text)
    text = "plan for one layer's attention, without the work outside it"
    parser.add_argument("--attention-only", action="store_true", help=text)
    text = "tensor-parallel ranks that share heads, MLP and NICs with every rank of the plan"
    option(parser, "--tp", text, 1, metavar="N")
    text = "how a step sums gradients over the ranks, with --model"
    option(parser, "--gradients", f"{text}: {', '.join(GRADIENTS)}", "none")
    text = "when a step gathers weights from the ranks, with --model"
    option(parser, "--gathered", f"{text}: {', '.join(GATHERED)}", "none")
    text = "a solver, a static method with degrees (zigzag/cp8), or auto for the best of all"
    option(parser, "--solver", text, AUTO)
    option(parser, "--effort", f"of the search: {' or '.join(EFFORTS)}", "fast")
    option(parser, "--objective", f"what auto minimises: {' or '.join(OBJECTIVES)}", "time")
    counts: dict[str, Any] = {"type": _count_or_auto, "metavar": "N|auto"}
    text = "groups of kv heads that are placed independently"
    option(parser, "--head-groups", text, 1, **counts)
    option(parser, "--divisions", "maximum number of divisions (default: auto)", **counts)
    compute, tokens = DEFAULT_TOLERANCES
    text = (
        "fraction by which the work of the most loaded rank may exceed the mean (default: about "
        f"{compute}; more only if that shortens the step)"
    )
    option(parser, "--compute-tolerance", text, type=float, metavar="X")
    text = (
        f"the same for tokens (default: about {tokens}; with --model, whatever gives the shortest "
        "step)"
    )
    option(parser, "--token-tolerance", text, type=float, metavar="X")


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)


def config_of(args: Namespace) -> PlannerConfig:
    """The planner's config. With `--objective bytes`, tolerances that are not given get numbers."""
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


def cost_of(args: Namespace, model: ModelConfig | None) -> CostModel:
    """Costs for the attention of the options, of the model, or of SHAPE."""
    shape = SHAPE if model is None else model.attention_shape()
    return CostModel(profile_of(args), _shape_of(args, shape))


def _shape_of(args: Namespace, default: AttentionShape) -> AttentionShape:
    names = ("q_heads", "kv_heads", "head_dim", "dtype")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(default, **given)


def topology_of(args: Namespace, profile: Profile) -> Topology:
    """The cluster of the options. The ranks of a plan are groups of --tp GPUs."""
    tp = whole_number("--tp", args.tp, 1)
    if args.ranks_per_node is None and profile.ranks_per_node % tp:
        raise ValueError(
            f"--tp is {tp}, which does not divide the {profile.ranks_per_node} GPUs of a node; "
            "give --ranks-per-node, too"
        )
    ranks = args.ranks_per_node
    ranks = profile.ranks_per_node // tp if ranks is None else ranks
    return profile.topology(args.nodes, ranks).slice(tp)


def model_of(args: Namespace) -> ModelConfig | None:
    """The model of the options, with what a step moves besides attention: a usual decoder without
    --model, none with --attention-only."""
    if args.attention_only:
        if args.model is not None:
            raise ValueError("--model and --attention-only exclude each other; give one of them")
        return None
    tp = whole_number("--tp", args.tp, 1)
    if args.model is None:  # the options have the heads of one rank
        shape = _shape_of(args, SHAPE)
        whole = replace(shape, q_heads=tp * shape.q_heads, kv_heads=tp * shape.kv_heads)
        sizes = usual_decoder(whole)
    else:
        sizes = find_model(args.model)
    traffic = StepTraffic(gradients=args.gradients, gathered=args.gathered)
    return replace(sizes.divided(tp), traffic=traffic)


# Measuring


def add_measuring_options(parser: ArgumentParser, repeats: int) -> None:
    add_device_option(parser)
    option(parser, "--repeats", "timed calls; medians are shown", repeats, metavar="N")
    add_json_option(parser)
    text = "also write the JSON object to this file"
    option(parser, "--raw", text, type=Path, metavar="FILE")


def check_outputs(**outputs: Path | None) -> None:
    """Raises ValueError if a file cannot be written, or is that of two options. Called before the
    work; names are those of the options in `args`."""
    taken: dict[Path, str] = {}
    for name, path in outputs.items():
        option = f"--{name.replace('_', '-')}"
        if path is None:
            continue
        _check_output(f"{option} is {path}", path)
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ValueError(f"{other} and {option} are both {path}; each needs a file of its own")


def _check_output(given: str, path: Path) -> None:
    try:
        if path.is_dir():
            raise ValueError(f"{given}, which is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise ValueError(f"{given}; the folder {path.parent} does not exist")
        writable = os.access(path if path.exists() else path.parent, os.W_OK)
    except OSError as error:  # a name that is too long
        raise ValueError(f"{given}; {error.strerror}") from None
    if not writable:
        raise ValueError(f"{given}, which cannot be written: permission denied")


def add_device_option(parser: ArgumentParser) -> None:
    option(parser, "--device", "cpu or cuda (default: cuda if there is a GPU)")


def add_kernel_option(parser: ArgumentParser) -> None:
    option(parser, "--kernel", "attention kernel: NAME, NAME:fast or NAME:deterministic", "auto")


def add_shape_options(parser: ArgumentParser) -> None:
    cpu, cuda = SHAPES["cpu"], SHAPES["cuda"]
    for name in ("q_heads", "kv_heads", "head_dim"):
        text = f"(default {getattr(cuda, name)}, on CPUs {getattr(cpu, name)})"
        option(parser, f"--{name.replace('_', '-')}", text, type=int, metavar="N")
    text = f"{', '.join(ITEM_BYTES)} (default {cuda.dtype}, on CPUs {cpu.dtype})"
    option(parser, "--dtype", text)


def shape_of(args: Namespace, kind: str) -> AttentionShape:
    """The attention shape of the options, with defaults for this kind of device."""
    return _shape_of(args, SHAPES[kind])


def shape_text(shape: AttentionShape) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head dim {shape.head_dim}, "
        f"{shape.dtype}"
    )


# Lists, progress and results


def positive_integers(text: str, option: str) -> tuple[int, ...]:
    """The numbers of a comma-separated list; `option` is named in errors."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{option} is {text!r}; expected positive integers, as in 1024,2048")
    return found


def comma_separated(text: str, option: str | None = None) -> tuple[str, ...]:
    """The words of a comma-separated list, each once. With `option`, at least one is needed, and
    this option is named in the error."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if option is not None and not found:
        raise ValueError(f"{option} is {text!r}; at least one name is needed")
    return found


class Progress:
    """Prints on stderr what is being done. `quiet`, for all ranks but the first, prints nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet, self._in_place = quiet, sys.stderr.isatty()
        self._shown = -SELDOM_SECONDS

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self.clear()
        self._print(f"{text}\n")

    def show(self, text: str) -> None:
        """Prints a line that the next one replaces; if stderr is no terminal, prints a line at most
        every two seconds."""
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
    text = "print one JSON object instead of text"
    parser.add_argument("--json", action="store_true", help=text)
    parser.set_defaults(raw=None)


def show(args: Namespace, numbers: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the JSON object or the lines, and writes the JSON object to the file of --raw."""
    text = json.dumps(numbers)
    if args.raw is not None:
        args.raw.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else "\n".join(lines))

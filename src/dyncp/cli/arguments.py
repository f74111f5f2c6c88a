"""What commands share: options, what is printed (progress on stderr, then a
table or one JSON object), and running on several processes under torchrun."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dyncp import masks
from dyncp.blocks import ITEM_BYTES, AttentionShape, Batch
from dyncp.checks import whole_number
from dyncp.cost import (
    DEFAULT_PROFILE,
    MODELS,
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
from dyncp.topology import PRESETS, Topology, preset

if TYPE_CHECKING:
    import torch

    from dyncp.calibrate.calls import World

COMPUTE_TOLERANCE, TOKEN_TOLERANCE = DEFAULT_TOLERANCES
# What commands that measure run by default, by kind of device.
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(32, 8, 128, "bf16")}
# Importing torch takes seconds, and without one of these files it sees no GPU.
DRIVER_FILES = ("nvidiactl", "dxg")
CLEAR_LINE = "\r\x1b[K"
SELDOM_SECONDS = 2.0
GRACE_SECONDS = 40  # torchrun itself gives its workers 30 before it kills them
COPY_SECONDS = 5  # for the last lines of ranks that are gone
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
TIMEOUT = timedelta(minutes=10)


def examples_text(examples: Sequence[str]) -> str:
    """The end of a command's help: one command line each."""
    title = "examples:" if len(examples) > 1 else "example:"
    return "\n".join([title, *(f"  {example}" for example in examples)])


def option(parser: Any, name: str, text: str, default: Any = None, **options: Any) -> None:
    """Adds an option. Its help ends with the default, if any, whose type is that of values."""
    if default is not None:
        text = f"{text} (default %(default)s)".strip()
        options.setdefault("type", type(default))
    parser.add_argument(name, help=text, default=default, **options)


def add_json_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


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


def add_cluster_options(parser: ArgumentParser) -> None:
    default = f"(default: that of this machine's GPU, or {DEFAULT_PROFILE})"
    text = f"kind of cluster: {', '.join(PRESETS)} {default}"
    option(parser, "--topology", text, metavar="PRESET")
    add_profile_option(parser)
    option(parser, "--nodes", "", 4)
    option(parser, "--ranks-per-node", "", 8)


def add_profile_option(parser: ArgumentParser) -> None:
    text = "rates and links that `dyncp calibrate` measured, instead of the preset's"
    option(parser, "--profile", text, type=Path, metavar="FILE")


def add_attention_options(parser: ArgumentParser) -> None:
    for name, default in (("q-heads", 8), ("kv-heads", 2), ("head-dim", 128)):
        option(parser, f"--{name}", "of one layer", default)
    option(parser, "--dtype", ", ".join(ITEM_BYTES), "bf16")
    option(parser, "--model", "llama3-8b or a config.json: adds the per-token work")


def add_solver_options(parser: ArgumentParser) -> None:
    solvers = "a name, a static method with degrees (zigzag/cp8), or auto: the best of all"
    option(parser, "--solver", solvers, AUTO)
    option(parser, "--effort", " or ".join(EFFORTS), "fast")
    option(parser, "--objective", f"what auto goes by: {' or '.join(OBJECTIVES)}", "time")
    counts: dict[str, Any] = {"type": _count_or_auto, "metavar": "N|auto"}
    groups = "groups of kv heads that are placed independently"
    option(parser, "--head-groups", groups, 1, **counts)
    divisions = "most divisions, the steps in which inputs arrive (default: searched)"
    option(parser, "--divisions", divisions, **counts)


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)


def config_of(args: Namespace) -> PlannerConfig:
    return PlannerConfig(
        solver=args.solver,
        effort=args.effort,
        objective=args.objective,
        head_groups=args.head_groups,
        divisions=args.divisions,
        limits=limits_of(args),
    )


def add_limit_options(parser: ArgumentParser) -> None:
    compute = (
        "share by which the fullest rank may exceed the mean (default: about "
        f"{COMPUTE_TOLERANCE}, and more only where that makes the step shorter)"
    )
    tokens = (
        f"the same for tokens (default: about {TOKEN_TOLERANCE}; with --model, where tokens cost "
        "time, as little as pays)"
    )
    option(parser, "--compute-tolerance", compute, type=float)
    option(parser, "--token-tolerance", tokens, type=float)


def topology_of(args: Namespace) -> Topology:
    if args.profile is not None:
        return load_profile(args.profile).topology(args.nodes, args.ranks_per_node)
    return preset(preset_of(args), args.nodes, args.ranks_per_node)


def profile_of(args: Namespace) -> Profile:
    return find_profile(preset_of(args)) if args.profile is None else load_profile(args.profile)


def preset_of(args: Namespace) -> str:
    """The preset asked for, or that of this machine's GPU."""
    if args.topology is None:
        device = gpu_name()
        tell_profile(device, "--topology PRESET or --profile FILE choose another")
        args.topology = profile_for_device(device).name
    name: str = args.topology
    return name


def gpu_name() -> str | None:
    """The GPU of this machine, as torch names it; None without a GPU or without torch."""
    if not any((Path("/dev") / name).exists() for name in DRIVER_FILES):
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def cost_of(args: Namespace) -> CostModel:
    shape = AttentionShape(args.q_heads, args.kv_heads, args.head_dim, args.dtype)
    return CostModel(profile_of(args), shape)


def limits_of(args: Namespace) -> Limits:
    """The limits asked for; `--objective bytes` always has some."""
    limits = Limits(args.compute_tolerance, args.token_tolerance)
    return Limits(*limits.tolerances.tolist()) if args.objective == "bytes" else limits


def model_of(args: Namespace) -> ModelConfig | None:
    name: str | None = args.model
    if name is None:
        return None
    if name.endswith(".json"):
        return read_model(name)
    written = name.replace("-", "_")
    return find_model(written if written in MODELS else name)


def make_batch(args: Namespace, lengths: Sequence[int]) -> Batch:
    """One sequence of each length, all with the mask asked for."""
    mask = masks.by_name(args.mask)
    return Batch.of([mask(length) for length in lengths])


def check_tokens(args: Namespace) -> int:
    return whole_number("--tokens", args.tokens, 1)


def lengths_of(args: Namespace) -> list[int]:
    """The sequence lengths of one batch."""
    if args.lengths_file is not None:
        return read_lengths(args.lengths_file)
    if getattr(args, "lengths", None) is None:
        name, seed = parse_sample(args.sample)
        return sample_lengths(name, check_tokens(args), seed)
    return list(positive_integers(args.lengths, "--lengths"))


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


def add_repeats_option(parser: ArgumentParser, default: int) -> None:
    option(parser, "--repeats", "timed calls, of which the median counts", default)


def shape_of(args: Namespace, device: "torch.device") -> AttentionShape:
    default = SHAPES[device.type]
    values = (
        getattr(args, name) if getattr(args, name) is not None else getattr(default, name)
        for name in ("q_heads", "kv_heads", "head_dim", "dtype")
    )
    return AttentionShape(*values)


def preset_for(device: "torch.device") -> str:
    """The preset of the device that is measured."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tell_profile(name, "--topology, --base or --profile choose another")
    return profile_for_device(name).name


def shape_text(shape: AttentionShape) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head dim {shape.head_dim}, "
        f"{shape.dtype}"
    )


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
    """Says what is being done now, on stderr."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self.in_place = self._stream.isatty()
        self._shown = -SELDOM_SECONDS

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """A line that the next one replaces."""
        end = "" if self.in_place else "\n"
        self.clear()
        print(text, end=end, file=self._stream, flush=True)

    def show_seldom(self, text: str) -> None:
        """`show`, but where lines stay only one every two seconds."""
        now = time.monotonic()
        if self.in_place or now - self._shown >= SELDOM_SECONDS:
            self._shown = now
            self.show(text)

    def clear(self) -> None:
        if self.in_place:
            print(CLEAR_LINE, end="", file=self._stream, flush=True)


def add_output_options(parser: ArgumentParser) -> None:
    add_json_option(parser)
    text = "write that JSON object, whatever is printed"
    option(parser, "--raw", text, type=Path, metavar="FILE")


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


def launch(words: Sequence[str], num_ranks: int, *, to_stderr: bool = False) -> int:
    """The exit code of `torchrun --nproc-per-node num_ranks WORDS`.

    With `to_stderr`, what the ranks print on stdout goes to this process's stderr.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--local-addr", "127.0.0.1", "--nproc-per-node", str(num_ranks)]
    with _stopping_on_signals():
        # A session of its own: Ctrl-C reaches only us, and torchrun stops its workers in order.
        process = subprocess.Popen(
            [*torchrun, *options, *words],
            env=_environment(num_ranks),
            stdout=sys.stderr.fileno() if to_stderr else None,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stopping = threading.Event()
        copier = threading.Thread(target=_copy_errors, args=(process.stderr, stopping), daemon=True)
        copier.start()
        try:
            return process.wait()
        except BaseException:
            stopping.set()
            raise
        finally:
            _stop(process)
            copier.join(COPY_SECONDS)


def threads_per_rank(num_ranks: int) -> int:
    """The cores this process may use, shared out among the ranks of the node."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _environment(num_ranks: int) -> dict[str, str]:
    """What torchrun, OpenMP and gloo read; what the user has set stays."""
    defaults = {"OMP_NUM_THREADS": str(threads_per_rank(num_ranks))}
    if sys.platform in LOOPBACK:
        defaults["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    return defaults | os.environ


def _copy_errors(source: IO[bytes], stopping: threading.Event) -> None:
    """Passes on what the ranks complain about, but not that they are being stopped."""
    for line in source:
        if not stopping.is_set():
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process through `finally` blocks, as Ctrl-C does."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut this short
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    signal.signal(signal.SIGINT, before)


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def open_world(device_name: str | None) -> "Iterator[World]":
    """The world of torchrun's ranks, or of this process alone."""
    import torch
    import torch.distributed as dist

    from dyncp.calibrate.calls import World, open_device

    if not under_torchrun():
        yield World.alone(open_device(device_name))
        return
    local_rank, local = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device = open_device(device_name, local_rank)
    torch.set_num_threads(threads_per_rank(local))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local, device)
    finally:
        dist.destroy_process_group()

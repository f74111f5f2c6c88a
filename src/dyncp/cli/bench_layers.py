"""`dyncp bench layers`: ranks of plans inside a stack of transformer layers."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dyncp import masks
from dyncp.blocks import ITEM_BYTES, Batch
from dyncp.cli.bench_attention import (
    RANKS,
    RANKS_PER_MACHINE,
    TOKENS,
    virtual_topology,
)
from dyncp.cli.command import Command
from dyncp.cli.layers_table import draw_layers
from dyncp.cli.measure_options import (
    SHAPES,
    add_device_option,
    add_output_options,
    add_repeats_option,
    check_raw,
    preset_for,
    shape_text,
    show,
    words,
)
from dyncp.cli.options import add_profile_option, check_tokens, model_of, profile_of
from dyncp.cli.progress import Progress
from dyncp.cost import CostModel, ModelConfig
from dyncp.planner import Task
from dyncp.samplers import NAMES, parse_sample, sample_lengths
from dyncp.topology import PRESETS as TOPOLOGIES

if TYPE_CHECKING:
    import torch

    from dyncp.measure.layers_bench import LayersSetting

# A long-tailed batch, and one of 132 documents, most of them short.
SAMPLES = "ldc:0,training_documents:12"
MASKS = "causal,lambda_shaped,shared_question,causal_blockwise"
MODEL = "llama3-8b"
SMALL_MODEL = ModelConfig(256, 4, 512, 1024, 4, 2, 64)  # on CPUs
GRAPHS = ("auto", "on", "off")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help=f"{MODEL} or a config.json: sizes of the layers (default {MODEL}, on CPUs a small "
        f"one: hidden {SMALL_MODEL.hidden}, {SMALL_MODEL.heads} heads)",
    )
    parser.add_argument("--layers", type=int, default=4, help="of the stack (default %(default)s)")
    parser.add_argument(
        "--dtype",
        help=f"{', '.join(ITEM_BYTES)} (default {SHAPES['cuda'].dtype}, on CPUs "
        f"{SHAPES['cpu'].dtype})",
    )
    parser.add_argument(
        "--sample",
        default=SAMPLES,
        metavar="NAME:SEED,...",
        help="length distributions of the batches, separated by commas; NAME is one of "
        f"{', '.join(NAMES)} (default %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        help=f"of a batch (default {TOKENS['cuda']}, on CPUs {TOKENS['cpu']})",
    )
    parser.add_argument(
        "--masks",
        default=MASKS,
        help="separated by commas; `dyncp masks` lists them (default %(default)s)",
    )
    parser.add_argument(
        "--virtual-ranks",
        type=int,
        metavar="N",
        help=f"ranks of the plans (default {RANKS['cuda']}, on CPUs {RANKS['cpu']})",
    )
    parser.add_argument(
        "--ranks-per-machine",
        type=int,
        help=f"(default {RANKS_PER_MACHINE}, or all where there are fewer)",
    )
    parser.add_argument(
        "--rank",
        metavar="N,...",
        help="ranks that run, separated by commas (default: those with the most pairs, the fewest, "
        "and the most messages, and one in the middle)",
    )
    parser.add_argument(
        "--topology",
        metavar="PRESET",
        help=f"links and rates that plans are made for: {', '.join(TOPOLOGIES)} (default: "
        "that of the device)",
    )
    add_profile_option(parser)
    parser.add_argument(
        "--kernel",
        default="auto",
        help="NAME, NAME:fast or NAME:deterministic (default %(default)s)",
    )
    parser.add_argument(
        "--graphs",
        choices=GRAPHS,
        default="auto",
        help="whether the executor captures what it launches (default %(default)s)",
    )
    add_device_option(parser)
    add_repeats_option(parser, 10)
    add_output_options(parser)


def run(args: Namespace) -> int:
    from dyncp.measure.layers_bench import bench_layers
    from dyncp.measure.world import open_device

    check_raw(args)
    device = open_device(args.device)
    setting = _setting(args, device)
    progress = Progress()
    found = bench_layers(setting, progress.show_seldom)
    progress.clear()
    about = _about(args, setting)
    show(args, about | found, _lines(about, setting, found))
    return 0


def _setting(args: Namespace, device: "torch.device") -> "LayersSetting":
    from dyncp.measure.layers_bench import WARM_UP, LayersSetting
    from dyncp.measure.ours import KernelChoice
    from dyncp.measure.stack_cases import StackSetting
    from dyncp.measure.timing import Repeats

    kind = device.type
    args.topology = args.topology or preset_for(device)
    args.tokens = TOKENS[kind] if args.tokens is None else args.tokens
    model = _model(args, kind)
    shape = model.attention_shape(args.dtype or SHAPES[kind].dtype)
    cost = CostModel(profile_of(args), shape)
    choice = KernelChoice.of(args.kernel)
    return LayersSetting(
        tasks=_tasks(args, cost, model, kind),
        stack=StackSetting(model, args.layers, shape, choice, device, args.graphs),
        ranks=_ranks(args.rank),
        repeats=Repeats(args.repeats, WARM_UP),
    )


def _model(args: Namespace, kind: str) -> ModelConfig:
    if args.model is None and kind == "cpu":
        return SMALL_MODEL
    args.model = args.model or MODEL
    model = model_of(args)
    assert model is not None
    return model


def _tasks(
    args: Namespace, cost: CostModel, model: ModelConfig, kind: str
) -> dict[tuple[str, str], Task]:
    """What is planned, by sample and mask."""
    topology = virtual_topology(args, kind, cost)
    samples, names = words(args.sample), words(args.masks)
    for option, given in (("--sample", samples), ("--masks", names)):
        if not given:
            raise ValueError(f"{option} is empty; at least one is needed")
    tasks = {}
    for sample in samples:
        lengths = sample_lengths(*_drawn(sample, args))
        for name in names:
            mask = masks.by_name(name)
            batch = Batch.of([mask(length) for length in lengths])
            tasks[sample, name] = Task.of(batch, topology, cost.shape, None, cost, model)
    return tasks


def _drawn(sample: str, args: Namespace) -> tuple[str, int, int]:
    name, seed = parse_sample(sample)
    return name, check_tokens(args), seed


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise ValueError(f"--rank is {text!r}; expected whole numbers, as in 0,7") from None


def _about(args: Namespace, setting: "LayersSetting") -> dict[str, Any]:
    from dyncp.measure.ours import kernel_name
    from dyncp.measure.world import device_text

    stack, task = setting.stack, next(iter(setting.tasks.values()))
    return {
        "device": device_text(stack.device),
        "kernel": str(stack.choice),
        "kernel_name": kernel_name(stack.choice, stack.device),
        "graphs": stack.graphs,
        "model": asdict(stack.model) | {"layers": stack.layers},
        "shape": asdict(stack.shape),
        "tokens": args.tokens,
        "lengths": {
            sample: list(task.batch.lengths) for (sample, _), task in setting.tasks.items()
        },
        "profile": asdict(task.cost.profile),
        "machines": task.topology.machines,
        "ranks_per_machine": task.topology.ranks_per_machine,
        "repeats": setting.repeats.timed,
    }


def _lines(
    about: Mapping[str, Any], setting: "LayersSetting", found: Mapping[str, Any]
) -> Iterator[str]:
    model, name = about["model"], about["kernel_name"]
    chosen = f" ({name})" if name not in about["kernel"] else ""
    yield (
        f"{about['device']}, kernel {about['kernel']}{chosen}, graphs {about['graphs']}; "
        f"{model['layers']} layers: hidden {model['hidden']}, ffn {model['ffn']}, "
        f"{shape_text(setting.stack.shape)}"
    )
    yield (
        f"{about['tokens']:,} tokens planned for {about['machines']} × "
        f"{about['ranks_per_machine']} ranks, profile {about['profile']['name']}; forward and "
        f"backward of one rank, what it receives made up; median of {about['repeats']}"
    )
    yield from draw_layers(found, about["lengths"])


command = Command(
    name="layers",
    summary="measure ranks of plans inside a stack of transformer layers, beside plain attention",
    examples=(
        "dyncp bench layers --kernel flash4:fast",
        "dyncp bench layers --sample ldc:0 --masks causal --rank 0,7 --graphs off --json",
    ),
    add_options=add_options,
    run=run,
)

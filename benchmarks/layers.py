"""`dyncp bench layers`: measures ranks of plans inside a stack of transformer layers."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.attention import TOKENS, add_rank_options, virtual_topology
from benchmarks.attention_times import kernel_name
from benchmarks.layers_times import GRAPHS, WARM_UP, LayersSetting, StackSetting, bench_layers
from dyncp.blocks import ITEM_BYTES
from dyncp.calibrate import Repeats
from dyncp.calibrate.calls import executor_options
from dyncp.calibrate.world import device_name, device_text, open_device
from dyncp.cli.arguments import (
    SHAPES,
    Progress,
    add_kernel_option,
    add_measuring_options,
    add_profile_options,
    check_outputs,
    comma_separated,
    draw_lengths,
    make_batch,
    option,
    profile_of,
    shape_text,
    show,
)
from dyncp.cost import CostModel, ModelConfig, find_model
from dyncp.planner import Task
from dyncp.samplers import NAMES

# A long-tailed batch, and one of 132 documents, most of them short.
SAMPLES = "ldc:0,training_documents:12"
MASKS = "causal,lambda_shaped,shared_question,causal_blockwise"
MODEL = "llama3-8b"
SMALL_MODEL = ModelConfig(256, 4, 512, 1024, 4, 2, 64)  # on CPUs
# Heading, key, factor and digits of every column.
COLUMNS = (
    ("wall ms", "wall_seconds", 1e3, 2),
    ("busy", "busy_share", 1, 3),
    ("host", "host_share", 1, 3),
    ("kernels", "kernels", 1, 0),
    ("kernel ms", "kernel_seconds", 1e3, 2),
    ("wall / kernel", "wall_over_kernels", 1, 3),
    ("× plain", "wall_over_plain", 1, 3),
)
WIDTHS = tuple(max(10, len(heading) + 2) for heading, *_ in COLUMNS)
ATTENTIONS = {"dyncp": "dyncp", "plain": "plain", "none": "no attention"}

EXAMPLES = (
    "dyncp bench layers --kernel flash4:fast",
    "dyncp bench layers --sample ldc:0 --masks causal --rank 0,7 --graphs off --json",
)


def add_options(parser: ArgumentParser) -> None:
    small = f"a small one: hidden {SMALL_MODEL.hidden}, {SMALL_MODEL.heads} heads"
    text = f"sizes of the layers: {MODEL} or a config.json (default {MODEL}, on CPUs {small})"
    option(parser, "--model", text)
    option(parser, "--layers", "layers of the stack", 4)
    default = f"(default {SHAPES['cuda'].dtype}, on CPUs {SHAPES['cpu'].dtype})"
    option(parser, "--dtype", f"{', '.join(ITEM_BYTES)} {default}")
    text = "length distributions of the batches, separated by commas; NAME is one of "
    option(parser, "--sample", text + ", ".join(NAMES), SAMPLES, metavar="NAME:SEED,...")
    text = f"tokens of a batch (default {TOKENS['cuda']}, on CPUs {TOKENS['cpu']})"
    option(parser, "--tokens", text, type=int)
    option(parser, "--masks", "separated by commas; `dyncp masks` lists them", MASKS)
    add_rank_options(parser, "ranks of the plans")
    text = "ranks to run, separated by commas (default: four, with the most pairs, the fewest, the "
    text += "most messages and a median number of pairs)"
    option(parser, "--rank", text, metavar="N,...")
    add_profile_options(parser)
    add_kernel_option(parser)
    text = "whether the executor uses CUDA graphs"
    option(parser, "--graphs", text, "auto", choices=GRAPHS)
    add_measuring_options(parser, 10)


def run(args: Namespace) -> int:
    check_outputs(raw=args.raw)
    device = open_device(args.device)
    setting = _setting(args, device)
    progress = Progress()
    found = bench_layers(setting, progress.show)
    progress.clear()
    about = _about(args, setting)
    show(args, about | found, _lines(about, setting, found))
    return 0


def _setting(args: Namespace, device: torch.device) -> LayersSetting:
    kind = device.type
    args.tokens = TOKENS[kind] if args.tokens is None else args.tokens
    model = _model(args, kind)
    shape = replace(model, dtype=args.dtype or SHAPES[kind].dtype).attention_shape()
    fixed = executor_options(args.kernel).get("deterministic", True)
    cost = CostModel(profile_of(args, device_name(device)), shape, deterministic=fixed)
    return LayersSetting(
        tasks=_tasks(args, cost, model, kind),
        stack=StackSetting(model, args.layers, shape, args.kernel, device, args.graphs),
        ranks=_ranks(args.rank),
        repeats=Repeats(args.repeats, WARM_UP),
    )


def _model(args: Namespace, kind: str) -> ModelConfig:
    if args.model is None and kind == "cpu":
        return SMALL_MODEL
    return find_model(args.model or MODEL)


def _tasks(
    args: Namespace, cost: CostModel, model: ModelConfig, kind: str
) -> dict[tuple[str, str], Task]:
    """The planning tasks, by sample and mask."""
    topology = virtual_topology(args, kind, cost)
    samples = comma_separated(args.sample, "--sample")
    names = comma_separated(args.masks, "--masks")
    tasks = {}
    for sample in samples:
        lengths = draw_lengths(args, sample)
        for name in names:
            batch = make_batch(name, lengths)
            tasks[sample, name] = Task.of(batch, topology, cost.shape, None, cost, model)
    return tasks


def _ranks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(word) for word in comma_separated(text))
    except ValueError:
        raise ValueError(f"--rank is {text!r}; expected integers, as in 0,7") from None


def _about(args: Namespace, setting: LayersSetting) -> dict[str, Any]:
    stack, task = setting.stack, next(iter(setting.tasks.values()))
    return {
        "device": device_text(stack.device),
        "kernel": stack.kernel,
        "kernel_name": kernel_name(stack.kernel, stack.device),
        "graphs": stack.graphs,
        "model": asdict(stack.model) | {"layers": stack.layers},
        "shape": asdict(stack.shape),
        "tokens": args.tokens,
        "lengths": {
            sample: list(task.batch.lengths) for (sample, _), task in setting.tasks.items()
        },
        "profile": asdict(task.cost.profile),
        "nodes": task.topology.nodes,
        "ranks_per_node": task.topology.ranks_per_node,
        "repeats": setting.repeats.timed,
    }


def _lines(
    about: Mapping[str, Any], setting: LayersSetting, found: Mapping[str, Any]
) -> Iterator[str]:
    model, name = about["model"], about["kernel_name"]
    chosen = f" ({name})" if name not in about["kernel"] else ""
    yield (
        f"{about['device']}, kernel {about['kernel']}{chosen}, graphs {about['graphs']}; "
        f"{model['layers']} layers: hidden {model['hidden']}, ffn {model['ffn']}, "
        f"{shape_text(setting.stack.shape)}"
    )
    yield (
        f"{about['tokens']:,} tokens planned for {about['nodes']} × "
        f"{about['ranks_per_node']} ranks, profile {about['profile']['name']}; forward and "
        f"backward of one rank, which receives random numbers; median of {about['repeats']}"
    )
    yield from draw_layers(found, about["lengths"])


def draw_layers(found: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Three lines for every rank, then the worst and the mean over ranks."""
    headings = "".join(
        f"{heading:>{width}}" for (heading, *_), width in zip(COLUMNS, WIDTHS, strict=True)
    )
    for group in found["summary"]:
        sample, mask = group["sample"], group["mask"]
        rows = [row for row in found["rows"] if (row["sample"], row["mask"]) == (sample, mask)]
        count = len(lengths[sample])
        yield ""
        yield (
            f"{sample} ({count} sequence{'s' if count > 1 else ''}), {mask}, plan by "
            f"{rows[0]['solver']}"
        )
        yield f"{'':<36}{'':<14}{'tokens':>9}{'Mpairs':>9}{headings}"
        for row in rows:
            yield from _rank(row)
        yield from _summary(group["attention"])
    yield from _reasons(found["rows"])


def _rank(row: Mapping[str, Any]) -> Iterator[str]:
    by_kind = row["attention"]
    labels = (
        f"rank {row['rank']} ({row['why']})",
        f"  {by_kind['plain']['implementation']}: {row['plain_documents']}",
        f"  {row['messages']} messages a layer",
    )
    for label, (kind, measured) in zip(labels, by_kind.items(), strict=True):
        pairs = f"{1e-6 * measured['pairs']:>9.2f}" if measured["pairs"] else f"{'–':>9}"
        yield f"{label:<36}{ATTENTIONS[kind]:<14}{row['tokens']:>9,}{pairs}" + _numbers(measured)


def _summary(by_kind: Mapping[str, Any]) -> Iterator[str]:
    for which in ("worst", "mean"):
        for kind, columns in by_kind.items():
            label = f"{which} of ranks" if kind == "dyncp" else ""
            values = {key: None if of is None else of[which] for key, of in columns.items()}
            yield f"{label:<36}{ATTENTIONS[kind]:<14}{'':>9}{'':>9}" + _numbers(values)


def _numbers(measured: Mapping[str, float | None]) -> str:
    text = ""
    for (_, key, factor, digits), width in zip(COLUMNS, WIDTHS, strict=True):
        value = measured[key]
        text += f"{'–':>{width}}" if value is None else f"{factor * value:>{width},.{digits}f}"
    return text


def _reasons(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why plain attention was not measured; every reason once."""
    found = {
        f"{one['implementation']} did not run: {one['reason']}": None
        for row in rows
        for one in row["attention"].values()
        if one["reason"]
    }
    if found:
        yield ""
        yield from found

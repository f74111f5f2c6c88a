"""Predicts measurements that others published, from their settings alone.

    python -m benchmarks.hindcast [--only NAME,...] [--folder DIR] [--batches N] [--plot FILE]

The tables are in `benchmarks/data/hindcast`, with sources and settings in their first lines;
another folder may have tables of the same form. Prices are those of the presets, and of
`Implementation` for the code that was measured; kernel rates are from single-GPU columns and
curves. The host's seconds of LoongTrain and TransformerEngine were fitted to `paper_attention`, so
its errors are shown but not counted. Lengths of the paper's datasets are drawn from distributions
like theirs.
"""

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cases import DATA
from dyncp import AttentionShape, Batch, PlannerConfig, masks
from dyncp.blocks import Direction
from dyncp.calibrate.rates import fit_seconds
from dyncp.cost import (
    IMPLEMENTATIONS,
    CostModel,
    Implementation,
    ModelConfig,
    Profile,
    StepTraffic,
    find_model,
    find_profile,
)
from dyncp.placement import with_degree
from dyncp.planner import Task, choose
from dyncp.simulate import Simulated
from dyncp.topology import Topology

FOLDER = DATA / "hindcast"
PAPER_TOKENS = 131_072
# Lengths of all ranks' packings in ring-flash-attention's benchmark: 8 times these.
PACKINGS = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
# Presets of the GPUs in the tables, and their NVLink bandwidth over the preset's.
GPUS = {"A100": ("a100", 1.0), "H100": ("h100", 1.0), "H800": ("h100", 400 / 900)}
# flash-attention 2 backward over forward, FLOP/s, on one H200 at 8,192 causal tokens.
FLASH2_BACKWARD = 2.5 * 1.693 / 4.803
FLOAT8 = 1.2  # assumed gain of float8 linear layers over bf16, all conversions included

Row = dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One published number beside the prediction. `counted`: it was not used to choose prices."""

    source: str
    setting: str
    unit: str
    measured: float
    predicted: float
    counted: bool = True

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def read(name: str, folder: Path) -> list[Row]:
    """The rows of a table, without its first lines, which say where it is from. Tables that another
    folder lacks are this project's."""
    folder = folder if (folder / f"{name}.csv").exists() else FOLDER
    lines = (folder / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def attend(
    method: str,
    lengths: Sequence[int],
    shape: AttentionShape,
    topology: Topology,
    profile: Profile,
    degrees: tuple[int, int | None],
    model: ModelConfig | None = None,
    code: Implementation | None = None,
) -> Simulated:
    """One batch of causal sequences under a static method's own code."""
    code, (degree, heads) = code or IMPLEMENTATIONS[method], degrees
    cost = CostModel(profile, replace(shape, partial_dtype=code.partial_dtype), False, False, code)
    batch = Batch.of([masks.causal(n) for n in code.padded(lengths, degree // (heads or 1))])
    task = Task.of(batch, topology, cost.shape, PlannerConfig(), cost, model)
    solver = with_degree(method, degree, heads).fitted(cost.shape, topology)
    return task.follow(task.place(solver)).simulated


def mean_seconds(found: Sequence[Simulated]) -> tuple[float, float]:
    """Mean seconds of a layer, forward and backward."""
    both = [(one.forward_seconds, one.backward_seconds) for one in found]
    forward, backward = np.mean(both, axis=0).tolist()
    return forward, backward


def flash2(profile: Profile, folder: Path) -> Profile:
    """The profile with flash-attention 2's rates. On H100s they are fitted to DistCA's curve; the
    A100's preset has them already."""
    if profile.name != "h100":
        return profile
    plain = replace(profile, edge_forward=1.0, edge_backward=1.0)
    cost, rows = CostModel(plain, AttentionShape(64, 4, 128)), read("distca_h100_attention", folder)
    columns, seconds = [], []
    for row in rows:
        length, parts = int(row["L"]), int(row["cp"])
        queries, heads = length / parts, 64 // int(row["tp"])
        keys = length * (0.5 + 0.5 / parts)
        if row["duration_per_doc"] in ("", "nan") or queries < 1:
            continue
        pairs = queries * (keys - queries / 2)
        sides = (np.array([queries]), np.array([keys]))
        area = cost.kernel_area(np.array([pairs]), *sides) * heads
        tiles = np.ceil(queries / 128) * heads
        spread = 1 + plain.lanes / (2 * tiles)
        flops = float(cost.flops(area * spread, 1, Direction.FORWARD)[0])
        per_row = float(cost.flops(np.array([128.0 * tiles * spread]), 1, Direction.FORWARD)[0])
        columns.append((1.0, flops, per_row))
        seconds.append(1e-3 * float(row["duration_per_doc"]))
    call, rate, row_rate = fit_seconds(np.array(columns), np.array(seconds)).coefficients.tolist()
    keys_per_row, forward = row_rate / rate, 1 / rate
    return replace(
        plain,
        attention_forward=forward,
        attention_backward=forward * FLASH2_BACKWARD,
        row_forward=keys_per_row,
        row_backward=keys_per_row,
        call_seconds=call,
    )


# Tables


def ring_flash_attention(folder: Path, _batches: int) -> Iterator[Cell]:
    """Attention of a ring on one node; also the share of the ideal, of which the ring's own plain
    column is one part."""
    shape, found = AttentionShape(32, 8, 128), dict[tuple[str, str, str], tuple[float, float]]()
    for row in read("ring_flash_attention_8gpu", folder):
        api, gpu, method = row["api"], row["gpu"], row["method"]
        if method not in ("ring", "zigzag") or gpu not in GPUS:
            continue  # stripes and gathers of packed batches are not modelled
        if (api, gpu, method) not in found:
            name, links = GPUS[gpu]
            profile = flash2(find_profile(name), folder)
            profile = replace(profile, intra=profile.intra.scaled(links, 1.0))
            lists = [[65_536]] if api == "batch" else [[8 * n for n in p] for p in PACKINGS]
            runs = [
                attend(method, lengths, shape, profile.topology(1, 8), profile, (8, None))
                for lengths in lists
            ]
            found[api, gpu, method] = mean_seconds(runs)
        forward, backward = found[api, gpu, method]
        predicted = forward + (backward if "bwd" in row["pass"] else 0.0)
        where = f"{gpu} {api} {method} {row['pass']}"
        measured = 1 / float(row["iter_s"])
        yield Cell("ring_flash_attention_8gpu", where, "ms", 1e3 * measured, 1e3 * predicted)
        ideal = 1 / float(row["ideal_iter_s"])
        where += ", share of ideal"
        shares = 100 * ideal / measured, 100 * ideal / predicted
        yield Cell("ring_flash_attention_8gpu", where, "%", *shares)


def paper_lengths(dataset: str, scale: float, count: int) -> list[list[int]]:
    """Batches as the paper filled them: in order, until the next sample does not fit."""
    rng, batches, batch = np.random.default_rng(0), list[list[int]](), list[int]()
    while len(batches) < count:
        if dataset == "ldc":
            length = round(max(float(rng.lognormal(np.log(3000), 1.3)), 256) * scale)
        else:
            length = round(float(np.exp(rng.uniform(np.log(8192), np.log(65_536)))) * scale)
        if length > PAPER_TOKENS:
            continue
        if sum(batch) + length > PAPER_TOKENS:
            batches += [batch] if sum(batch) >= 0.75 * PAPER_TOKENS else []
            batch = []
        batch.append(length)
    return batches


def paper_attention(folder: Path, batches: int) -> Iterator[Cell]:
    """The paper's attention benchmark on 4 × 8 A100s. The baselines ran over all 32 ranks: at every
    scale the measured times are those of 16-step rings."""
    shape, profile = AttentionShape(8, 2, 128), find_profile("a100")
    topology, found = profile.topology(4, 8), dict[tuple[str, str, str], tuple[float, float]]()
    for row in read("paper_attention", folder):
        dataset, scale, method = row["dataset"], row["scale"], row["method"]
        key = dataset, scale, method
        if key not in found:
            lists = paper_lengths(dataset, float(scale), batches)
            if method == "dcp":
                runs = [_ours(lengths, shape, topology, profile).simulated for lengths in lists]
            else:
                runs = [attend(method, n, shape, topology, profile, (32, 2)) for n in lists]
            found[key] = mean_seconds(runs)
        predicted = found[key][row["pass"] == "backward"]
        where = f"{dataset} × {scale} {method} {row['pass']}"
        source = "paper_attention" if method != "dcp" else "paper_attention, dcp"
        yield Cell(source, where, "ms", float(row["ms"]), 1e3 * predicted, counted=False)


def _ours(
    lengths: Sequence[int],
    shape: AttentionShape,
    topology: Topology,
    profile: Profile,
    model: ModelConfig | None = None,
    mask: Callable[[int], masks.Mask] = masks.causal,
) -> Any:
    """Our plan, launched without graphs."""
    batch = Batch.of([mask(length) for length in lengths])
    cost = CostModel(profile, shape, graphs=False)
    return choose(Task.of(batch, topology, shape, PlannerConfig(), cost, model)).candidate


def paper_end_to_end(folder: Path, batches: int) -> Iterator[Cell]:
    """Steps of an 8B model on 8 × 8 A100s, TP 4, 16 context-parallel ranks. TransformerEngine
    computes sparse masks as causal ones."""
    profile = find_profile("a100")
    topology = profile.topology(8, 2).slice(4)
    traffic = StepTraffic("sharded", "step", overlaps=False)
    model = replace(find_model("gpt_8b").divided(4), traffic=traffic)
    shape = model.attention_shape()
    kinds = {"causal": masks.causal, "lambda": masks.lambda_shaped}
    for row in read("paper_end_to_end", folder):
        if not row["baseline_s"]:
            continue
        lists = paper_lengths(row["dataset"], 1.0, batches)
        where = f"{row['dataset']} {row['tokens']} {row['mask']}"
        runs = [
            attend("transformer_engine", n, shape, topology, profile, (16, 2), model) for n in lists
        ]
        theirs = float(np.mean([run.step_seconds for run in runs]))
        yield Cell("paper_end_to_end", f"{where} baseline", "s", float(row["baseline_s"]), theirs)
        own = [
            _ours(n, shape, topology, profile, model, kinds[row["mask"]]).simulated for n in lists
        ]
        ours = float(np.mean([run.step_seconds for run in own]))
        cell = Cell("paper_end_to_end, dcp", f"{where} dcp", "s", float(row["dcp_s"]), ours)
        yield replace(cell, counted=False)


def torchtitan(folder: Path, _batches: int) -> Iterator[Cell]:
    """Llama-3.1-8B on 8 H100s, FSDP2, float8 linear layers, everything computed again backward:
    seconds of a step over those without context parallelism."""
    profile = flash2(find_profile("h100"), folder)
    profile = replace(profile, dense=profile.dense * FLOAT8)
    rows = [row for row in read("torchtitan_llama31_cp", folder) if row["model"] == "8B"]
    for method, chunks in (("zigzag", "head-tail"), ("ring", "contiguous chunks")):
        steps = [_titan_step(method, row, profile) for row in rows]
        alone, first = steps[0], float(rows[0]["ms_per_step_derived"])
        for row, seconds in list(zip(rows, steps, strict=True))[1:]:
            measured = float(row["ms_per_step_derived"]) / first
            where = f"CP {row['cp']}, {int(row['seq_len']):,} tokens, {chunks}"
            source = "torchtitan_llama31_cp" + ("" if method == "zigzag" else ", contiguous")
            counted = method == "zigzag"
            yield Cell(source, where, "× CP 1", measured, seconds / alone, counted)


def _titan_step(method: str, row: Row, profile: Profile) -> float:
    cp, ranks, length = int(row["cp"]), int(row["gpus"]), int(row["seq_len"])
    whole = find_model("llama3_8b")
    # Keys and values are repeated for all query heads before they travel.
    shape = replace(whole.attention_shape(), kv_heads=whole.heads)
    degrees, code = (cp, None), IMPLEMENTATIONS["all_gather"]
    one = attend(method, [length], shape, profile.topology(1, cp), profile, degrees, code=code)
    attention = whole.layers * (2 * one.forward_seconds + one.backward_seconds)
    per_token = [whole.seconds_per_token(profile, way) for way in Direction]
    tokens = length / cp * (2 * per_token[0] + per_token[1])
    traffic = StepTraffic("sharded", "layer")
    moved = replace(whole, traffic=traffic).traffic_seconds(profile.topology(1, ranks))
    return max(attention + tokens, moved)


TABLES: dict[str, Callable[[Path, int], Iterator[Cell]]] = {
    "ring_flash_attention_8gpu": ring_flash_attention,
    "paper_attention": paper_attention,
    "paper_end_to_end": paper_end_to_end,
    "torchtitan_llama31_cp": torchtitan,
}
# Shown without predictions: FP8 attention, TPUs and experts are not priced.
OTHERS = ("nemo_long_sequence", "misc_cp_points")


def summarise(cells: Sequence[Cell]) -> str:
    errors = [abs(cell.error) for cell in cells if cell.unit != "%"]
    text = f"median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %"
    points = [abs(cell.predicted - cell.measured) for cell in cells if cell.unit == "%"]
    if points:
        text += f"; share of ideal within {max(points):.1f} points"
    return text if cells[0].counted else f"{text}; not counted"


def draw(cells: Sequence[Cell], path: Path) -> None:
    """A plot of predictions over measurements; times only."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'dyncp[pictures]'") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 6.5), layout="constrained")
    sources = dict.fromkeys(cell.source for cell in cells if cell.unit != "%")
    for source, marker in zip(sources, "osD^vPX*", strict=False):
        chosen = [cell for cell in cells if cell.source == source and cell.unit != "%"]
        scale, unit = (1e3, "ms") if chosen[0].unit == "s" else (1.0, chosen[0].unit)
        axes.scatter(
            [scale * cell.measured for cell in chosen],
            [scale * cell.predicted for cell in chosen],
            marker=marker,
            alpha=0.8,
            label=f"{source} ({unit})",
        )
    ends = np.array([1.0, 4000.0])
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, ends / 1.2, ends * 1.2, color="0.85", zorder=0, label="within 20 %")
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"comma-separated: {', '.join(TABLES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="tables of the same form")
    parser.add_argument("--batches", type=int, default=8, help="drawn per cell of the paper")
    parser.add_argument("--plot", type=Path, help="write a picture, which needs matplotlib")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    names = list(TABLES) if args.only is None else args.only.split(",")
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"--only names {unknown[0]!r}; choose from {', '.join(TABLES)}")
    cells = list[Cell]()
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if (args.folder / f"{name}.csv").exists():
            cells += TABLES[name](args.folder, args.batches)
    if args.plot is not None:
        draw(cells, args.plot)
    if args.json:
        print(json.dumps([asdict(cell) | {"error": cell.error} for cell in cells], indent=1))
        return
    for source in dict.fromkeys(cell.source for cell in cells):
        chosen = [cell for cell in cells if cell.source == source]
        print(f"\n{source}: {summarise(chosen)}")
        for cell in chosen:
            error = f"{100 * cell.error:+.1f} %"
            if cell.unit == "%":
                error = f"{cell.predicted - cell.measured:+.1f} points"
            print(
                f"  {cell.setting:<52}{cell.measured:>9.2f}{cell.predicted:>9.2f} "
                f"{cell.unit:<7}{error:>12}"
            )
    if args.only is None:
        for name in OTHERS:
            path = args.folder / f"{name}.csv"
            count = len(read(name, args.folder)) if path.exists() else 0
            print(f"\n{name}: {count} rows, not predicted (FP8, TPUs or experts are not priced)")


if __name__ == "__main__":
    main()

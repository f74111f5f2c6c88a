"""`calibrate`: everything that a profile says, measured on this machine: divisions and whole calls
of plans, matrix products, copies and links, and the rates fitted to them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Direction
from dyncp.calibrate.calls import (
    DTYPES,
    KernelChoice,
    World,
    forward,
    make_executor,
    make_inputs,
    mask_case,
    one_rank_attention,
)
from dyncp.calibrate.fit import (
    AttentionRates,
    CallSample,
    RowRates,
    WholeCall,
    fit_rates,
    fit_rows,
)
from dyncp.calibrate.links import (
    MeasuredLink,
    Overlap,
    all_gather_rate,
    beside_copies,
    beside_messages,
    measure_links,
)
from dyncp.calibrate.timing import CallTimes, Repeats, add_kernels, time_call, time_calls
from dyncp.cost import CostModel, Profile
from dyncp.plan import Op, Plan
from dyncp.planner import plan_batch
from dyncp.simulate.flow import layer_of_plan
from dyncp.simulate.layer import CallBlocks, call_work, count_row_bytes
from dyncp.topology import Link, Topology

# Tokens of the call that copies run beside: a longer one would outlast them.
MOST_BESIDE_COPIES = 16384
Tell = Callable[[str], None]
# Batches of at least this many tokens are planned for several ranks, with at most so many tokens
# each: kernels have faster paths for whole sequences, which cut ones seldom take. Some of the ranks
# are timed.
CUT_TOKENS, TOKENS_PER_RANK, TIMED_RANKS = 1024, 4096, 4
# Tokens, hidden and MLP size of a matrix product, and bytes of a copy, by kind of device.
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (8192, 4096, 14336)}
COPY_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, slots=True)
class CalibrateSetting:
    """`base` provides what is not measured: links with one rank, NICs, the kernel tile."""

    base: Profile
    name: str
    shape: AttentionShape
    choice: KernelChoice
    masks: tuple[str, ...]
    sizes: tuple[int, ...]
    world: World
    repeats: Repeats = field(default_factory=lambda: Repeats(timed=5, flush=False))


@dataclass(frozen=True, eq=False)
class Calibration:
    """The profile, and what it was made from. Links are None where there are none, `rows` where
    whole calls cannot be fitted: on CPUs, and where they are few."""

    profile: Profile
    rates: AttentionRates
    rows: RowRates | None
    samples: list[CallSample]
    calls: list[WholeCall]
    intra: MeasuredLink | None
    inter: MeasuredLink | None
    all_gather: float | None
    overlaps: list[Overlap]


def calibrate(setting: CalibrateSetting, tell: Tell = lambda _: None) -> Calibration:
    """Measures this rank's device and the links of the world. All ranks call it together; the
    profile to keep is that of rank 0."""
    world, repeats = setting.world, setting.repeats
    cost = CostModel(setting.base, setting.shape)
    samples, calls = sample_attention(setting, cost, tell)
    rates = fit_rates(samples, cost, num_lanes(world.device))
    tell("matrix products and copies ...")
    measured: dict[str, Any] = {
        "dense": dense_rate(world.device, setting.shape.dtype, repeats),
        "copy": copy_rate(world.device, repeats),
    }
    rows = fit_rows(calls) if world.device.type == "cuda" else None
    if rows is not None:
        measured |= _row_fields(rows, setting)
    tell("attention beside copies ...")
    overlaps = _overlaps(setting)
    tell("links ...")
    intra, inter = measure_links(world)
    gathered = all_gather_rate(world) if world.num_ranks > 1 else None
    profile = replace(
        setting.base,
        name=setting.name,
        overlap_slowdown=overlaps[0].slowdown,
        **_kernel_fields(rates),
        **measured,
        **_link_fields(intra, inter, world),
    )
    return Calibration(profile, rates, rows, samples, calls, intra, inter, gathered, overlaps)


def _kernel_fields(rates: AttentionRates) -> dict[str, Any]:
    names = ("call_seconds", "lanes", "edge_forward", "edge_backward")
    fields = {name: getattr(rates, name) for name in (*names, "row_forward", "row_backward")}
    return fields | {"attention_forward": rates.forward, "attention_backward": rates.backward}


def _row_fields(rows: RowRates, setting: CalibrateSetting) -> dict[str, Any]:
    """The host's time per instruction is with graphs if the executor replays graphs here."""
    executor = make_executor(setting.choice, setting.world.device, virtual_ranks=1)
    host = "host_seconds" if executor.engine.graphs.wanted else "host_seconds_eager"
    return {"copy": rows.copy, "launch_seconds": rows.launch_seconds, host: rows.host_seconds}


def _link_fields(
    intra: MeasuredLink | None, inter: MeasuredLink | None, world: World
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if intra is not None:
        fields |= {"intra": intra.link, "ranks_per_node": world.ranks_per_node}
    if inter is not None:
        # All ranks of a node sent at once: a node's bandwidth is that many times one pair's.
        whole = inter.link.bandwidth * world.ranks_per_node
        fields["inter"] = Link(inter.link.latency, whole)
    return fields


def _overlaps(setting: CalibrateSetting) -> list[Overlap]:
    """Real messages first, where there are other ranks."""
    case = mask_case("causal", min(max(setting.sizes), MOST_BESIDE_COPIES))
    device = setting.world.device
    attend = one_rank_attention(case.batch, setting.shape, setting.choice, device)
    run = forward(attend, make_inputs(case.tokens, setting.shape, device))
    beside = beside_copies(run, device, setting.repeats)
    if setting.world.num_ranks == 1:
        return beside
    return [beside_messages(run, setting.world, setting.repeats), *beside]


def sample_attention(
    setting: CalibrateSetting, cost: CostModel, tell: Tell
) -> tuple[list[CallSample], list[WholeCall]]:
    """Times plans of all masks and sizes, forward and backward: single divisions, whole calls."""
    samples, whole = list[CallSample](), list[WholeCall]()
    tools, timed = (cost.shape, setting.choice, setting.world.device), []
    for mask, tokens in product(setting.masks, setting.sizes):
        tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
        batch = mask_case(mask, tokens).batch
        plan = plan_batch(batch, Topology(1, _num_ranks(tokens)), cost.shape, cost=cost)
        parts = plan.parts[:: -(-plan.num_ranks // TIMED_RANKS)]
        calls = {part: time_calls(part, *tools, setting.repeats) for part in parts}
        timed.append((mask, plan, calls))
    tell("attention kernels by themselves ...")
    for mask, plan, calls in timed:
        times = {part.rank: add_kernels(x, part, *tools) for part, x in calls.items()}
        for direction in times[0]:
            own = {rank: measured[direction] for rank, measured in times.items()}
            samples += _division_samples(plan, own, direction, cost, mask)
            whole += _whole_calls(plan, own, direction, cost, mask)
    return samples, whole


def _num_ranks(tokens: int) -> int:
    """16,384 tokens are cut for 4 ranks, 65,536 for 16."""
    return max(TIMED_RANKS, tokens // TOKENS_PER_RANK) if tokens >= CUT_TOKENS else 1


def _division_samples(
    plan: Plan, times: dict[int, CallTimes], direction: Direction, cost: CostModel, mask: str
) -> Iterator[CallSample]:
    """The divisions of the ranks that were timed."""
    for work in plan_work(plan, direction, cost):
        if work.rank in times:
            measured = times[work.rank]
            yield CallSample(
                mask=mask,
                tokens=int(plan.parts[0].tokens_per_rank.sum()),
                direction=direction.name.lower(),
                area=work.area,
                edge=work.edge,
                rows=work.tile_rows,
                longest=work.longest,
                pairs=work.pairs,
                calls=work.calls,
                seconds=float(measured.division_seconds[work.division]),
                host_seconds=measured.host_seconds,
            )


def _whole_calls(
    plan: Plan, times: dict[int, CallTimes], direction: Direction, cost: CostModel, mask: str
) -> Iterator[WholeCall]:
    """The calls of the ranks that were timed."""
    layer, _ = layer_of_plan(plan, DEFAULT_MASK, direction, cost)
    moved, launches = count_row_bytes(layer, CallBlocks.of(layer), cost).per_rank
    for rank, measured in times.items():
        program = plan.parts[rank].mask_plan(DEFAULT_MASK).program(direction)
        groups = len(plan.parts[rank].groups_for(cost.shape))
        kernels = groups * int((program.instructions[:, 0] == Op.COMPUTE).sum())
        yield WholeCall(
            mask=mask,
            tokens=int(plan.parts[0].tokens_per_rank.sum()),
            direction=direction.name.lower(),
            moved_bytes=float(moved[rank]),
            launches=int(launches[rank]) + kernels,
            instructions=len(program.instructions) + 2,
            seconds=measured.seconds,
            kernel_seconds=measured.kernel_seconds,
            host_seconds=measured.host_seconds,
        )


@dataclass(frozen=True, slots=True)
class DivisionWork:
    """One division of one rank in the cost model's terms. `pairs`, `area`, `edge` and `tile_rows`
    count every q head; `rows` and `keys` are those of the blocks that it reads, `longest` the keys
    of the longest rows of kernel tiles, and `calls` its kernel calls."""

    rank: int
    division: int
    pairs: int
    area: float
    edge: float
    tile_rows: float
    longest: float
    tiles: int
    rows: int
    keys: int
    calls: int
    predicted_seconds: float


def plan_work(plan: Plan, direction: Direction, cost: CostModel) -> list[DivisionWork]:
    """All divisions of all ranks that have tiles, by rank and division."""
    layer, _ = layer_of_plan(plan, DEFAULT_MASK, direction, cost)
    tiles, pairs = (
        layer.tiles,
        layer.tiles.pairs * cost.heads_of(layer.groups)[layer.tiles.head_group],
    )
    work = call_work(layer, CallBlocks.of(layer), cost)
    seconds = cost.work_seconds(*work[1:], direction)
    found = []
    for cell in np.unique(layer.cell).tolist():
        chosen, calls = layer.cell == cell, work.cell == cell
        found.append(
            DivisionWork(
                rank=cell // layer.num_divisions,
                division=cell % layer.num_divisions,
                pairs=int(pairs[chosen].sum()),
                area=float(work.area[calls].sum()),
                edge=float(work.edge[calls].sum()),
                tile_rows=float(work.rows[calls].sum()),
                longest=float(work.longest[calls].sum()),
                tiles=int(chosen.sum()),
                rows=int(layer.tokens[np.unique(tiles.q_block[chosen])].sum()),
                keys=int(layer.tokens[np.unique(tiles.k_block[chosen])].sum()),
                calls=int(calls.sum()),
                predicted_seconds=float(seconds[calls].sum() + cost.call_seconds(int(calls.sum()))),
            )
        )
    return found


def rank_pairs(plan: Plan, cost: CostModel) -> Float64:
    """Pairs × q heads that each rank computes."""
    work = plan_work(plan, Direction.FORWARD, cost)
    pairs = np.zeros(plan.num_ranks)
    np.add.at(pairs, [x.rank for x in work], [x.pairs for x in work])
    return pairs


def dense_rate(device: torch.device, dtype: str, repeats: Repeats) -> float:
    """FLOP/s of a linear layer as wide as a decoder's."""
    tokens, hidden, ffn = PRODUCTS[device.type]
    x = torch.randn(tokens, hidden, device=device, dtype=DTYPES[dtype])
    weight = torch.randn(ffn, hidden, device=device, dtype=DTYPES[dtype])
    timed = time_call(lambda: torch.nn.functional.linear(x, weight), device, repeats)
    return 2.0 * tokens * hidden * ffn / timed.seconds


def copy_rate(device: torch.device, repeats: Repeats) -> float:
    """Bytes per second of a copy on the device; read and write count once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = time_call(lambda: target.copy_(source), device, repeats)
    return source.nbytes / timed.seconds


def num_lanes(device: torch.device) -> int:
    """Rows of kernel tiles that run at a time: one per multiprocessor of a GPU; 0 on CPUs, where
    that is not modelled."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

"""Timings that rates are fitted to: divisions and whole calls of plans, matrix products, copies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.calibrate.calls import DTYPES, KernelChoice, mask_case
from dyncp.calibrate.fit import CallSample, WholeCall
from dyncp.calibrate.one_rank import CallTimes, time_part
from dyncp.calibrate.timing import Repeats, time_call
from dyncp.cost import CostModel
from dyncp.cost.cost_model import CallBlocks, CallTiles, call_work
from dyncp.plan import Op, Plan, RankPlan
from dyncp.planner import plan_batch
from dyncp.simulate.flow import row_bytes_of_plan
from dyncp.topology import Topology

# Batches of at least this many tokens are planned for several ranks, with at most so many tokens
# each: kernels have faster paths for whole sequences, which cut ones seldom take. Some of the ranks
# are timed.
CUT_TOKENS, TOKENS_PER_RANK, TIMED_RANKS = 1024, 4096, 4
# Tokens, hidden and MLP size of a matrix product, and bytes of a copy, by kind of device.
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (8192, 4096, 14336)}
COPY_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


def sample_attention(
    masks: Sequence[str],
    sizes: Sequence[int],
    cost: CostModel,
    choice: KernelChoice,
    device: torch.device,
    repeats: Repeats,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[list[CallSample], list[WholeCall]]:
    """Times plans of all masks and sizes, forward and backward: single divisions, whole calls."""
    samples, whole = list[CallSample](), list[WholeCall]()
    for mask in masks:
        for tokens in sizes:
            tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
            batch = mask_case(mask, tokens).batch
            plan = plan_batch(batch, Topology(1, _num_ranks(tokens)), cost.shape, cost=cost)
            every = -(-plan.num_ranks // TIMED_RANKS)
            times = {
                part.rank: time_part(part, cost.shape, choice, device, repeats)
                for part in plan.parts[::every]
            }
            for direction in times[0]:
                own = {rank: measured[direction] for rank, measured in times.items()}
                samples += _division_samples(plan, own, direction, cost, mask)
                whole += _whole_calls(plan, own, direction, cost, mask)
    return samples, whole


def _num_ranks(tokens: int) -> int:
    """16,384 tokens are cut for 4 ranks, 65,536 for 16."""
    return max(TIMED_RANKS, tokens // TOKENS_PER_RANK) if tokens >= CUT_TOKENS else 1


def _num_tokens(plan: Plan) -> int:
    return int(plan.parts[0].tokens_per_rank.sum())


def _division_samples(
    plan: Plan, times: dict[int, CallTimes], direction: Direction, cost: CostModel, mask: str
) -> Iterator[CallSample]:
    """The divisions of the ranks that were timed."""
    for work in plan_work(plan, direction, cost):
        if work.rank in times:
            measured = times[work.rank]
            yield CallSample(
                mask=mask,
                tokens=_num_tokens(plan),
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
    moved = row_bytes_of_plan(plan, DEFAULT_MASK, direction, cost)
    for rank, measured in times.items():
        program = plan.parts[rank].mask_plan(DEFAULT_MASK).program(direction)
        groups = len(plan.parts[rank].groups_for(cost.shape))
        kernels = groups * int((program.instructions[:, 0] == Op.COMPUTE).sum())
        yield WholeCall(
            mask=mask,
            tokens=_num_tokens(plan),
            direction=direction.name.lower(),
            moved_bytes=float(moved.bytes_per_rank[rank]),
            launches=int(moved.launches_per_rank[rank]) + kernels,
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
    return [work for part in plan.parts for work in _rank_work(part, direction, cost)]


def _rank_work(part: RankPlan, direction: Direction, cost: CostModel) -> Iterator[DivisionWork]:
    mask = part.mask_plan(DEFAULT_MASK)
    tiles, division = mask.tiles, mask.program(direction).tile_division
    tokens = part.blocks.tokens.astype(np.int64)
    heads = cost.heads_of(part.groups_for(cost.shape))[tiles.head_group]
    pairs = tiles.pairs.astype(np.int64)
    sides = pairs, tokens[tiles.q_block], tokens[tiles.k_block]
    cell, group, q_block, k_block = (
        x.astype(np.int64) for x in (division, tiles.head_group, tiles.q_block, tiles.k_block)
    )
    called = CallTiles(cell, group, q_block, k_block, *sides, heads)
    calls = call_work(called, CallBlocks.of(called, direction), direction, cost)
    num_divisions = int(division.max(initial=-1)) + 1
    work = calls.by_cell(num_divisions)
    seconds = np.bincount(calls.cell, cost.work_seconds(*calls[1:], direction), num_divisions)
    for number in np.unique(division).tolist():
        own = division == number
        num_calls = len(np.unique(tiles.head_group[own]))
        yield DivisionWork(
            rank=part.rank,
            division=number,
            pairs=int((pairs * heads)[own].sum()),
            area=float(work.area[number]),
            edge=float(work.edge[number]),
            tile_rows=float(work.rows[number]),
            longest=float(work.longest[number]),
            tiles=int(own.sum()),
            rows=int(tokens[np.unique(tiles.q_block[own])].sum()),
            keys=int(tokens[np.unique(tiles.k_block[own])].sum()),
            calls=num_calls,
            predicted_seconds=float(seconds[number] + cost.call_seconds(num_calls)),
        )


def rank_pairs(plan: Plan, cost: CostModel) -> Float64:
    """Pairs × q heads that each rank computes."""
    found = []
    for part in plan.parts:
        tiles = part.mask_plan(DEFAULT_MASK).tiles
        heads = cost.heads_of(part.groups_for(cost.shape))[tiles.head_group]
        found.append(float((tiles.pairs.astype(np.int64) * heads).sum()))
    return np.asarray(found, np.float64)


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

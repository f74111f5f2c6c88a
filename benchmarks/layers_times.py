"""Times single ranks of plans inside a stack of transformer layers, and the same stack with plain
attention on whole documents and without attention.

All times are taken before the first kernel is profiled: profilers slow the host down, some even
after they have ended."""

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_times import rank_pairs
from benchmarks.baselines import WholeDocuments, attend_whole, equal_pairs, plain_attention
from benchmarks.layer_stack import (
    Kernels,
    LayerStack,
    Steady,
    has_profiler,
    pass_queries,
    profile_steady,
    stack_run,
    time_steady,
)
from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch, Direction
from dyncp.calibrate import Repeats
from dyncp.calibrate.calls import DTYPES, Attend, Noise, Run, Unavailable, make_executor
from dyncp.calibrate.diagnosis import first_line
from dyncp.cost import CostModel, ModelConfig
from dyncp.executor import DCPExecutor, attention
from dyncp.plan import Plan, RankPlan
from dyncp.planner import Task, assemble_choice, choose

logger = logging.getLogger(__name__)

OURS, PLAIN, NONE = "dyncp", "plain", "none"
ATTENTIONS = (OURS, PLAIN, NONE)
GRAPHS: dict[str, str | bool] = {"auto": "auto", "on": True, "off": False}

# The first iterations capture graphs and allocate memory, and are not timed.
WARM_UP = 3
# Columns of the summary, and whether more is worse.
SUMMARISED = {
    "wall_seconds": True,
    "busy_share": False,
    "host_share": True,
    "kernels": True,
    "kernel_seconds": True,
    "wall_over_kernels": True,
    "wall_over_plain": True,
}


@dataclass(frozen=True, slots=True, eq=False)
class StackSetting:
    """The stack of layers, and how dyncp's attention runs in it."""

    model: ModelConfig
    layers: int
    shape: AttentionShape
    kernel: str
    device: torch.device
    graphs: str = "auto"

    def __post_init__(self) -> None:
        if self.graphs not in GRAPHS:
            raise ValueError(f"graphs is {self.graphs!r}; choose from {', '.join(GRAPHS)}")

    def executor(self, rank: int, num_ranks: int) -> DCPExecutor:
        """An executor for one rank without its peers, which receives random numbers."""
        transport, graphs = Noise(rank, num_ranks), GRAPHS[self.graphs]
        return make_executor(self.kernel, self.device, transport=transport, graphs=graphs)


@dataclass(frozen=True, eq=False)
class RankCase:
    """One rank of a batch's plan: `pairs` of one head, the `positions` of its rows in their
    sequences, and `why` the rank was chosen."""

    sample: str
    mask: str
    part: RankPlan
    why: str
    pairs: int
    positions: Tensor

    @property
    def rows(self) -> int:
        return self.part.local_rows

    @property
    def documents(self) -> WholeDocuments:
        """The documents for plain attention: as many tokens, and about as many pairs."""
        return equal_pairs(self.rows, self.pairs)


Tell = Callable[[str], None]
Found = TypeVar("Found")
Key = tuple[RankCase, str]


def rank_cases(
    names: tuple[str, str],
    batch: Batch,
    plan: Plan,
    cost: CostModel,
    ranks: tuple[int, ...] | None,
) -> Iterator[RankCase]:
    """The requested `ranks`, or if None typical ones; `names` are the names of sample and mask."""
    pairs = rank_pairs(plan, cost)
    chosen = spread_ranks(plan, pairs) if ranks is None else named_ranks(plan, ranks)
    for rank, why in chosen.items():
        part, of_head = plan.parts[rank], round(pairs[rank] / cost.shape.q_heads)
        yield RankCase(*names, part, why, of_head, positions_of(part, batch))


def positions_of(part: RankPlan, batch: Batch) -> Tensor:
    """The position of every row; 0 for padding."""
    every = np.concatenate([mask.resolved_positions() for mask in batch.masks[DEFAULT_MASK]])
    positions = torch.zeros(part.local_rows, dtype=torch.int64)
    positions[: part.local_tokens] = torch.from_numpy(every[part.local_coordinates])
    return positions


def attend_of(case: RankCase, kind: str, setting: StackSetting) -> Attend:
    """Attention of this kind on the rows of a rank."""
    if kind == NONE:
        return pass_queries
    if kind == PLAIN:
        return attend_whole(case.documents, setting.shape, setting.device)
    executor = setting.executor(case.part.rank, case.part.num_ranks)
    return partial(attention, executor.prepare(case.part))


def num_messages(part: RankPlan) -> int:
    """Messages that a rank sends and receives in one attention layer, forward and backward."""
    mask, count = part.mask_plan(DEFAULT_MASK), 0
    for direction in Direction:
        program = mask.program(direction)
        for messages in (program.sends, program.receives):
            count += len(np.unique(np.stack([messages.phase, messages.peer]), axis=1).T)
    return count


def spread_ranks(plan: Plan, pairs: Float64) -> dict[int, str]:
    """Up to four ranks that differ most, and why each was chosen, given the pairs of all ranks. A
    rank is chosen for one reason only; the next reason takes its next best rank."""
    messages = [num_messages(part) for part in plan.parts]
    tokens = plan.parts[0].tokens_per_rank
    ranks = [rank for rank in range(plan.num_ranks) if tokens[rank]]
    middle = float(np.median(pairs[ranks]))
    orders: dict[str, Callable[[int], float]] = {
        "most pairs": lambda rank: -pairs[rank],
        "fewest pairs": lambda rank: pairs[rank],
        "most messages": lambda rank: -messages[rank],
        "middle": lambda rank: abs(pairs[rank] - middle),
    }
    found: dict[int, str] = {}
    for why, order in orders.items():
        left = [rank for rank in ranks if rank not in found]
        if left:
            found[min(left, key=order)] = why
    return found


def named_ranks(plan: Plan, ranks: Sequence[int]) -> dict[int, str]:
    """The requested ranks, except those without tokens."""
    found = {}
    for rank in ranks:
        if not 0 <= rank < plan.num_ranks:
            raise ValueError(f"rank is {rank}; the plan has ranks 0 to {plan.num_ranks - 1}")
        if plan.parts[rank].local_tokens:
            found[rank] = "requested"
        else:
            logger.warning("rank %d has no tokens in the plan by %s", rank, plan.parts[0].solver)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class LayersSetting:
    """The planning `tasks` by the names of sample and mask, and the stack that ranks run in. If
    `ranks` is None, typical ones are chosen."""

    tasks: Mapping[tuple[str, str], Task]
    stack: StackSetting
    ranks: tuple[int, ...] | None = None
    repeats: Repeats = field(default_factory=lambda: Repeats(10, WARM_UP))


def bench_layers(setting: LayersSetting, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Measures every rank's stack with dyncp's attention, with plain attention and without
    attention, and summarises by sample and mask."""
    cases = _plan_all(setting, tell)
    bench = _Bench(setting, cases, tell)
    steady, reasons = bench.measure("time", time_steady)
    kernels: dict[Key, Kernels] = {}
    if has_profiler(setting.stack.device):
        kernels, failed = bench.measure("kernels", profile_steady, skip=reasons)
        reasons |= failed
    rows = [
        describe_case(
            case,
            setting.stack.device,
            {kind: steady.get((case, kind)) for kind in ATTENTIONS},
            {kind: kernels.get((case, kind)) for kind in ATTENTIONS},
            {kind: reasons.get((case, kind), "") for kind in ATTENTIONS},
        )
        for case in cases
    ]
    return {"rows": rows, "summary": summarise_ranks(rows)}


def _plan_all(setting: LayersSetting, tell: Tell) -> list[RankCase]:
    cases: list[RankCase] = []
    for names, task in setting.tasks.items():
        tell(f"{names[0]}, {names[1]}: planning ...")
        plan = assemble_choice(task, choose(task))
        cases += rank_cases(names, task.batch, plan, task.cost, setting.ranks)
    return cases


class _Bench:
    """Runs all cases in one stack of layers."""

    def __init__(self, setting: LayersSetting, cases: Sequence[RankCase], tell: Tell) -> None:
        self._setting, self._cases, self._tell = setting, cases, tell
        options = setting.stack
        dtype, device = DTYPES[options.shape.dtype], options.device
        self._stack = LayerStack(options.model, options.layers, dtype, device)
        if device.type == "cuda":
            tell("warming up ...")
            options.executor(0, 1).warm_up(options.shape)

    def measure(
        self,
        what: str,
        measure: Callable[[Run, torch.device, Repeats], Found],
        skip: Mapping[Key, str] | None = None,
    ) -> tuple[dict[Key, Found], dict[Key, str]]:
        """The result of `measure` for every rank's stack, or the reason why it failed. Stacks
        without attention are measured once per number of rows."""
        found: dict[Key, Found] = {}
        reasons: dict[Key, str] = {}
        without: dict[int, Found] = {}
        for case in self._cases:
            for kind in ATTENTIONS:
                if skip and (case, kind) in skip:
                    continue
                if kind == NONE and case.rows in without:
                    found[case, kind] = without[case.rows]
                    continue
                self._tell(f"{case.sample}, {case.mask}, rank {case.part.rank}: {kind}, {what} ...")
                try:
                    found[case, kind] = self._measure_one(case, kind, measure)
                except Exception as error:  # other implementations may fail in any way
                    if kind != PLAIN:
                        raise
                    logger.debug("%s failed", kind, exc_info=True)
                    plain = isinstance(error, Unavailable)
                    reasons[case, kind] = str(error) if plain else first_line(error)
            without.setdefault(case.rows, found[case, NONE])
        return found, reasons

    def _measure_one(
        self, case: RankCase, kind: str, measure: Callable[[Run, torch.device, Repeats], Found]
    ) -> Found:
        gc.collect()  # frees the previous case's memory now, not while this case is timed
        options = self._setting.stack
        run = stack_run(self._stack, case.positions, attend_of(case, kind, options))
        return measure(run, options.device, self._setting.repeats)


def describe_case(
    case: RankCase,
    device: torch.device,
    steady: Mapping[str, Steady | None],
    kernels: Mapping[str, Kernels | None],
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """The JSON object of one rank; the three mappings are by kind of attention."""
    plain = steady[PLAIN]
    names = {OURS: OURS, PLAIN: plain_attention(device), NONE: NONE}
    pairs = {OURS: case.pairs, PLAIN: case.documents.pairs, NONE: 0}
    return {
        "sample": case.sample,
        "mask": case.mask,
        "solver": case.part.solver,
        "rank": case.part.rank,
        "why": case.why,
        "tokens": case.rows,
        "messages": num_messages(case.part),
        "plain_documents": str(case.documents),
        "attention": {
            kind: {"implementation": names[kind], "pairs": pairs[kind], "reason": reasons[kind]}
            | describe_stack(steady[kind], kernels[kind], plain)
            for kind in ATTENTIONS
        },
    }


def describe_stack(
    steady: Steady | None, kernels: Kernels | None, plain: Steady | None
) -> dict[str, float | None]:
    """Seconds and shares of one iteration; None if not measured. The busy share is the profiled
    time of kernels over the wall time without the profiler."""
    wall = None if steady is None else steady.seconds
    return {
        "wall_seconds": wall,
        "mean_wall_seconds": None if steady is None else steady.mean_seconds,
        "host_seconds": None if steady is None else steady.host_seconds,
        "host_share": None if steady is None else _over(steady.host_seconds, wall),
        "busy_share": None if kernels is None else _over(kernels.busy_seconds, wall),
        "kernels": None if kernels is None else kernels.count,
        "kernel_seconds": None if kernels is None else kernels.seconds,
        "attention_kernel_seconds": None if kernels is None else kernels.attention_seconds,
        "wall_over_kernels": None if kernels is None else _over(wall, kernels.seconds),
        "wall_over_plain": None if plain is None else _over(wall, plain.seconds),
    }


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def summarise_ranks(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Worst and mean over the ranks of every sample and mask, by kind of attention."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["sample"], row["mask"]), []).append(row)
    return [
        {
            "sample": sample,
            "mask": mask,
            "attention": {
                kind: _worst_and_mean([row["attention"][kind] for row in group])
                for kind in ATTENTIONS
            },
        }
        for (sample, mask), group in groups.items()
    ]


def _worst_and_mean(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float] | None]:
    found: dict[str, dict[str, float] | None] = {}
    for column, more_is_worse in SUMMARISED.items():
        values = [one[column] for one in measured if one[column] is not None]
        worst = max if more_is_worse else min
        mean = float(np.mean(values)) if values else 0.0
        found[column] = {"worst": worst(values), "mean": mean} if values else None
    return found

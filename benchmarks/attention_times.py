"""Times the attention of plans: rank by rank on one device, or on real ranks."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, Batch, Direction
from dyncp.calibrate import Tools
from dyncp.calibrate.calls import Run, make_executor
from dyncp.calibrate.rates import seconds_together
from dyncp.calibrate.timing import CallTimes, add_kernels, plan_work, time_calls
from dyncp.cli.simulate import STATIC_METHODS, best_splits
from dyncp.cost import CostModel
from dyncp.executor import Step
from dyncp.plan import Plan
from dyncp.planner import AUTO, Candidate, Task, choose, plan_batch
from dyncp.simulate import Simulated, simulate_plan
from dyncp.topology import Topology

METHODS = (AUTO, *STATIC_METHODS)
NAMES = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}

Tell = Callable[[str], None]


def check_methods(names: Sequence[str]) -> tuple[str, ...]:
    """The named methods, or all of them if "all" is named."""
    for name in names:
        if name not in (*METHODS, "all"):
            raise ValueError(f"method is {name!r}; choose from {', '.join(METHODS)}, or all")
    return METHODS if "all" in names else tuple(dict.fromkeys(names))


def find_candidates(task: Task, methods: Sequence[str], tell: Tell) -> dict[str, Candidate]:
    """A candidate for each method; static methods use the split with the shortest simulated
    step."""
    found: dict[str, Candidate] = {}
    if AUTO in methods:
        tell(f"planning with {AUTO} ...")
        found[AUTO] = choose(task).candidate
    static = [name for name in methods if name != AUTO]
    splits = best_splits(
        task,
        static,
        lambda candidate: candidate.simulated,
        lambda name: tell(f"planning with {name} ..."),
    )
    found |= {name: candidate for name, (candidate, _) in splits.items()}
    return {name: found[name] for name in methods}


def kernel_name(kernel: str, device: torch.device) -> str:
    """The name of the kernel that runs; for "auto", of the kernel that is chosen here."""
    return make_executor(kernel, device, virtual_ranks=1).kernel.name


def rank_pairs(plan: Plan, cost: CostModel) -> Float64:
    """Pairs × q heads that each rank computes."""
    work = plan_work(plan, Direction.FORWARD, cost)
    pairs = np.zeros(plan.num_ranks)
    np.add.at(pairs, [x.rank for x in work], [x.pairs for x in work])
    return pairs


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSetting:
    """The batch and cluster (`task`), the methods that plan for them, and how calls are timed."""

    task: Task
    methods: tuple[str, ...]
    tools: Tools

    @property
    def cost(self) -> CostModel:
        return self.task.cost

    @property
    def topology(self) -> Topology:
        return self.task.topology

    @property
    def batch(self) -> Batch:
        return self.task.batch


def bench_virtual_ranks(setting: AttentionSetting, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Times the plans of all methods, rank by rank on this device. All calls are timed before any
    is profiled, since profiling slows the host down."""
    tell("one rank with the whole batch ...")
    alone = time_alone(setting)
    candidates = find_candidates(setting.task, setting.methods, tell)
    plans = {name: x.assemble(setting.task.config.layout) for name, x in candidates.items()}
    timed = {}
    for name, plan in plans.items():
        for part in plan.parts:
            tell(f"{name}: rank {part.rank} of {plan.num_ranks} ...")
            timed[name, part.rank] = time_calls(part, setting.tools)
    tell("profiling ...")
    alone = replace(alone, times=add_kernels(alone.times, alone.plan.parts[0], setting.tools))
    found = {}
    for name, plan in plans.items():
        times = [add_kernels(timed[name, part.rank], part, setting.tools) for part in plan.parts]
        found[name] = _describe(plan, times, alone, setting)
    return {"alone": _describe_alone(alone), "methods": found}


@dataclass(frozen=True, eq=False)
class Alone:
    """The whole batch on one rank; `reason` says why it could not be measured, if so."""

    plan: Plan
    pairs: float
    times: dict[Direction, CallTimes]
    reason: str = ""


def time_alone(setting: AttentionSetting) -> Alone:
    """Times the whole batch on one rank with the same kernel; ranks are compared with it."""
    plan = plan_batch(setting.batch, Topology(), setting.cost.shape, cost=setting.cost)
    pairs = float(rank_pairs(plan, setting.cost).sum())
    try:
        times = time_calls(plan.parts[0], setting.tools)
    except torch.OutOfMemoryError as error:
        return Alone(plan, pairs, {}, str(error).splitlines()[0])
    return Alone(plan, pairs, times)


def _describe_alone(alone: Alone) -> dict[str, Any]:
    found: dict[str, Any] = {"pairs": alone.pairs, "reason": alone.reason}
    for direction, times in alone.times.items():
        found[NAMES[direction]] = {
            "call_seconds": times.seconds,
            "kernel_seconds": times.kernel_seconds,
            "other_seconds": times.other_seconds,
            "host_seconds": times.host_seconds,
        }
    return found


def _describe(
    plan: Plan, times: list[dict[Direction, CallTimes]], alone: Alone, setting: AttentionSetting
) -> dict[str, Any]:
    cost, topology = setting.cost, setting.topology
    predicted = simulate_plan(plan, topology, cost)
    directions = list(times[0])
    compute = {(DEFAULT_MASK, d): _by_division([t[d] for t in times]) for d in directions}
    simulated = simulate_plan(plan, topology, cost, compute=compute)
    divisions = {d: _division_rows(plan, setting, d, compute[DEFAULT_MASK, d]) for d in directions}
    pairs = rank_pairs(plan, cost)
    ranks = {
        NAMES[d]: _describe_ranks(
            [t[d] for t in times], _predicted(predicted, d, divisions[d]), alone, pairs, d
        )
        for d in directions
    }
    return {
        "solver": plan.parts[0].solver,
        "predicted": _seconds(predicted),
        "with_measured_kernels": _seconds(simulated),
        "ranks": ranks,
        "summary": {name: _summarise(rows) for name, rows in ranks.items()},
        "divisions": {NAMES[d]: rows for d, rows in divisions.items()},
    }


class Predicted(NamedTuple):
    """Predicted seconds of every rank's attention kernels and whole call, without waiting."""

    kernels: Float64
    calls: Float64


def _predicted(
    simulated: Simulated, direction: Direction, divisions: list[dict[str, Any]]
) -> Predicted:
    run = simulated.attention[DEFAULT_MASK][direction]
    assert run is not None
    calls = run.flow.call_seconds
    rank = np.asarray([row["rank"] for row in divisions], np.int64)
    seconds = np.asarray([row["predicted_seconds"] for row in divisions], np.float64)
    return Predicted(np.bincount(rank, seconds, len(calls)).astype(np.float64), calls)


def _seconds(simulated: Simulated) -> dict[str, float]:
    return {
        "forward_seconds": simulated.forward_seconds,
        "backward_seconds": simulated.backward_seconds,
        "attention_seconds": simulated.forward_seconds + simulated.backward_seconds,
        "exposed_seconds": simulated.exposed_seconds,
    }


def _by_division(times: list[CallTimes]) -> Float64:
    """Kernel seconds, float64[ranks, divisions]."""
    seconds = np.zeros((len(times), max(len(t.division_seconds) for t in times)))
    for row, t in zip(seconds, times, strict=True):
        row[: len(t.division_seconds)] = t.division_seconds
    return seconds


def _describe_ranks(
    times: list[CallTimes],
    predicted: Predicted,
    alone: Alone,
    pairs: Float64,
    direction: Direction,
) -> list[dict[str, Any]]:
    rows = []
    for rank, t in enumerate(times):
        row = {
            "rank": rank,
            "pairs": float(pairs[rank]),
            "call_seconds": t.seconds,
            "host_seconds": t.host_seconds,
            "host_over_call": t.host_seconds / t.seconds,
            "kernel_seconds": t.kernel_seconds,
            "other_seconds": t.other_seconds,
            "predicted_kernel_seconds": float(predicted.kernels[rank]),
            "predicted_call_seconds": float(predicted.calls[rank]),
            "over_alone": None,
            "call_over_alone": None,
        }
        if alone.times and pairs[rank]:
            share, whole = float(pairs[rank]) / alone.pairs, alone.times[direction]
            row["over_alone"] = t.kernel_seconds / (share * whole.kernel_seconds)
            row["call_over_alone"] = t.seconds / (share * whole.seconds)
        rows.append(row)
    return rows


def _summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst and mean over ranks."""
    found: dict[str, Any] = {}
    for column in (
        "call_seconds", "kernel_seconds", "other_seconds", "host_seconds", "host_over_call",
        "predicted_kernel_seconds", "predicted_call_seconds", "over_alone", "call_over_alone",
    ):  # fmt: skip
        values = [row[column] for row in rows if row[column] is not None]
        found[column] = {"worst": max(values), "mean": float(np.mean(values))} if values else None
    found["prediction_error"] = _errors(rows, "kernel_seconds")
    found["call_prediction_error"] = _errors(rows, "call_seconds")
    return found


def _errors(rows: list[dict[str, Any]], column: str) -> dict[str, float]:
    """Predicted / measured − 1: the worst, and the mean of absolute values. Ranks without tiles are
    left out."""
    some = [row for row in rows if row["kernel_seconds"]]
    off = [row[f"predicted_{column}"] / row[column] - 1 for row in some]
    mean = float(np.mean(np.abs(off))) if off else 0.0
    return {"worst": max(off, key=abs, default=0.0), "mean": mean}


def _division_rows(
    plan: Plan, setting: AttentionSetting, direction: Direction, measured: Float64
) -> list[dict[str, Any]]:
    """Work, predicted and measured seconds of every division: what cost models are fitted to."""
    return [
        asdict(work) | {"measured_seconds": float(measured[work.rank, work.division])}
        for work in plan_work(plan, direction, setting.cost)
    ]


def bench_ranks(setting: AttentionSetting, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Times the plans of all methods on real ranks. All ranks call it together."""
    executor = make_executor(setting.tools.kernel, setting.tools.device)
    found = {}
    for name, candidate in find_candidates(setting.task, setting.methods, tell).items():
        tell(f"{name}: {setting.topology.num_ranks} ranks ...")
        plan = candidate.assemble(setting.task.config.layout)
        simulated = simulate_plan(plan, setting.topology, setting.cost)
        measured = time_step(executor.prepare(plan), setting.tools)
        predicted = {
            "forward": simulated.forward_seconds,
            "backward": simulated.backward_seconds,
        }
        found[name] = {
            "solver": plan.parts[0].solver,
            "measured": {k: v | _over(v["seconds"], predicted[k]) for k, v in measured.items()},
            "predicted": predicted,
            "exposed_seconds": simulated.exposed_seconds,
        }
    return {"methods": found}


def _over(measured: float, predicted: float) -> dict[str, float]:
    return {"predicted_over_measured": predicted / measured if measured else 0.0}


def time_step(step: Step, tools: Tools) -> dict[str, dict[str, Any]]:
    """By direction: the median of the slowest rank's seconds, and every rank's own median."""
    return {NAMES[direction]: _together(run, tools) for direction, run in tools.runs(step).items()}


def _together(run: Run, tools: Tools) -> dict[str, Any]:
    """All ranks start at a barrier, and the call ends with the slowest rank."""
    seconds = seconds_together(run, tools.device, tools.repeats)
    mine = torch.tensor(seconds, dtype=torch.float64, device=tools.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    by_rank = torch.stack(every).cpu()
    return {
        "seconds": statistics.median(by_rank.amax(dim=0).tolist()),
        "rank_seconds": by_rank.median(dim=1).values.tolist(),
    }

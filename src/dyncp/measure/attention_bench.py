"""Plans measured rank by rank on one device, and the step that the topology makes of them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dyncp.arrays import Float64
from dyncp.blocks import DEFAULT_MASK, Batch, Direction
from dyncp.cost import CostModel
from dyncp.measure.loads import plan_loads, rank_pairs
from dyncp.measure.method_plans import find_candidates
from dyncp.measure.ours import KernelChoice
from dyncp.measure.rank_times import CallTimes, time_part
from dyncp.measure.timing import Repeats
from dyncp.plan import Plan
from dyncp.planner import Task, plan_batch
from dyncp.simulate import Simulated, simulate_plan
from dyncp.topology import Topology

NAMES = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSetting:
    """Whose plans are measured (`task`), by which methods, with what."""

    task: Task
    methods: tuple[str, ...]
    choice: KernelChoice
    device: torch.device
    repeats: Repeats = field(default_factory=lambda: Repeats(timed=5))

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
    """Every method's plan, all ranks one after the other on this device."""
    tell("one rank with the whole batch ...")
    alone = time_alone(setting)
    found = {}
    for name, candidate in find_candidates(setting.task, setting.methods, tell).items():
        plan = candidate.lower(setting.task.config.layout)
        times = []
        for part in plan.parts:
            tell(f"{name}: rank {part.rank} of {plan.num_ranks} ...")
            times.append(
                time_part(part, setting.cost.shape, setting.choice, setting.device, setting.repeats)
            )
        found[name] = _describe(plan, times, alone, setting)
    return {"alone": _describe_alone(alone), "methods": found}


@dataclass(frozen=True, eq=False)
class Alone:
    """The whole batch on one rank; `reason` says why it could not be measured."""

    pairs: float
    times: dict[Direction, CallTimes]
    reason: str = ""


def time_alone(setting: AttentionSetting) -> Alone:
    """The rate that ranks are held to: a one-rank plan of the same batch on the same kernel."""
    shape = setting.cost.shape
    plan = plan_batch(setting.batch, Topology(), shape, cost=setting.cost)
    pairs = float(rank_pairs(plan, setting.cost).sum())
    try:
        times = time_part(plan.parts[0], shape, setting.choice, setting.device, setting.repeats)
    except torch.OutOfMemoryError as error:
        return Alone(pairs, {}, str(error).splitlines()[0])
    return Alone(pairs, times)


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
    """Seconds of every rank's attention kernels and of its whole call, if it waits for nothing."""

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
    """float64[ranks, divisions]."""
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
    """Predicted over measured − 1: the worst, and the mean of absolute values. Ranks without tiles
    have nothing to predict."""
    some = [row for row in rows if row["kernel_seconds"]]
    off = [row[f"predicted_{column}"] / row[column] - 1 for row in some]
    mean = float(np.mean(np.abs(off))) if off else 0.0
    return {"worst": max(off, key=abs, default=0.0), "mean": mean}


def _division_rows(
    plan: Plan, setting: AttentionSetting, direction: Direction, measured: Float64
) -> list[dict[str, Any]]:
    """Raw rows to fit cost models with."""
    return [
        asdict(load) | {"measured_seconds": float(measured[load.rank, load.division])}
        for load in plan_loads(plan, setting.batch, direction, setting.cost)
    ]

"""Plans measured on real ranks, with what the simulator predicts beside it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dyncp.blocks import Direction
from dyncp.executor import Step, attention
from dyncp.measure.attention_bench import NAMES, AttentionSetting, Tell
from dyncp.measure.implementation import backward, forward
from dyncp.measure.inputs import make_inputs
from dyncp.measure.method_plans import find_candidates
from dyncp.measure.ours import make_executor
from dyncp.measure.timing import Repeats, wait_for
from dyncp.simulate import simulate_plan


def bench_ranks(setting: AttentionSetting, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Every method's plan on the ranks of the world; all ranks call it together."""
    executor = make_executor(setting.choice, setting.device)
    found = {}
    for name, candidate in find_candidates(setting.task, setting.methods, tell).items():
        tell(f"{name}: {setting.topology.num_ranks} ranks ...")
        plan = candidate.lower(setting.task.config.layout)
        simulated = simulate_plan(plan, setting.topology, setting.cost)
        measured = time_step(executor.prepare(plan), setting)
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


def time_step(step: Step, setting: AttentionSetting) -> dict[str, dict[str, Any]]:
    """Median over repeats of the slowest rank's seconds, and every rank's own median, by
    direction."""
    inputs = make_inputs(step.num_rows, setting.cost.shape, setting.device, seed=dist.get_rank())
    run = forward(lambda q, k, v: attention(step, q, k, v), inputs)
    measured = {NAMES[Direction.FORWARD]: _together(run, setting.device, setting.repeats)}
    run_backward = backward(run(), inputs)
    measured[NAMES[Direction.BACKWARD]] = _together(run_backward, setting.device, setting.repeats)
    return measured


def _together(run: Callable[[], Any], device: torch.device, repeats: Repeats) -> dict[str, Any]:
    """All ranks start at a barrier; the call is over when the slowest is."""
    for _ in range(repeats.warm_up):
        run()
    seconds = []
    for _ in range(repeats.timed):
        wait_for(device)
        dist.barrier()
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    mine = torch.tensor(seconds, dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    by_rank = torch.stack(every).cpu()
    return {
        "seconds": statistics.median(by_rank.amax(dim=0).tolist()),
        "rank_seconds": by_rank.median(dim=1).values.tolist(),
    }

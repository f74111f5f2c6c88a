"""Times of single planning stages that the docs quote: pair counts, mask_mods, simulation, checks.

    python -m benchmarks.stages

131,072 tokens, 4 machines × 8 ranks; best of three, on one core.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from benchmarks.cases import TOKENS, Case, make_task
from dyncp import PlannerConfig, masks
from dyncp.masks import count_tile_pairs
from dyncp.plan import encode_part
from dyncp.planner import choose, lower_choice
from dyncp.verify import check_plan

NEEDED: dict[str, dict[str, Any]] = {
    "prefix_lm": {"prefix": 1000},
    "document_packed": {"documents": [1024] * 128},
}


def best(run: Callable[[], object], repeats: int = 3) -> float:
    """Fewest milliseconds."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        run()
        times.append(1e3 * (perf_counter() - start))
    return min(times)


def time_masks() -> None:
    print("count_tile_pairs, blocks of 1,024:")
    for name, function in masks.BUILTIN.items():
        mask = function(TOKENS, **NEEDED.get(name, {}))
        print(f"  {name:<20}{best(lambda mask=mask: count_tile_pairs(mask, 1024)):8.1f} ms")
    took = best(lambda: masks.from_mask_mod(lambda _b, _h, q, k: q >= k, 16_384), 1)
    print(f"from_mask_mod, 16,384 tokens: {took:.0f} ms")


def time_plans() -> None:
    print(f"\n{'simulation, check, largest part':<34}{'tiles':>8}{'ms':>9}{'ms':>9}{'bytes':>9}")
    for sample in ("ldc", "single"):
        batch = Case(sample, "causal").batch()
        for solver in ("rows", "bisection", "zigzag"):
            task = make_task(batch, PlannerConfig(solver))
            choice = choose(task)
            plan, candidate = lower_choice(task, choice), choice.candidate
            simulated = best(lambda task=task, made=candidate: task.simulate(made))
            checked = best(lambda plan=plan, batch=batch: check_plan(plan, batch), 1)
            largest = max(len(encode_part(part)) for part in plan.parts)
            tiles = len(candidate.graph.tiles["default"])
            name = f"{sample} causal, {solver}"
            print(f"{name:<34}{tiles:>8,}{simulated:>9.1f}{checked:>9.0f}{largest:>9,}")


if __name__ == "__main__":
    time_masks()
    time_plans()

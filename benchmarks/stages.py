"""Times of single planning stages that the docs quote: pair counts, mask_mods, simulation, checks.

    python -m benchmarks.stages

131,072 tokens, 4 machines × 8 ranks; best of three, on one core.
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from dyncp import AttentionShape, Batch, PlannerConfig, masks, plan_batch
from dyncp.cost import CostModel, find_profile
from dyncp.masks import count_tile_pairs
from dyncp.placement import find_solver
from dyncp.plan import encode_part
from dyncp.planner import make_candidate
from dyncp.samplers import sample_lengths
from dyncp.simulate import simulate_schedules
from dyncp.topology import preset
from dyncp.verify import check_plan

TOKENS = 131_072
SHAPE = AttentionShape(8, 2, 128)
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
    topology, cost = preset("p4de", 4), CostModel(find_profile("p4de"), SHAPE)
    print(f"\n{'simulation, check, largest part':<34}{'tiles':>8}{'ms':>9}{'ms':>9}{'bytes':>9}")
    for sample in ("ldc", "single"):
        batch = Batch.of([masks.causal(n) for n in sample_lengths(sample, TOKENS)])
        for solver in ("bisection", "zigzag"):
            config = PlannerConfig(solver)
            made = make_candidate(find_solver(solver), batch, topology, SHAPE, config)
            plan = plan_batch(batch, topology, SHAPE, config)
            parts = (made.graph, made.placement, made.schedules)
            simulated = best(lambda parts=parts: simulate_schedules(*parts, topology, cost))
            checked = best(lambda plan=plan, batch=batch: check_plan(plan, batch), 1)
            largest = max(len(encode_part(part)) for part in plan.parts)
            tiles = len(made.graph.tiles["default"])
            name = f"{sample} causal, {solver}"
            print(f"{name:<34}{tiles:>8,}{simulated:>9.1f}{checked:>9.0f}{largest:>9,}")


if __name__ == "__main__":
    time_masks()
    time_plans()

"""Measures what each part of the planner is worth: the step and the planning time without it.

    python -m benchmarks.planner_ablation [--effort quality] [--limits] [--lists ldc,single]
        [--networks p4de,ethernet] [--parts moves,divisions] [--seeds 0]

131,072 tokens, 8 q heads, 2 kv heads, head dim 128, 32 ranks. Every part is removed (or its
constant changed) separately. `mean` and `worst` are simulated steps without it over steps with it;
`longer` counts cases that are more than 0.5 % longer; `bytes` is the ratio of bytes moved
(geometric mean); `time` is the ratio of the CPU time of planning.
"""

import argparse
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import process_time
from typing import Any
from unittest.mock import patch

from benchmarks.cases import COST, LIMITS, SHAPE, Case, geometric_mean, list_cases
from benchmarks.planner_time import NETWORKS
from dyncp import PlannerConfig
from dyncp.blocks import Direction
from dyncp.placement import DEFAULT_TOLERANCES, Limits, minimal_bytes
from dyncp.planner import Choice, Task, choose

LONGER = 1.005
Changes = Mapping[str, Any]  # by file and name: what is set; None: only the first of several


def without_start(name: str) -> Callable[..., Any]:
    choice = importlib.import_module("dyncp.planner.choice")
    all_starts = choice.other_starts
    return lambda task: (start for start in all_starts(task) if start[0].name != name)


def nothing(*_args: Any) -> None:
    return None


def no_bounds(task: Task, _placed: Any) -> dict[Any, float]:
    return dict.fromkeys(task.parts, 0.0)


def whole_sequences(_nodes: Any, sequence: Any, _most: float) -> Any:
    return sequence


def both(value: Any) -> dict[str, Any]:
    """The same change for both efforts."""
    return {"fast": value, "quality": value}


PARTS: dict[str, Changes] = {
    "moves": {"planner.search.Search.try_improved": nothing},
    "moves from static": {"planner.search.Search.try_improved_static": nothing},
    "moves of low power": {"placement.improve_by_time.SWEEPS": ((8, 0), (32, 3))},
    "other starts": {"planner.search.other_starts": lambda _: ()},
    "start owner_computes": {"planner.search.other_starts": without_start("owner_computes")},
    "start bisection": {"planner.search.other_starts": without_start("bisection")},
    "start fine": {"planner.search.other_starts": without_start("owner_computes_fine")},
    "start uncut": {"planner.search.other_starts": without_start("uncut")},
    "start bisection_quality": {
        "planner.search.other_starts": without_start("bisection_quality"),
    },
    "loose tolerances": {"planner.choice.LOOSE": DEFAULT_TOLERANCES},
    "tighter tolerances": {"planner.choice.TIGHTER": (1.0,)},
    "divisions": {"planner.search.OTHER_DIVISIONS": both(())},
    "static methods": {"planner.search.Search.try_static": nothing},
    "bounds of placements": {"planner.search.part_seconds": no_bounds},
    "near ideal": {
        "planner.search.NEAR_IDEAL": 0.0,
        "planner.search.NEAR_IDEAL_WITH_MODEL": 0.0,
    },
    "little exposed": {"planner.search.LITTLE_EXPOSED": 0.0},
    "node share 0.4": {"placement.owner_computes.NODE_SHARE": 0.4},
    "node share 0.8": {"placement.owner_computes.NODE_SHARE": 0.8},
    "inside 0.05": {"placement.owner_computes.INSIDE": 0.05},
    "pieces of one size": {"placement.owner_computes.PIECES": (1.0,)},
    "peeling": {"placement.owner_computes.PEELED": 0},
    "levelled 1": {"placement.owner_computes.LEVELLED": 1},
    "levelling nodes": {"placement.owner_computes.NODE_MOVES": 0},
    "levelling ranks": {"placement.owner_computes.RANK_MOVES": 0},
    "cut from the end": {"placement.owner_computes._from_the_end": whole_sequences},
    "cut evenly": {"placement.owner_computes._evenly": whole_sequences},
    "cut in zigzag": {"placement.owner_computes._zigzag": whole_sequences},
    "dealing": {"placement.owner_computes._crossed": lambda users: [False] * users.shape[1]},
    "bands": {"placement.owner_computes._crossed": lambda users: [True] * users.shape[1]},
    "heavy rows": {"placement.problem.HEAVY": math.inf},
    "strategies": {"placement.bisection.STRATEGIES": None},
    "folding": {"placement.bisection.UNUSUAL": math.inf},
    "refined 1": {"placement.bisection.REFINED": 1, "placement.bisection.REFINED_FOR_QUALITY": 2},
    "drawn strategies": {"placement.bisection.RANDOM_STRATEGIES": 0},
    "annealing": {"placement.bisection.anneal_best": lambda best, _rng: best},
    "local passes": {"placement.refine.MAX_PASSES": 0},
}


@contextmanager
def changed(changes: Changes) -> Iterator[None]:
    with ExitStack() as stack:
        for path, value in changes.items():
            package, module, *names = path.split(".")
            owner = importlib.import_module(f"dyncp.{package}.{module}")
            for name in names[:-1]:
                owner = getattr(owner, name)
            first = getattr(owner, names[-1])[:1] if value is None else value
            stack.enter_context(patch.object(owner, names[-1], first))
        yield


def moved_bytes(choice: Choice) -> int:
    found = choice.candidate
    return sum(
        minimal_bytes(found.graph, found.placement, name, direction)
        for name in found.graph.tiles
        for direction in Direction
    )


def plan(case: Case, network: str, config: PlannerConfig) -> tuple[float, int, float]:
    """Seconds of the step, bytes moved, and CPU seconds of planning."""
    task = Task.of(case.batch(), NETWORKS[network], SHAPE, config, COST)
    start = process_time()
    choice = choose(task)
    spent = process_time() - start
    return choice.simulated.step_seconds, moved_bytes(choice), spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--effort", default="fast")
    parser.add_argument("--objective", default="time")
    parser.add_argument("--limits", action="store_true", help="compute 0.1 and tokens 0.2")
    parser.add_argument("--lists", default="ldc,longalign,single")
    parser.add_argument("--networks", default="p4de,pcie,ethernet")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", default="0")
    args = parser.parse_args()
    limits = LIMITS if args.limits or args.objective == "bytes" else Limits()
    config = PlannerConfig(effort=args.effort, objective=args.objective, limits=limits)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    cases = [
        (case, network)
        for network in args.networks.split(",")
        for case in list_cases(seeds, args.lists.split(","))
    ]
    for case, network in cases:  # compiles
        plan(case, network, config)
    nominal = [plan(case, network, config) for case, network in cases]
    print(f"{len(cases)} cases, effort {args.effort}, by {args.objective}")
    print(f"{'without':<26}{'mean':>8}{'worst':>8}{'longer':>8}{'bytes':>8}{'time':>8}")
    for part in args.parts.split(","):
        with changed(PARTS[part.strip()]):
            found = [plan(case, network, config) for case, network in cases]
        steps = [a[0] / b[0] for a, b in zip(found, nominal, strict=True)]
        moved = [(1 + a[1]) / (1 + b[1]) for a, b in zip(found, nominal, strict=True)]
        longer, at = sum(step > LONGER for step in steps), steps.index(max(steps))
        spent = sum(a[2] for a in found) / sum(b[2] for b in nominal)
        print(
            f"{part:<26}{geometric_mean(steps):>8.3f}{max(steps):>8.3f}{longer:>8}"
            f"{geometric_mean(moved):>8.3f}{spent:>8.2f}  {cases[at][0]} {cases[at][1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()

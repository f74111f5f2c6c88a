"""Simulated step times: the planner's choice beside every static method and the ideal.

    python -m benchmarks.planner_time [--model llama3_8b] [--seeds 0,1] [--lists ldc,single]

p4de, 4 machines × 8 ranks, 131,072 tokens, 8 q heads, 2 kv heads, head dim 128, bf16. `ideal` has
no communication and no imbalance. Static methods have every DP × CP split; `paper` is the best of
ring, zigzag, loongtrain and transformer_engine over all 32 ranks, `split` the best of them with
every split. The last columns are planned within compute 1.10 and tokens 1.20 of the mean: `static`
is the best static method that keeps these limits too, and `over` the best that does not. Ratios
above 1 say how much slower others are.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import (
    FIXED,
    LIMITS,
    LISTS,
    Case,
    Static,
    fastest,
    geometric_mean,
    list_cases,
    make_task,
    paper_baselines,
    run_statics,
)
from dyncp import PlannerConfig
from dyncp.cost import ModelConfig, find_model
from dyncp.placement import Balance
from dyncp.planner import choose

SPARSE = ("lambda", "blockwise", "shared")


@dataclass(frozen=True, eq=False)
class Result:
    """One case: seconds of our step, with and without limits, and all static methods."""

    case: Case
    ideal: float
    ours: float
    solver: str
    balance: Balance
    limited: float
    missed: float
    statics: list[Static]

    @property
    def static(self) -> Static:
        return fastest(self.statics)

    def ratio(self, others: Sequence[Static]) -> float:
        return fastest(others).seconds / self.ours

    @property
    def paper(self) -> float:
        return self.ratio(paper_baselines(self.statics, 32))

    @property
    def split(self) -> float:
        return self.ratio(paper_baselines(self.statics))

    def limited_ratio(self, *, in_limits: bool) -> float | None:
        """The best static method that keeps (or misses) the limits, over ours that keeps them."""
        others = [s for s in self.statics if s.in_limits is in_limits]
        return fastest(others).seconds / self.limited if others else None


def run_case(case: Case, model: ModelConfig | None) -> Result:
    batch = case.batch()
    task = make_task(batch, model=model)
    choice = choose(task)
    limited = choose(make_task(batch, PlannerConfig(limits=LIMITS), model=model))
    return Result(
        case,
        choice.simulated.ideal_seconds,
        choice.simulated.step_seconds,
        choice.candidate.placement.solver,
        choice.candidate.balance,
        limited.simulated.step_seconds,
        limited.candidate.balance.missed,
        list(run_statics(task)),
    )


HEADER = (
    f"{'list, mask, seed':<24}{'ideal':>9}{'ours ms':>9}{'/ideal':>7}  {'solver':<27}"
    f"{'best static':<27}{'ratio':>6}{'paper':>7}{'split':>6} |{'limits ms':>10}"
    f"{'static':>7}{'over':>6}"
)


def draw_row(result: Result) -> str:
    ours, static = result.ours, result.static
    within, over = (result.limited_ratio(in_limits=kept) for kept in (True, False))
    name = str(result.case).removesuffix(" 0") if result.case.sample in FIXED else str(result.case)
    return (
        f"{name:<24}{1e3 * result.ideal:>9.2f}{1e3 * ours:>9.2f}{ours / result.ideal:>7.2f}  "
        f"{result.solver:<27}{static.name:<27}{static.seconds / ours:>6.2f}{result.paper:>7.2f}"
        f"{result.split:>6.2f} |{1e3 * result.limited:>9.2f}{'!' if result.missed else ' '}"
        f"{_number(within):>7}{_number(over):>6}"
    )


def _number(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def summarise(results: Sequence[Result]) -> None:
    ratios = [r.ratio(r.statics) for r in results]
    above = [r.ours / r.ideal for r in results]
    worst = results[ratios.index(min(ratios))].case
    print(f"ours / ideal: geometric mean {geometric_mean(above):.2f}, worst {max(above):.2f}")
    print(
        f"best static / ours: geometric mean {geometric_mean(ratios):.3f}, worst {min(ratios):.4f} "
        f"({worst}); faster in {sum(r > 1 + 1e-9 for r in ratios)} of {len(results)}, equal in "
        f"{sum(abs(r - 1) <= 1e-9 for r in ratios)}, slower in {sum(r < 1 - 1e-9 for r in ratios)}"
    )
    print(
        f"max/mean without limits: compute at most "
        f"{max(r.balance.compute_max_over_mean for r in results):.2f}, tokens at most "
        f"{max(r.balance.tokens_max_over_mean for r in results):.2f}"
    )
    _summarise_limits(results)
    _summarise_paper(results)


def _summarise_limits(results: Sequence[Result]) -> None:
    within = [x for r in results if (x := r.limited_ratio(in_limits=True)) is not None]
    over = [x for r in results if (x := r.limited_ratio(in_limits=False)) is not None]
    print(
        f"with limits: kept in {sum(not r.missed for r in results)} of {len(results)}; best static "
        f"that keeps them / ours: geometric mean {geometric_mean(within):.3f}, worst "
        f"{min(within):.4f}; in {sum(x < 1 for x in over)} cases a static method that misses them "
        f"is faster (at most {1 / min(over):.2f}×)"
    )


def _summarise_paper(results: Sequence[Result]) -> None:
    """Against the paper's baselines, which the bars of 3× and 5× are for."""
    for name, own in (
        ("causal, long-tailed × 0.5", [r for r in results if str(r.case).startswith("ldc_x0.5 c")]),
        ("causal", [r for r in results if r.case.mask == "causal"]),
        ("sparse", [r for r in results if r.case.mask in SPARSE]),
    ):
        if not own:
            continue
        paper, split = [r.paper for r in own], [r.split for r in own]
        print(
            f"paper's baselines / ours, {name}: over all ranks {min(paper):.2f} to {max(paper):.2f}"
            f" (geometric mean {geometric_mean(paper):.2f}), with their best split "
            f"{min(split):.2f} to {max(split):.2f} ({geometric_mean(split):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="adds the per-token work, as in llama3_8b")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--lists", default=",".join(LISTS))
    args = parser.parse_args()
    model = None if args.model is None else find_model(args.model)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    print(f"simulated step, {args.model or 'attention alone, one layer'}\n{HEADER}")
    results = []
    for case in list_cases(seeds, args.lists.split(",")):
        results.append(run_case(case, model))
        print(draw_row(results[-1]), flush=True)
    print()
    summarise(results)


if __name__ == "__main__":
    main()

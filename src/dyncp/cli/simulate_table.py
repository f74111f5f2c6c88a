"""The table of `dyncp simulate`: one line per method."""

from collections.abc import Iterator, Mapping
from typing import Any

from dyncp.cli.simulate_methods import OURS

MOST_SPLITS = 3


def draw_table(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'':<24}{'step ms':^18}{'× ideal':>9}{'forward MB':^18}{'compute':^14}{'tokens':^14}"
        f"{'workspace':>11}"
    )
    yield (
        f"{'':<24}{'mean':>9}{'worst':>9}{'mean':>9}{'mean':>9}{'(inter)':>9}"
        f"{'mean':>8}{'worst':>6}{'mean':>8}{'worst':>6}{'MB':>11}  split (batches)"
    )
    for name, numbers in summary["methods"].items():
        yield _row(name, numbers)
    wins, count = summary["wins"], summary["num_batches"]
    yield ""
    yield (
        f"dyncp against the best static method of each batch: faster in {wins['faster']}, as fast "
        f"in {wins['equal']}, slower in {wins['slower']} of {count}"
    )


def _row(name: str, numbers: Mapping[str, Any]) -> str:
    step, compute = numbers["step_seconds"], numbers["compute_max_over_mean"]
    tokens = numbers["tokens_max_over_mean"]
    return (
        f"{name:<24}{1e3 * step['mean']:>9.2f}{1e3 * step['worst']:>9.2f}"
        f"{numbers['ratio_to_ideal']:>9.3f}{numbers['forward_bytes'] / 1e6:>9.1f}"
        f"{numbers['inter_machine_bytes'] / 1e6:>9.1f}"
        f"{compute['mean']:>8.2f}{compute['worst']:>6.2f}{tokens['mean']:>8.2f}"
        f"{tokens['worst']:>6.2f}{numbers['peak_workspace_bytes'] / 1e6:>11.1f}  "
        f"{_splits(name, numbers['solvers'])}"
    )


def _splits(name: str, solvers: Mapping[str, int]) -> str:
    """Degrees of static methods, and for ours the solvers themselves, the most frequent first."""
    named = [
        f"{solver if name == OURS else solver.partition('/')[2] or 'fair share'} ({count})"
        for solver, count in solvers.items()
    ]
    more = len(named) - MOST_SPLITS
    return ", ".join(named[:MOST_SPLITS]) + (f" and {more} more" if more > 0 else "")

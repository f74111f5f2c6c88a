"""How long `prepare` takes on the host, for one rank of a plan and for a plan of one rank.

    python -m benchmarks.prepare [--kernel cpu] [--repeats 5]

Times are medians in milliseconds, by sample and mask: contributions and kernel calls, the kernel's
own lowering, and messages for one attention shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.cases import MASKS, SHAPE, TOKENS, Case, cluster
from dyncp import DCPExecutor, Plan, PlannerConfig, plan_batch
from dyncp.executor.kernel_calls import CallBuilder, lower_program
from dyncp.executor.layout import lay_out
from dyncp.executor.step import dtypes_of
from dyncp.kernels import IndexArrays, Kernel, TorchRowOps
from dyncp.plan import Direction, MaskPlan, Program, RankPlan
from dyncp.topology import Topology
from dyncp.transport import Null


class NoKernel(Kernel):
    """Lowers nothing: what is left is the executor's own time."""

    name = "none"

    def lower(self, call: object, arrays: IndexArrays, *, backward: bool) -> None:
        pass

    def attend(self, *_: object) -> None:
        pass

    attend_backward = attend


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def build_calls(part: RankPlan, mask: MaskPlan, program: Program) -> None:
    builder = CallBuilder(part, mask, program)
    for division in sorted(set(program.tile_division.tolist())):
        builder.calls(division)


def measure(plan: Plan, kernel: str, repeats: int) -> list[float]:
    part = max(plan.parts, key=lambda part: len(part.masks["default"].tiles))
    mask, arrays = part.masks["default"], IndexArrays(torch.device("cpu"))
    programs = [mask.program(direction) for direction in Direction]
    lowered = [lower_program(part, mask, d, NoKernel(), arrays) for d in Direction]

    def prepare(chosen: object) -> None:
        transport = Null(part.rank, part.num_ranks)
        DCPExecutor(kernel=chosen, transport=transport).prepare(part)

    return [
        milliseconds(lambda: [build_calls(part, mask, p) for p in programs], repeats),
        milliseconds(
            lambda: [
                lay_out(
                    p,
                    SHAPE,
                    dtypes_of(SHAPE),
                    NoKernel(),
                    TorchRowOps(),
                    IndexArrays(torch.device("cpu")),
                )
                for p in lowered
            ],
            repeats,
        ),
        milliseconds(lambda: prepare(NoKernel()), repeats),
        milliseconds(lambda: prepare(kernel), repeats),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{TOKENS:,} tokens; milliseconds, forward and backward together")
    print(f"{'batch':<22}{'ranks':>6}{'calls':>9}{'messages':>10}{'prepare':>9}{given.kernel:>9}")
    for sample in ("ldc", "single"):
        for mask in MASKS:
            batch = Case(sample, mask).batch()
            for topology in (cluster(), Topology()):
                plan = plan_batch(batch, topology, SHAPE, PlannerConfig("rows"))
                times = measure(plan, given.kernel, given.repeats)
                print(
                    f"{sample + ' ' + mask:<22}{plan.num_ranks:>6}{times[0]:>9.1f}{times[1]:>10.1f}"
                    f"{times[2]:>9.1f}{times[3]:>9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

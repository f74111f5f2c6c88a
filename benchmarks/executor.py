"""The executor on CPUs: one rank's attention beside torch's SDPA, and how long `prepare` takes.

    python -m benchmarks.executor attention [--repeats 5]
    python -m benchmarks.executor prepare [--kernel cpu] [--repeats 5]

`attention`: one rank with the `cpu` kernel against scaled_dot_product_attention, which is called
once per document, causal, with its own autograd. Both run forward and backward from [tokens, heads,
dim] tensors. Times are medians, interleaved.

`prepare`: for one rank of a plan and for a plan of one rank. Times are medians in milliseconds, by
sample and mask: contributions and kernel calls, the kernel's own lowering, and messages for one
attention shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import MASKS, SHAPE, TOKENS, Case, cluster
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    Plan,
    PlannerConfig,
    Topology,
    masks,
    plan_batch,
)
from dyncp.executor.kernel_calls import CallBuilder, lower_program
from dyncp.executor.layout import lay_out
from dyncp.executor.step import dtypes_of
from dyncp.kernels import IndexArrays, Kernel, TorchRowOps
from dyncp.plan import Direction, MaskPlan, Program, RankPlan
from dyncp.transport import Null

CPU_SHAPE = AttentionShape(8, 2, 64, "fp32")
# Long-tailed: the first is the largest of a batch of Python source files, the last are snippets.
LENGTHS = {
    "long-tailed": [4096, 1800, 900, 500, 300, 200, 150, 120, 90, 36],
    "one document": [8192],
    "short documents": [256] * 32,
}


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


def sdpa_per_document(q: Tensor, kv: Tensor, lengths: list[int]) -> Tensor:
    outs = []
    for part_q, part_kv in zip(q.split(lengths), kv.split(lengths), strict=True):
        k, v = part_kv.unbind(1)
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (part_q, k, v))
        out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def seconds(run: Callable[[Tensor, Tensor], Tensor], q: Tensor, kv: Tensor) -> tuple[float, float]:
    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    start = time.perf_counter()
    out = run(q, kv)
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    return middle - start, time.perf_counter() - middle


def compare(lengths: list[int], dtype: torch.dtype, repeats: int) -> list[float]:
    """Median seconds: SDPA forward and backward, DCPAttn forward and backward."""
    torch.manual_seed(0)
    q = torch.randn(sum(lengths), CPU_SHAPE.q_heads, CPU_SHAPE.head_dim, dtype=dtype)
    kv = torch.randn(sum(lengths), 2, CPU_SHAPE.kv_heads, CPU_SHAPE.head_dim, dtype=dtype)
    plan = plan_batch(Batch.of([masks.causal(n) for n in lengths]), Topology())
    step = DCPExecutor(kernel="cpu").prepare(plan)
    order = plan.parts[0].local_coordinates
    assert (order == range(sum(lengths))).all(), "one rank keeps the batch's order"
    runs = (
        lambda q, kv: sdpa_per_document(q, kv, lengths),
        lambda q, kv: DCPAttn.apply(step, q, kv),
    )
    error = (runs[0](q, kv) - runs[1](q, kv)).abs().max().item()
    assert error < (1e-4 if dtype == torch.float32 else 0.05), f"results differ by {error}"
    times: list[list[float]] = [[], [], [], []]
    for repeat in range(repeats + 1):
        for i, run in enumerate(runs):
            for j, value in enumerate(seconds(run, q, kv)):
                if repeat:  # the first round warms up
                    times[2 * i + j].append(value)
    return [statistics.median(values) for values in times]


def run_attention(given: argparse.Namespace) -> None:
    print(
        f"{CPU_SHAPE.q_heads} q heads, {CPU_SHAPE.kv_heads} kv heads, "
        f"head dim {CPU_SHAPE.head_dim}, {torch.get_num_threads()} threads; "
        "milliseconds, ratio to torch SDPA per document"
    )
    print(
        f"{'batch':<18}{'dtype':<7}{'SDPA fwd':>9}{'bwd':>8}"
        f"{'DCPAttn fwd':>13}{'bwd':>8}{'ratio':>8}"
    )
    for name, lengths in LENGTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            base_f, base_b, ours_f, ours_b = compare(lengths, dtype, given.repeats)
            ratio = (ours_f + ours_b) / (base_f + base_b)
            label = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
            print(
                f"{name:<18}{label:<7}{base_f * 1e3:>9.1f}{base_b * 1e3:>8.1f}"
                f"{ours_f * 1e3:>13.1f}{ours_b * 1e3:>8.1f}{ratio:>8.2f}"
            )


def run_prepare(given: argparse.Namespace) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = parser.add_subparsers(required=True)
    for name, run in (("attention", run_attention), ("prepare", run_prepare)):
        table = tables.add_parser(name)
        table.add_argument("--repeats", type=int, default=5)
        table.set_defaults(run=run)
    table.add_argument("--kernel", default="cpu")
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()

"""Times the executor on CPUs: one rank's attention compared with torch's SDPA, and `prepare`.

    python -m benchmarks.executor attention [--repeats 5]
    python -m benchmarks.executor prepare [--repeats 5] [--kernel cpu]

`attention`: one rank with the `cpu` kernel, compared with causal scaled_dot_product_attention,
called once per document. Both run forward and backward on tensors [tokens, heads, dim]. The two are
timed alternately; times are medians.

`prepare`: of 32 ranks the one with the most tiles, and a plan of one rank; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.baselines import WholeDocuments, attend_whole
from benchmarks.cases import MASKS, SHAPE, TOKENS, Case, cluster
from dyncp import AttentionShape, Batch, DCPExecutor, Topology, masks, plan_batch
from dyncp.calibrate.calls import (
    Attend,
    Inputs,
    make_inputs,
    one_rank_attention,
    relative_errors,
    results_of,
)
from dyncp.transport import Null

CPU = torch.device("cpu")
# Largest allowed relative difference between the two implementations.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.05}
# Long-tailed lengths: from the largest of a batch of Python source files to short snippets.
LENGTHS = {
    "long-tailed": (4096, 1800, 900, 500, 300, 200, 150, 120, 90, 36),
    "one document": (8192,),
    "short documents": (256,) * 32,
}


def seconds(attend: Attend, inputs: Inputs) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    start = time.perf_counter()
    out = attend(*inputs.qkv)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs.qkv, inputs.dout)
    return middle - start, time.perf_counter() - middle


def compare(lengths: tuple[int, ...], shape: AttentionShape, repeats: int) -> list[float]:
    """Median seconds: SDPA forward and backward, ours forward and backward."""
    inputs = make_inputs(sum(lengths), shape, CPU)
    batch = Batch.of([masks.causal(n) for n in lengths])
    both = (
        attend_whole(WholeDocuments(lengths), shape, CPU),
        one_rank_attention(batch, shape, "cpu", CPU),
    )
    theirs, ours = (results_of(attend, inputs) for attend in both)  # also warms up
    errors = relative_errors(ours, theirs)
    assert max(errors.values()) < TOLERANCES[shape.dtype], f"results differ by {errors}"
    rounds = [[s for attend in both for s in seconds(attend, inputs)] for _ in range(repeats)]
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def run_attention(args: argparse.Namespace) -> None:
    shapes = [AttentionShape(8, 2, 64, dtype) for dtype in TOLERANCES]
    print(
        f"{shapes[0].q_heads} q heads, {shapes[0].kv_heads} kv heads, head dim "
        f"{shapes[0].head_dim}, {torch.get_num_threads()} threads; milliseconds, ratio to torch "
        "SDPA per document"
    )
    print(
        f"{'batch':<18}{'dtype':<7}{'SDPA fwd':>9}{'bwd':>8}{'dyncp fwd':>13}{'bwd':>8}{'ratio':>8}"
    )
    for name, lengths in LENGTHS.items():
        for shape in shapes:
            times = compare(lengths, shape, args.repeats)
            cells = "".join(f"{1e3 * s:>{w}.1f}" for s, w in zip(times, (9, 8, 13, 8), strict=True))
            print(f"{name:<18}{shape.dtype:<7}{cells}{sum(times[2:]) / sum(times[:2]):>8.2f}")


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def run_prepare(args: argparse.Namespace) -> None:
    print(f"{TOKENS:,} tokens, kernel {args.kernel}; milliseconds, forward and backward together")
    print(f"{'batch':<22}{'ranks':>6}{'prepare':>9}")
    for sample in ("ldc", "single"):
        for mask in MASKS:
            batch = Case(sample, mask).batch()
            for topology in (cluster(), Topology()):
                plan = plan_batch(batch, topology, SHAPE)
                part = max(plan.parts, key=lambda part: len(part.masks["default"].tiles))
                executor = DCPExecutor(
                    kernel=args.kernel, transport=Null(part.rank, part.num_ranks)
                )
                took = milliseconds(lambda e=executor, p=part: e.prepare(p), args.repeats)
                print(f"{sample + ' ' + mask:<22}{plan.num_ranks:>6}{took:>9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tables = parser.add_subparsers(required=True)
    for name, run in (("attention", run_attention), ("prepare", run_prepare)):
        table = tables.add_parser(name)
        table.add_argument("--repeats", type=int, default=5)
        table.set_defaults(run=run)
    table.add_argument("--kernel", default="cpu")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

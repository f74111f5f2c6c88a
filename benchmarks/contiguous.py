"""Measures what contiguous rows cost: bytes, imbalance and time of whole documents and of halos.

    python -m benchmarks.contiguous [--ranks 8,32] [--halo 3]

Long-tailed batches of 131,072 causal tokens, planned for nodes of 8 ranks. A row is one hidden
state of 4096 in bf16; bytes are what all ranks send in one forward pass, to contiguous order and
back, next to the bytes of one attention layer of Llama-3-8B (32 q heads, 8 kv heads of 128).
Imbalance is the largest number of rows of a rank over the mean. Every rank computes the order from
its plan, once per batch and kind.
"""

import argparse
from time import perf_counter

import torch

from benchmarks.cases import TOKENS, cluster
from dyncp import AttentionShape, Batch, DCPExecutor, masks, plan_batch
from dyncp.executor.row_moves import Contiguous
from dyncp.plan import Direction, whole_documents, with_halo
from dyncp.samplers import sample_lengths

SHAPE = AttentionShape(32, 8, 128, "bf16")
ROW = 4096 * 2
SAMPLES = ("ldc", "ldc_x4", "longalign", "uniform", "single")


def seconds_of_one_rank(plan, halo: int | None) -> float:
    """Seconds to compute the order and both moves of rank 0."""
    part, started = plan.parts[0], perf_counter()
    order = whole_documents(part) if halo is None else with_halo(part, halo)
    engine = DCPExecutor(virtual_ranks=plan.num_ranks).engine
    rows = Contiguous(("there", "back"), order, (part,), engine)
    for direction in Direction:
        rows.sent_bytes(1, direction)
        rows.sent_bytes(1, direction, back=True)
    return perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,32")
    parser.add_argument("--halo", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("batch", "ranks", "attention MB", "order", "MB there", "MB back", "imbalance", "ms")
    print(("{:10} {:>5} {:>12}  {:9} {:>8} {:>8} {:>9} {:>5}").format(*columns))
    for sample in SAMPLES:
        for ranks in map(int, options.ranks.split(",")):
            batch = Batch.of([masks.causal(n) for n in sample_lengths(sample, TOKENS, 0)])
            plan = plan_batch(batch, cluster(ranks // 8), SHAPE)
            step = DCPExecutor(virtual_ranks=ranks).prepare(plan)
            attention = plan.total_bytes("default", Direction.FORWARD, SHAPE) / 1e6
            for name, rows, halo in (
                ("documents", step.contiguous, None),
                ("halo", step.halo(options.halo), options.halo),
            ):
                there, back = (rows.sent_bytes(ROW, back=x) / 1e6 for x in (False, True))
                took = 1000 * seconds_of_one_rank(plan, halo)
                print(
                    f"{sample:10} {ranks:5} {attention:12.1f}  {name:9} {there:8.1f} {back:8.1f} "
                    f"{rows.imbalance:9.2f} {took:5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

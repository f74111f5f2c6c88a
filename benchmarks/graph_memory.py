"""What the driver takes for the CUDA graphs of prepared plans, on one GPU.

    python -m benchmarks.graph_memory [--plans 40] [--kernel triton]

Plans are small and stay alive; each is run three times, so that it is captured and replayed.
Prints how many graphs there are and the bytes of each, which are in neither torch's memory nor the
executor's.
"""

import argparse
import gc

import torch

from dyncp import AttentionShape, DCPAttn, DCPExecutor, Step
from dyncp.executor.graphs import Segment
from dyncp.plan import causal_rows, sample_plan

SHAPE = AttentionShape(4, 2, 64, "bf16")
RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=40)
    parser.add_argument("--kernel", default="triton")
    args = parser.parse_args()
    counted = count_captures()
    executor = DCPExecutor(virtual_ranks=RANKS, device="cuda", kernel=args.kernel, graphs=True)
    steps = [run(executor, 0)]
    free, before = free_bytes(), len(counted)
    steps += [run(executor, number % 3) for number in range(1, args.plans)]
    taken, graphs = free - free_bytes(), len(counted) - before
    print(f"{len(steps)} plans: {graphs} graphs, {taken / graphs / 1e3:.0f} kB each")


def count_captures() -> list[int]:
    """Grows by one with every graph that is captured."""
    counted: list[int] = []
    capture = Segment._capture

    def counting(self: Segment, frame: object) -> object:
        counted.append(1)
        return capture(self, frame)

    Segment._capture = counting  # type: ignore[method-assign, assignment]
    return counted


def run(executor: DCPExecutor, number: int) -> Step:
    step = executor.prepare(sample_plan([causal_rows(1024 + 8 * number)], RANKS, SHAPE, 256))
    q, kv = (
        torch.randn(step.num_rows, *size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in ((4, 64), (2, 2, 64))
    )
    for _ in range(3):
        DCPAttn.apply(step, q, kv).sum().backward()
    return step


def free_bytes() -> int:
    """Free memory of the device, and what torch holds."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0]) + int(torch.cuda.memory_reserved())


if __name__ == "__main__":
    main()

"""Measures memory and compilations of the executor on one GPU.

    python -m benchmarks.gpu_memory batches [--batches 50] [--tokens 32768] [--ranks 8]
    python -m benchmarks.gpu_memory graphs [--plans 40] [--kernel triton]

`batches` runs many different batches. The executor is warmed up, and its memory reserved for 32
similar batches. Prints for every kernel: the seconds of warming up; the workspaces reserved and
needed; the number of compiled kernels and the reserved memory (total and for workspaces) after the
third batch and after the last; and the workspace of a call, measured and as predicted by
`plan.memory()`.

`graphs` measures the driver's memory for the CUDA graphs of prepared plans. Plans are small and
stay alive; each runs three times, so that it is captured and replayed. Prints the number of graphs
and the bytes of each; neither torch nor the executor counts this memory.
"""

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    Plan,
    Step,
    Topology,
    masks,
    plan_batch,
)
from dyncp.executor.graphs import Segment
from dyncp.kernels.choose import why_not
from dyncp.plan import causal, sample_plan
from dyncp.samplers import sample_lengths

SHAPE = AttentionShape(32, 8, 128, "bf16")
KERNELS = (("flash4", False), ("flash4", True), ("triton", True))
SAMPLES, FIRST_SAMPLE = 32, 1000  # seeds of the batches that memory is reserved for
MASKS = (masks.causal, masks.lambda_shaped, masks.shared_question, masks.causal_blockwise)
SMALL = AttentionShape(4, 2, 64, "bf16")  # for the plans whose graphs are counted
RANKS = 4


def make_plan(seed: int, tokens: int, ranks: int) -> Plan:
    lengths = sample_lengths("ldc", tokens, seed)
    mask = MASKS[seed % len(MASKS)]
    return plan_batch(Batch.of([mask(length) for length in lengths]), Topology(1, ranks), SHAPE)


def run_kernel(kernel: str, deterministic: bool, plans: list[Plan], sampled: list[Plan]) -> None:
    name = kernel if kernel == "triton" else f"{kernel}, deterministic={deterministic}"
    executor = DCPExecutor(
        virtual_ranks=plans[0].num_ranks, device="cuda", kernel=kernel, deterministic=deterministic
    )
    before = time.perf_counter()
    executor.warm_up(SHAPE)
    seconds, kernels = time.perf_counter() - before, len(compiled_kernels())
    print(f"{name}: warmed up in {seconds:.1f} s, {kernels} compiled kernels")
    style = executor.engine.style
    needed = [
        max(m.forward.sum(), m.backward.sum()) for m in (p.memory(None, style) for p in plans)
    ]
    print(f"{name}: workspaces reserved {executor.reserve(sampled) / 1e9:.2f} GB; needed "
          f"{max(needed[:3]) / 1e9:.2f} GB by the first 3 batches, {max(needed) / 1e9:.2f} GB by "
          f"all {len(plans)}")  # fmt: skip
    seen = []
    for number, plan in enumerate(plans):
        step = executor.prepare(plan)
        q, kv, dout = draw(step.num_rows)
        out = DCPAttn.apply(step, q, kv)
        grads = torch.autograd.grad(out, (q, kv), dout)
        torch.cuda.synchronize()
        if number == 0:
            declared = step.memory()
            print(f"{name}: workspace of the first batch, backward: "
                  f"{executor.engine.arena().used / 1e6:,.1f} MB, predicted "
                  f"{declared.backward.sum() / 1e6:,.1f} MB")  # fmt: skip
        del out, grads
        seen.append(State.now(executor))
    third, last = seen[min(2, len(seen) - 1)], seen[-1]
    print(f"{name}: after 3 batches {third}")
    print(f"{name}: after {len(plans)} batches {last}")
    for kernel_name in sorted(last.kernels - third.kernels):
        print(f"  new: {kernel_name[:300]}")
    del executor, step, q, kv, dout
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class State:
    kernels: set[str]
    workspaces: int
    reserved: int

    @staticmethod
    def now(executor: DCPExecutor) -> "State":
        workspaces = executor.engine.arena().capacity
        return State(compiled_kernels(), workspaces, torch.cuda.memory_reserved())

    def __str__(self) -> str:
        return (f"{len(self.kernels)} compiled kernels; {self.reserved / 1e9:.3f} GB reserved, "
                f"{self.workspaces / 1e9:.3f} GB of them for workspaces")  # fmt: skip


def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads, dim = SHAPE.q_heads, SHAPE.kv_heads, SHAPE.head_dim
    q, kv, dout = (
        torch.randn(rows, *shape, device="cuda").bfloat16()
        for shape in ((heads, dim), (2, kv_heads, dim), (heads, dim))
    )
    return q.requires_grad_(), kv.requires_grad_(), dout


def compiled_kernels() -> set[str]:
    """The kernels compiled in this process: variants of Triton's and flash-attn-4's."""
    from dyncp.kernels import triton_attention as attending
    from dyncp.kernels import triton_row_kernels as rows

    functions = [
        attending.attend_tiles, attending.attend_backward_queries, attending.attend_backward_keys,
        rows.copy_chunk, rows.combine_chunk, rows.row_sums_of_chunk,
    ]  # fmt: skip
    try:
        from dyncp.kernels import flash4_compiled as compiled
    except ImportError:
        return variants(functions)
    found = variants(functions)
    of_flash = {"forward": compiled._forward, "backward": compiled._backward}
    return found | {f"flash4 {name} {key}" for name, cache in of_flash.items() for key in cache}


def variants(functions: list[Any]) -> set[str]:
    return {
        f"{function.__name__} {function.do_not_specialize_on_alignment} {key}"
        for function in functions
        for cache in function.device_caches.values()
        for key in cache[0]
    }


def count_captures() -> list[int]:
    """A list that grows by one entry with every captured graph."""
    counted: list[int] = []
    capture = Segment._capture

    def counting(self: Segment, frame: object) -> object:
        counted.append(1)
        return capture(self, frame)

    Segment._capture = counting  # type: ignore[method-assign, assignment]
    return counted


def run_three_times(executor: DCPExecutor, number: int) -> Step:
    step = executor.prepare(sample_plan([causal(1024 + 8 * number)], RANKS, SMALL, 256))
    q, kv = (
        torch.randn(step.num_rows, *size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for size in ((4, 64), (2, 2, 64))
    )
    for _ in range(3):
        DCPAttn.apply(step, q, kv).sum().backward()
    return step


def free_bytes() -> int:
    """Free memory of the device plus the memory that torch holds."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0]) + int(torch.cuda.memory_reserved())


def run_batches(args: argparse.Namespace) -> None:
    plans = [make_plan(seed, args.tokens, args.ranks) for seed in range(args.batches)]
    samples = range(FIRST_SAMPLE, FIRST_SAMPLE + SAMPLES)
    sampled = [make_plan(seed, args.tokens, args.ranks) for seed in samples]
    print(f"{args.batches} batches of {args.tokens:,} tokens on {args.ranks} virtual ranks")
    for kernel, deterministic in KERNELS:
        missing = why_not(kernel, torch.device("cuda"))
        if missing:
            print(f"{kernel}: {missing}")
        else:
            run_kernel(kernel, deterministic, plans, sampled)


def run_graphs(args: argparse.Namespace) -> None:
    counted = count_captures()
    executor = DCPExecutor(virtual_ranks=RANKS, device="cuda", kernel=args.kernel, graphs=True)
    steps = [run_three_times(executor, 0)]
    free, before = free_bytes(), len(counted)
    steps += [run_three_times(executor, number % 3) for number in range(1, args.plans)]
    taken, graphs = free - free_bytes(), len(counted) - before
    print(f"{len(steps)} plans: {graphs} graphs, {taken / graphs / 1e3:.0f} kB each")


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    tables = parser.add_subparsers(required=True)
    batches = tables.add_parser("batches")
    batches.add_argument("--batches", type=int, default=50)
    batches.add_argument("--tokens", type=int, default=32768)
    batches.add_argument("--ranks", type=int, default=8)
    batches.set_defaults(run=run_batches)
    graphs = tables.add_parser("graphs")
    graphs.add_argument("--plans", type=int, default=40)
    graphs.add_argument("--kernel", default="triton")
    graphs.set_defaults(run=run_graphs)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

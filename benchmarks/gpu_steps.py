"""Many different batches in a row on one GPU: compilations, reserved memory, and memory of a call.

    python -m benchmarks.gpu_steps [--batches 50] [--tokens 32768] [--ranks 8]

Prints, per kernel, how many kernels were compiled and how much memory was reserved after the third
batch and after the last, and the workspace of a call beside what `plan.memory()` predicted.
"""

import argparse
import gc

import torch

from dyncp import AttentionShape, Batch, DCPAttn, DCPExecutor, Plan, Topology, masks, plan_batch
from dyncp.kernels.choose import why_not
from dyncp.samplers import sample_lengths

SHAPE = AttentionShape(32, 8, 128, "bf16")
KERNELS = (("flash4", False), ("flash4", True), ("triton", True))
MASKS = (masks.causal, masks.lambda_shaped, masks.shared_question, masks.causal_blockwise)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    plans = [make_plan(seed, args.tokens, args.ranks) for seed in range(args.batches)]
    print(f"{args.batches} batches of {args.tokens:,} tokens on {args.ranks} virtual ranks")
    for kernel, deterministic in KERNELS:
        missing = why_not(kernel, torch.device("cuda"))
        if missing:
            print(f"{kernel}: {missing}")
        else:
            run(kernel, deterministic, plans)


def make_plan(seed: int, tokens: int, ranks: int) -> Plan:
    lengths = sample_lengths("ldc", tokens, seed)
    mask = MASKS[seed % len(MASKS)]
    return plan_batch(Batch.of([mask(length) for length in lengths]), Topology(1, ranks), SHAPE)


def run(kernel: str, deterministic: bool, plans: list[Plan]) -> None:
    name = kernel if kernel == "triton" else f"{kernel}, deterministic={deterministic}"
    executor = DCPExecutor(
        virtual_ranks=plans[0].num_ranks, device="cuda", kernel=kernel, deterministic=deterministic
    )
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
                  f"{step.engine.arena().used / 1e6:,.1f} MB, predicted "
                  f"{declared.backward.sum() / 1e6:,.1f} MB")  # fmt: skip
        del out, grads
        seen.append((compiled_kernels(), torch.cuda.memory_reserved()))
    (third, reserved), (last, reserved_last) = seen[min(2, len(seen) - 1)], seen[-1]
    print(f"{name}: {len(third)} compiled kernels after 3 batches, {len(last)} after {len(plans)}; "
          f"reserved {reserved / 1e9:.2f} GB, {reserved_last / 1e9:.2f} GB")  # fmt: skip
    for kernel_name in sorted(last - third):
        print(f"  new: {kernel_name[:300]}")
    del executor, step, q, kv, dout
    gc.collect()
    torch.cuda.empty_cache()


def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, kv_heads, dim = SHAPE.q_heads, SHAPE.kv_heads, SHAPE.head_dim
    q, kv, dout = (
        torch.randn(rows, *shape, device="cuda").bfloat16()
        for shape in ((heads, dim), (2, kv_heads, dim), (heads, dim))
    )
    return q.requires_grad_(), kv.requires_grad_(), dout


def compiled_kernels() -> set[str]:
    """Kernels that exist in this process: Triton's variants and flash-attn-4's."""
    from dyncp.kernels.triton import backward, forward, rows

    functions = [
        forward.attend_tiles, backward.attend_backward_queries, backward.attend_backward_keys,
        rows._copy_rows, rows._merge_rows, rows._row_sums,
    ]  # fmt: skip
    found = {
        f"{function.__name__} {key}"
        for function in functions
        for cache in function.device_caches.values()
        for key in cache[0]
    }
    try:
        from dyncp.kernels.flash4 import compiled
    except ImportError:
        return found
    of_flash = {"forward": compiled._forward, "backward": compiled._backward}
    return found | {f"flash4 {name} {key}" for name, cache in of_flash.items() for key in cache}


if __name__ == "__main__":
    main()

"""DCPAttn on one rank with the `cpu` kernel against torch's own SDPA, on the same batch.

    python -m benchmarks.single_rank [--repeats 5]

The baseline calls scaled_dot_product_attention once per document, causal, with its own autograd.
Both run forward and backward from [tokens, heads, dim] tensors. Times are medians, interleaved.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dyncp import AttentionShape, Batch, DCPAttn, DCPExecutor, Topology, masks, plan_batch

SHAPE = AttentionShape(8, 2, 64, "fp32")
# Long-tailed: the first is the largest of a batch of Python source files, the last are snippets.
LENGTHS = {
    "long-tailed": [4096, 1800, 900, 500, 300, 200, 150, 120, 90, 36],
    "one document": [8192],
    "short documents": [256] * 32,
}


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
    q = torch.randn(sum(lengths), SHAPE.q_heads, SHAPE.head_dim, dtype=dtype)
    kv = torch.randn(sum(lengths), 2, SHAPE.kv_heads, SHAPE.head_dim, dtype=dtype)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(
        f"{SHAPE.q_heads} q heads, {SHAPE.kv_heads} kv heads, head dim {SHAPE.head_dim}, "
        f"{torch.get_num_threads()} threads; milliseconds, ratio to torch SDPA per document"
    )
    print(
        f"{'batch':<18}{'dtype':<7}{'SDPA fwd':>9}{'bwd':>8}"
        f"{'DCPAttn fwd':>13}{'bwd':>8}{'ratio':>8}"
    )
    for name, lengths in LENGTHS.items():
        for dtype in (torch.float32, torch.bfloat16):
            base_f, base_b, ours_f, ours_b = compare(lengths, dtype, repeats)
            ratio = (ours_f + ours_b) / (base_f + base_b)
            label = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
            print(
                f"{name:<18}{label:<7}{base_f * 1e3:>9.1f}{base_b * 1e3:>8.1f}"
                f"{ours_f * 1e3:>13.1f}{ours_b * 1e3:>8.1f}{ratio:>8.2f}"
            )


if __name__ == "__main__":
    main()

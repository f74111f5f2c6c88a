"""Compares dyncp with other implementations of context parallelism on 4 CPU processes (gloo).

    python -m benchmarks.peers
    python -m benchmarks.peers --ranks 2 --kv-heads 2

All run one attention layer in fp32, forward and backward, on the same batch. Every method must give
the outputs and gradients of dense attention in fp64. Prints the bytes that a rank wrote to its
sockets (mean and largest, from /proc/self/io), the (query, key) pairs that ranks computed (largest
over mean, and over what the masks need), and the largest difference.

torch all-gather   torch.distributed.tensor.experimental's context parallelism, head-tail balanced,
                   rotating by all-gather. Its public entry, context_parallel, has no CPU kernels;
                   its ring is called with torch's CPU kernel instead. It has no masks of documents:
                   it runs these one by one, each padded to a multiple of 2 * ranks
torch all-to-all   the same, rotating by all-to-all (a ring)
yunchang Ulysses   yunchang's all-to-all over heads; attention inside is torch's, with a dense mask
ring-flash-attn    needs flash-attn, which is for GPUs

If there are fewer kv heads than ranks (Ulysses) or q heads (torch), they are repeated first, as
users of these libraries do. Methods that are not installed, or cannot run a case, are listed with
the reason. Install peers outside dyncp's environment: pip install --no-deps --target DIR yunchang
ring-flash-attn, and run with PYTHONPATH=DIR.
"""

import argparse
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dyncp import Batch, DCPExecutor, PlannerConfig, Topology, attention, masks, plan_batch

HEADS, DIM, TOLERANCE = 8, 32, 1e-5
BATCHES = {
    "one document of 2,048 tokens": [2048],
    "8 documents, 2,048 tokens": [900, 410, 250, 180, 120, 90, 60, 38],
}
TIMEOUT = timedelta(seconds=120)


class Inputs(NamedTuple):
    """Tensors [tokens, heads, dim] of all documents; the loss is (out * weight).sum()."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    lengths: list[int]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.weight


class Part(NamedTuple):
    """Results of a method on this rank: `rows` are tokens of the batch, values are [rows, ...]."""

    rows: Tensor
    values: list[Tensor]  # out, dq, dk, dv
    sent: int
    pairs: float  # of query and key, times heads


def inputs_of(lengths: list[int], kv_heads: int) -> Inputs:
    torch.manual_seed(0)
    tokens = sum(lengths)
    q, weight = torch.randn(2, tokens, HEADS, DIM)
    k, v = torch.randn(2, tokens, kv_heads, DIM)
    return Inputs(q, k, v, weight, lengths)


def dense(data: Inputs) -> list[Tensor]:
    """Outputs and gradients in fp64, document by document."""
    leaves = [x.double().requires_grad_() for x in data.tensors[:3]]
    parts = zip(*(x.split(data.lengths) for x in leaves), strict=True)
    out = torch.cat([_sdpa(*part, is_causal=True) for part in parts])
    gradients = torch.autograd.grad((out * data.weight.double()).sum(), leaves)
    return [out.detach(), *gradients]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA on tensors [tokens, heads, dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)[0].transpose(0, 1)


def written() -> int:
    """Bytes that this process has written, including to sockets."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split("wchar:")[1].split()[0])


def run_layer(leaves: list[Tensor], weight: Tensor, layer: Callable[..., Tensor]) -> Any:
    """Outputs, gradients and bytes of one layer, forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    dist.barrier()
    before = written()
    out = layer(*leaves)
    (out * weight).sum().backward()
    sent = written() - before
    return [out.detach(), *(x.grad for x in leaves)], sent


def with_dyncp(data: Inputs) -> Part:
    batch = Batch.of([masks.causal(n) for n in data.lengths], range(len(data.lengths)))
    ranks = dist.get_world_size()
    plan = plan_batch(batch, Topology(1, ranks), planner=PlannerConfig(block_size=64))
    part = plan.parts[dist.get_rank()]
    with DCPExecutor(timeout=60) as executor:
        step = executor.prepare(part)
        q, k, v, weight = (step.shard(x) for x in data.tensors)
        run_layer([q, k, v], weight, lambda *x: attention(step, *x))  # the first call connects
        values, sent = run_layer([q, k, v], weight, lambda *x: attention(step, *x))
    tiles = part.masks["default"].tiles
    pairs = float(tiles.pairs.sum()) * HEADS / len(part.head_groups)
    return Part(torch.from_numpy(part.row_coordinates), values, sent, pairs)


class TorchRing(torch.autograd.Function):
    """torch's templated ring attention with torch's CPU kernel; [1, heads, tokens, dim]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse, *_ = _attention._templated_ring_attention(
            dist.group.WORLD, 2, kernel, q, k, v, is_causal=True, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, out, lse = ctx.saved_tensors
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, gradients[0].contiguous(), "grad_out",
            q, k, v, out, lse, is_causal=True, dropout_p=0.0,
        )  # fmt: skip


def _torch_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out: Tensor = TorchRing.apply(q, k, v)
    return out


def with_torch(data: Inputs, rotate: str) -> Part:
    """Runs the ring document by document, since it has no document masks."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention.set_rotate_method(rotate)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows, values, sent, pairs, start = [], [], 0, 0.0, 0
    for length in data.lengths:
        padded = -(-length // (2 * ranks)) * 2 * ranks
        chunks = torch.arange(padded).chunk(2 * ranks)
        own = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
        parts = [
            pad(x[start : start + length], (0, 0, 0, 0, 0, padded - length))[own]
            for x in data.tensors
        ]
        *leaves, weight = (x.transpose(0, 1)[None].contiguous() for x in parts)
        if not rows:  # the first call connects
            run_layer(leaves, weight, _torch_layer)
        found, bytes_of_document = run_layer(leaves, weight, _torch_layer)
        real = own < length
        rows.append(own[real] + start)
        values.append([x[0].transpose(0, 1)[real] for x in found])
        sent += bytes_of_document
        pairs += float((own + 1).sum()) * HEADS
        start += length
    return Part(torch.cat(rows), [torch.cat(x) for x in zip(*values, strict=True)], sent, pairs)


def with_ulysses(data: Inputs) -> Part:
    from yunchang.comm.all_to_all import SeqAllToAll4D

    ranks, rank = dist.get_world_size(), dist.get_rank()
    repeated = ranks // gcd(data.k.shape[1], ranks)
    tokens = sum(data.lengths)
    padded = -(-tokens // ranks) * ranks
    own = torch.arange(padded).chunk(ranks)[rank]
    lengths = [*data.lengths, padded - tokens] if padded > tokens else data.lengths
    allowed = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = dist.group.WORLD
        k, v = (x.repeat_interleave(repeated, dim=1) for x in (k, v))
        whole = [SeqAllToAll4D.apply(group, x[None], 2, 1)[0] for x in (q, k, v)]
        out = _sdpa(*whole, attn_mask=allowed)
        result: Tensor = SeqAllToAll4D.apply(group, out[None].contiguous(), 1, 2)[0]
        return result

    *leaves, weight = (pad(x, (0, 0, 0, 0, 0, padded - tokens))[own] for x in data.tensors)
    run_layer(leaves, weight, layer)
    values, sent = run_layer(leaves, weight, layer)
    real = own < tokens
    pairs = float(sum(n * (n + 1) // 2 for n in lengths)) * HEADS / ranks
    return Part(own[real], [x[real] for x in values], sent, pairs)


def with_ring_flash_attn(_: Inputs) -> Part:
    import ring_flash_attn

    raise RuntimeError(f"ring_flash_attn {ring_flash_attn.__file__} is for GPUs")


METHODS: dict[str, Callable[[Inputs], Part]] = {
    "dyncp": with_dyncp,
    "torch all-gather": lambda data: with_torch(data, "allgather"),
    "torch all-to-all": lambda data: with_torch(data, "alltoall"),
    "yunchang Ulysses": with_ulysses,
    "ring-flash-attn": with_ring_flash_attn,
}


def row_of(name: str, data: Inputs, wanted: list[Tensor]) -> tuple[str, bool]:
    """A line of the table; the same on all ranks."""
    try:
        own: Any = METHODS[name](data)
    except Exception as error:  # shown in the table; all ranks fail in the same way
        own = f"{type(error).__name__}: {error}".splitlines()[0]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    refused = [x for x in parts if isinstance(x, str)]
    if refused:
        return f"  {name:18} does not run: {refused[0]}", name != "dyncp"
    found = [torch.zeros_like(x) for x in wanted]
    times = torch.zeros(len(wanted[0]))
    for part in parts:
        real = part.rows >= 0
        times[part.rows[real]] += 1
        for whole, value in zip(found, part.values, strict=True):
            whole[part.rows[real]] = value[real].double()
    difference = max(
        ((got - right).abs().max() / right.abs().max()).item()
        for got, right in zip(found, wanted, strict=True)
    )
    sent = [part.sent / 1e6 for part in parts]
    pairs = [part.pairs for part in parts]
    needed = sum(n * (n + 1) // 2 for n in data.lengths) * HEADS
    good = difference < TOLERANCE and bool((times == 1).all())
    line = (
        f"  {name:18} {sum(sent) / len(sent):8.2f} {max(sent):8.2f} "
        f"{max(pairs) * len(pairs) / sum(pairs):8.3f} {sum(pairs) / needed:8.3f} "
        f"{difference:10.1e} {'' if good else 'WRONG'}"
    )
    return line, good


def rank_main(rank: int, ranks: int, port: int, kv_heads: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, TIMEOUT, rank=rank, world_size=ranks)
    wrong = 0
    for title, lengths in BATCHES.items():
        data = inputs_of(lengths, kv_heads)
        wanted = dense(data)
        if rank == 0:
            print(f"{title}, {HEADS} q heads, {kv_heads} kv heads, {ranks} ranks")
            print(
                f"  {'':18} {'MB sent':>8} {'largest':>8} {'pairs':>8} {'pairs':>8}\n"
                f"  {'':18} {'by rank':>8} {'':8} {'max/mean':>8} {'/ needed':>8} {'error':>10}"
            )
        for name in METHODS:
            line, good = row_of(name, data, wanted)
            wrong += not good
            if rank == 0:
                print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        sys.exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=HEADS)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (options.ranks, port, options.kv_heads), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())

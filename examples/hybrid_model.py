"""A hybrid model: attention, a short convolution and gated linear attention in every layer.

    python examples/hybrid_model.py                              one process
    torchrun --nproc-per-node 4 examples/hybrid_model.py         the same numbers on 4 ranks

The convolution looks 3 tokens back: `step.add_halo` prepends these to this rank's pieces of
documents. The linear attention has a state: `step.to_contiguous` brings whole documents together.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.functional import conv1d, logsigmoid, pad, rms_norm, silu

import dyncp
from dyncp import Batch, Topology, attention, masks

STEPS, VOCAB, WIDTH, HEADS, KERNEL = 4, 64, 32, 4, 4
LENGTHS = (400, 90, 130, 40, 25, 160)


class ShortConv(nn.Module):
    """A causal depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, KERNEL) * 0.3)

    def forward(self, x: Tensor, step) -> Tensor:
        pieces = step.add_halo(x, KERNEL - 1).split(step.halo(KERNEL - 1).lengths)
        mixed = [self.convolve(piece) for piece in pieces] or [x]  # a rank may have none
        return step.drop_halo(torch.cat(mixed), KERNEL - 1)

    def convolve(self, piece: Tensor) -> Tensor:
        return conv1d(pad(piece.T, (KERNEL - 1, 0)), self.weight, groups=WIDTH).T


class LinearAttention(nn.Module):
    """A state per document that decays by a gate: o = q S, S = gate S + k v."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH + 1)

    def forward(self, x: Tensor, step) -> Tensor:
        documents = step.to_contiguous(self.inputs(x)).split(step.contiguous.lengths)
        mixed = [self.scan(document) for document in documents] or [x[:0]]
        return step.from_contiguous(torch.cat(mixed))

    def scan(self, document: Tensor) -> Tensor:
        q, k, v, gate = document.split([WIDTH, WIDTH, WIDTH, 1], dim=1)
        decay = logsigmoid(gate[:, 0] + 2).cumsum(0)  # of t since the beginning
        weight = (decay[:, None] - decay[None]).tril().exp().tril()
        return (q @ k.T * weight / WIDTH) @ v


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = ShortConv(), LinearAttention()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step) -> Tensor:
        x = x + silu(self.conv(rms_norm(x, (WIDTH,)), step))
        x = x + self.linear(rms_norm(x, (WIDTH,)), step)
        q, k, v = self.qkv(rms_norm(x, (WIDTH,))).unflatten(1, (3, HEADS, -1)).unbind(1)
        return x + self.out(attention(step, q, k, v).flatten(1))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor, step) -> Tensor:
        x = self.embed(tokens[0])
        for block in self.blocks:
            x = block(x, step)
        return (x @ self.embed.weight.T)[None]


def samples() -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(VOCAB, (n,), generator=generator)} for n in LENGTHS]


def main() -> None:
    torch.manual_seed(0)
    model, executor = Hybrid(), dyncp.DCPExecutor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = Batch.of([masks.causal(n) for n in LENGTHS])
    topology, config = Topology(1, executor.num_ranks), dyncp.PlannerConfig(block_size=64)
    step = executor.prepare(dyncp.plan_batch(batch, topology, planner=config))
    data = dyncp.make_local_data(samples(), batch, step.plan)
    for number in range(STEPS):
        loss = dyncp.next_token_loss(model(data["input_ids"], step), data)
        optimizer.zero_grad()
        loss.backward()
        dyncp.sum_gradients(model)
        optimizer.step()
        total = dyncp.sum_over_ranks(loss.detach())
        if dist.get_rank() == 0:
            print(f"step {number}: loss {total:.6f}, imbalance {step.contiguous.imbalance:.2f}")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        address = f"tcp://127.0.0.1:{get_free_port()}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    main()
    dist.destroy_process_group()

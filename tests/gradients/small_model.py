"""A small model with planned attention, its batches, and one training loop for all wrappers."""

from itertools import chain, repeat

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from dyncp import AttentionShape, PlannerConfig, attention, masks, next_token_loss, sum_gradients
from loaders import make_loader

HEADS, DIM = 2, 8
SHAPE = AttentionShape(HEADS, HEADS, DIM, torch.float64)
SAMPLES = [
    {"input_ids": torch.arange(length) * 7 % 50} for length in (40, 9, 25, 33, 14, 50, 21, 30)
]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, 16)

    def forward(self, x, step):
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, HEADS, DIM)).unbind(1)
        return x + self.out(attention(step, q, k, v).flatten(1))


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.logits = nn.Linear(16, 50)
        self.double()

    def forward(self, data, step):
        x = self.tokens(data["input_ids"][0])
        for layer in self.layers:
            x = layer(x, step)
        return self.logits(x)


def train(executor, model, *, group=None, reduce=sum_gradients, clip=1e9, accumulation=1, **more):
    """Trains `steps=3` steps with gradients reduced by `reduce(model, group)`; returns their norms.
    `times(loss)` changes losses; `set_sync(model, last)` is called before every backward; the
    loader plans optimiser steps of `planned` batches; `skip(number)` says which steps are not made;
    `scaler` is a GradScaler; `optimizer(model)` makes the optimiser."""
    make = more.get("optimizer", lambda model: SGD(model.parameters(), lr=more.get("rate", 0.1)))
    optimizer, norms, done = make(model), [], 0
    scaler = more.get("scaler", torch.amp.GradScaler("cpu", enabled=False))
    options = {"virtual_ranks": executor.num_ranks} if len(executor.transport.ranks) > 1 else {}
    loader = make_loader(
        SAMPLES, masks.causal, model=SHAPE, tokens_per_batch=60, num_planners=0, group=group,
        accumulation_steps=more.get("planned", accumulation), drop_last=True,
        planner=PlannerConfig(block_size=8), **options,
    )  # fmt: skip
    with loader:
        for data, plan in chain.from_iterable(repeat(loader)):
            done += 1
            more.get("set_sync", lambda *_: None)(model, done % accumulation == 0)
            loss = next_token_loss(model(data, executor.prepare(plan)), data)
            scaler.scale(more.get("times", Tensor.clone)(loss)).backward()
            if done % accumulation == 0:
                reduce(model, group)
                scaler.unscale_(optimizer)
                norm = clip_grad_norm_(model.parameters(), clip)
                norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
                if not more.get("skip", lambda _: False)(len(norms)):
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if len(norms) == more.get("steps", 3):
                return norms
    return None

"""Trains a tiny Llama over device meshes of gloo processes and in one process, and compares.

    torchrun --nproc-per-node 8 -m benchmarks.meshes          all meshes of 8 processes
    torchrun --nproc-per-node 4 -m benchmarks.meshes --ways fsdp

A mesh is dp_replicate x dp_shard x cp x tp. Tensor parallelism is torch's, weights are sharded by
FSDP2 over dp_shard and cp (HSDP with replicas); "sums" does not use FSDP, but dyncp.sum_gradients.
Training runs in fp32 with SGD and momentum, and long documents are split over ranks. Losses must
agree to 1e-5 at every step, weights to 1e-4 after the last.
"""

import argparse
import math
import sys
from itertools import chain, repeat
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.parity import optimizer_of
from benchmarks.parity_models import make_model
from dyncp import (
    DCPExecutor,
    LoaderTuning,
    PlannerConfig,
    masks,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.integrations.transformers import attach

NAMES = ("dp_replicate", "dp_shard", "cp", "tp")
MESHES = ((1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 4, 1),
          (1, 2, 2, 2), (2, 1, 2, 2))  # fmt: skip
WAYS = ("fsdp", "sums")
LENGTHS = (150, 9, 31, 4, 180, 12, 40, 60, 77, 5, 3, 100)  # all differ: they identify documents
TOKENS = 200
LARGEST_LOSS, LARGEST_WEIGHT = 1e-5, 1e-4


class Outcome(NamedTuple):
    """Results of one rank: the losses of all steps, the weights, the documents of every step, and
    the largest number of ranks that a document was split over."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    documents: list[list[int]]
    split: int


def samples() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(97, (n,), generator=random)} for n in LENGTHS]


def divide_heads(model: Any, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism to attention and MLP."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    columns += ("mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        styles = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
        parallelize_module(layer, mesh["tp"], styles)


def shard_weights(model: Any, mesh: DeviceMesh) -> None:
    """Applies FSDP2 over all ranks with different tokens; replicas hold the same weights."""
    shards = mesh["dp_shard", "cp"]._flatten("shards")
    if mesh["dp_replicate"].size() > 1:
        shards = mesh["dp_replicate", "shards"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)


def train(sizes: tuple[int, ...], way: str, epochs: int = 1) -> Outcome:
    """Trains on this rank of a mesh."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    model = make_model("llama")
    attached = attach(model)
    if mesh["tp"].size() > 1:
        divide_heads(model, mesh)
    if way == "fsdp":
        shard_weights(model, mesh)
    optimizer = optimizer_of(model)
    losses, documents, split = [], [], 0
    loader = attached.loader(
        samples(), masks.causal, group=mesh, tokens_per_batch=TOKENS, shuffle=True,
        planner=PlannerConfig(block_size=16, max_tokens_per_rank=TOKENS // sizes[2] + 16),
        tuning=LoaderTuning(num_planners=0),
    )  # fmt: skip
    with DCPExecutor(mesh, timeout=60) as executor, loader:
        for data, plan in chain.from_iterable(repeat(loader, epochs)):
            loss = model(**data, dyncp_step=executor.prepare(plan)).loss
            loss.backward()
            sum_gradients(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum_over_ranks(loss.detach().double(), mesh).item())
            documents.append([LENGTHS.index(n) for n in plan.lengths if not plan.filler])
            split = max(split, most_owners(plan))
    return Outcome(losses, weights_of(model), documents, split)


def most_owners(plan: Any) -> int:
    """The largest number of ranks that own tokens of one document."""
    pairs = np.unique(np.stack([plan.blocks.sequence, plan.blocks.owner]), axis=1)
    return int(np.unique(pairs[0], return_counts=True)[1].max())


def weights_of(model: Any) -> dict[str, np.ndarray]:
    whole = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in model.named_parameters()
    }
    return {name: weight.detach().numpy() for name, weight in whole.items()}


def alone(batches: list[list[int]]) -> Outcome:
    """Trains in one process with Transformers' own attention, document by document."""
    model, texts = make_model("llama"), samples()
    optimizer, losses = optimizer_of(model), []
    for numbers in batches:
        tokens = [texts[number]["input_ids"][None] for number in numbers]
        targets = sum(ids.shape[1] - 1 for ids in tokens)
        parts = [model(input_ids=x, labels=x, num_items_in_batch=targets).loss for x in tokens]
        loss = torch.stack(parts).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, weights_of(model), batches, 1)


def compare(ranks: list[Outcome]) -> tuple[float, float]:
    """The largest relative differences of losses and weights between any rank and one process."""
    steps = zip(*(rank.documents for rank in ranks), strict=True)
    wanted = alone([sorted(set().union(*step)) for step in steps])
    pairs = [(a, b) for r in ranks for a, b in zip(r.losses, wanted.losses, strict=True)]
    weights = [
        abs(rank.weights[name] - weight).max() / abs(weight).max()
        for rank in ranks
        for name, weight in wanted.weights.items()
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs), float(max(weights))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--epochs", type=int, default=5, help="of 4 batches")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{' x '.join(NAMES)}  way   steps  split over   losses  weights  seconds")
    meshes = [sizes for sizes in MESHES if math.prod(sizes) == dist.get_world_size()]
    failed = [report(sizes, way, options.epochs) for sizes in meshes for way in options.ways]
    dist.destroy_process_group()
    return int(any(failed))


def report(sizes: tuple[int, ...], way: str, epochs: int) -> bool:
    """Trains and prints a row on rank 0; returns whether it differs by more than is allowed."""
    start = perf_counter()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, train(sizes, way, epochs))
    loss, weight = compare(ranks)
    if dist.get_rank() == 0:
        text = " x ".join(map(str, sizes))
        print(
            f"{text:<33} {way:<5} {len(ranks[0].losses):>5} {ranks[0].split:>11} "
            f"{loss:>8.1e} {weight:>8.1e} {perf_counter() - start:>8.1f}",
            flush=True,
        )
    return loss > LARGEST_LOSS or weight > LARGEST_WEIGHT


if __name__ == "__main__":
    sys.exit(main())

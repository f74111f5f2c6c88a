"""Trains tiny Transformers models on 4 processes under dyncp and in one process without it, and
compares.

    python -m benchmarks.parity                              all models, masks and ways, 20 steps
    python -m benchmarks.parity --models llama --ways plain --steps 5

Training runs in fp32 with SGD and momentum (AdamW would hide wrong factors), on long-tailed
documents that are split over ranks. The one process runs Transformers' own attention with dense
masks. Losses must agree to 1e-5 at every step, weights to 1e-4 after the last.

plain     4 ranks, gradients summed by dyncp.sum_gradients
resumed   saved after half of the steps, and resumed on 2 ranks
fsdp      FSDP2, activation checkpointing, accumulation over 2 batches
ddp       DistributedDataParallel
compiled  torch.compile(fullgraph=True); OPT and dynamic RoPE without fullgraph: their code has an
          `if` on a tensor that torch.compile cannot follow, under dyncp or not
"""

import argparse
import copy
import io
import os
import queue
import socket
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, repeat
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.parity_models import NAMES, documents, each_text_alone, make_model
from dyncp import (
    DCPDataLoader,
    DCPExecutor,
    LoaderTuning,
    PlannerConfig,
    masks,
    next_token_loss,
    sum_gradients,
    sum_over_ranks,
)


def branching(sample: Any) -> masks.Mask:
    """A prefix tree of five nodes for any length; short texts are not branched."""
    length = len(sample["input_ids"])
    if length < 8:
        return masks.causal(length)
    part = length // 5
    return masks.prefix_tree([-1, 0, 1, 1, 0], [length - 4 * part, part, part, part, part])


MASKS = {
    "causal": masks.causal,
    "sliding_window": masks.sliding_window(window=50),
    "shared_question": masks.shared_question(answers=3),
    "prefix_tree": branching,
}
WAYS = ("plain", "resumed", "fsdp", "ddp", "compiled")
LOSSES, WEIGHTS = 1e-5, 1e-4
BRANCHING = ("opt", "llama dynamic rope")  # on tensors, in Transformers' code
RANKS, TOKENS, TIMEOUT = 4, 700, 900
PLANNER = PlannerConfig(block_size=16)  # documents are tiny


class Case(NamedTuple):
    model: str
    mask: str
    way: str
    steps: int

    @property
    def accumulation(self) -> int:
        return 2 if self.way == "fsdp" else 1


class Outcome(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    split: int = 0  # number of documents that were split over ranks
    state: Any = None
    failure: str = ""


def batches(case: Case, mask_fn: Any, **options: Any) -> DCPDataLoader:
    samples = documents(60)
    return DCPDataLoader(
        samples,
        mask_fn,
        lengths=[len(sample["input_ids"]) for sample in samples],
        tokens_per_batch=TOKENS,
        accumulation_steps=case.accumulation,
        shuffle=True,
        planner=PLANNER,
        **options,
    )


def optimizer_of(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_alone(case: Case) -> Outcome:
    """Trains in one process with Transformers' own attention and dense masks."""
    from dyncp.integrations.transformers import layer_masks, model_masks

    model = plain_model(case)
    layers = layer_masks(model.config)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    mask_fn = model_masks(MASKS[case.mask], layers)
    optimizer, losses = optimizer_of(model), []
    with batches(case, mask_fn, virtual_ranks=1) as loader:
        iterator = chain.from_iterable(repeat(loader))
        for number in range(case.steps):
            if case.way == "resumed" and number == case.steps // 2:
                model, optimizer = loaded(case, model, optimizer)
            total = 0.0
            for _ in range(case.accumulation):
                data, plan = next(iterator)
                lengths = plan.parts[0].lengths.tolist()
                of_samples = [mask_fn({"input_ids": range(n)}) for n in lengths]
                by_kind = {
                    kind: dense_bias([found[layer.name] for found in of_samples])
                    for kind, layer in zip(kinds, layers, strict=True)
                }
                loss = dense_loss(model, data, by_kind)
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    return Outcome(losses, {name: p.detach() for name, p in model.named_parameters()})


def plain_model(case: Case) -> Any:
    model = make_model(case.model)
    if case.model == "gpt_oss":  # the only one with sinks
        model.set_attn_implementation("eager")
    return model


def loaded(case: Case, model: Any, optimizer: Any) -> tuple[Any, torch.optim.SGD]:
    """A model loaded as from a checkpoint, which lacks some state: dynamic RoPE stores the largest
    position it has seen on the module."""
    other = plain_model(case)
    other.load_state_dict(model.state_dict())
    again = optimizer_of(other)
    again.load_state_dict(optimizer.state_dict())
    return other, again


def dense_bias(of_samples: list[masks.Mask]) -> Tensor:
    allowed = torch.block_diag(*(torch.from_numpy(mask.dense()) for mask in of_samples))
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape).masked_fill(~allowed.bool(), lowest)[None, None]


def dense_loss(model: Any, data: dict[str, Tensor], by_kind: dict[str, Tensor]) -> Tensor:
    widest = by_kind.get("full_attention", next(iter(by_kind.values())))
    with each_text_alone(model, widest, data["position_ids"]):
        return _dense_loss(model, data, by_kind)


def _dense_loss(model: Any, data: dict[str, Tensor], by_kind: dict[str, Tensor]) -> Tensor:
    bias: Any = by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))
    inputs = {"input_ids": data["input_ids"], "position_ids": data["position_ids"]}
    inputs |= {"attention_mask": bias, "use_cache": False}
    logits = model(**inputs, output_router_logits=False).logits
    loss = next_token_loss(logits, data)
    if getattr(model.config, "output_router_logits", False):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        router = model.model(**inputs, output_router_logits=True).router_logits
        experts = model.config.num_experts, model.config.num_experts_per_tok
        loss = loss + model.router_aux_loss_coef * load_balancing_loss_func(router, *experts)
    return loss


def train_on_rank(case: Case, state: Any = None, steps: int | None = None) -> Outcome:
    """Trains on this rank under dyncp; `state` is the state of an earlier run, if it is resumed."""
    model, attached, run = wrapped(case)
    if state is not None:
        model.load_state_dict(state["model"], strict=False)  # tied weights are in it once
    optimizer = optimizer_of(model)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    executor = DCPExecutor(timeout=60)
    losses, split = [], 0
    loader = loader_of(case, attached, None if state is None else state["loader"])
    iterator = chain.from_iterable(repeat(loader))
    for _ in range(case.steps if steps is None else steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case.accumulation):
            data, plan = next(iterator)
            if case.way == "fsdp":
                run.set_requires_gradient_sync(micro + 1 == case.accumulation)
            loss = run(**data, dyncp_step=executor.prepare(plan)).loss
            loss.backward()
            total += loss.detach()
            split += split_documents(plan)
        sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(total).item())
    position = loader.state_dict()
    executor.close()
    weights = {name: _whole(p.detach()) for name, p in model.named_parameters()}
    state = {"model": weights, "optimizer": optimizer.state_dict(), "loader": position}
    return Outcome(losses, weights, split, state if case.way == "resumed" else None)


_loaders: dict[Any, tuple[DCPDataLoader, Any]] = {}  # with their states at the start


def loader_of(case: Case, attached: Any, state: Any) -> DCPDataLoader:
    """The loader; models with the same masks share one."""
    key = case.mask, case.accumulation, tuple(dict.fromkeys(attached.layers))
    if key not in _loaders:
        mask_fn = attached.masks(MASKS[case.mask])
        loader = batches(case, mask_fn, tuning=LoaderTuning(look_ahead=2, num_planners=0))
        _loaders[key] = loader, loader.state_dict()
    loader, start = _loaders[key]
    loader.load_state_dict(start if state is None else state)
    return loader


_compiled: dict[str, Any] = {}  # the latest one, and its weights at the start


def wrapped(case: Case) -> tuple[Any, Any, Any]:
    """The model, the result of `attach`, and the module to call."""
    from dyncp.integrations.transformers import attach

    if case.way == "compiled" and case.model in _compiled:  # masks change nothing in its graphs
        found, weights = _compiled[case.model]
        found[0].load_state_dict(weights)
        return found
    model = make_model(case.model)
    attached = attach(model)
    if case.way == "compiled":
        torch._dynamo.reset()
        weights = copy.deepcopy(model.state_dict())
        compiled = torch.compile(model, fullgraph=case.model not in BRANCHING, backend="aot_eager")
        _compiled.clear()
        _compiled[case.model] = (model, attached, compiled), weights
        return model, attached, compiled
    if case.way == "ddp":
        unused = case.model in ("qwen3_moe", "gpt_oss")  # experts that no token chose
        parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
        return model, attached, parallel
    if case.way == "fsdp":
        shard(model)
    return model, attached, model


def shard(model: Any) -> None:
    """Applies FSDP2 with activation checkpointing."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from transformers.modeling_layers import GradientCheckpointingLayer

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for module in list(model.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split_documents(plan: Any) -> int:
    blocks = plan.blocks
    owners = np.unique(np.stack([blocks.sequence, blocks.owner]), axis=1)[0]
    return int((np.unique(owners, return_counts=True)[1] > 1).sum())


def _whole(weight: Any) -> Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


def rank_main(rank: int, num_ranks: int, port: int, jobs: list[Any], results: Any) -> None:
    """Runs jobs (case, state, steps) sequentially; rank 0 sends the results."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    for case, state, steps in jobs:
        started = perf_counter()
        try:
            outcome = train_on_rank(case, copy.deepcopy(state), steps)  # processes share tensors
        except Exception:
            outcome = Outcome([], {}, failure=traceback.format_exc())
            _loaders.clear()
        if rank == 0:
            print(*case, f"{perf_counter() - started:.1f} s", file=sys.stderr)
            results.put(_bytes_of(outcome))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(num_ranks: int, jobs: list[Any]) -> Iterator[Outcome]:
    """Yields the outcomes of jobs, in order, as soon as they are there."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (num_ranks, port, jobs, results)
    processes = [context.Process(target=rank_main, args=(r, *arguments)) for r in range(num_ranks)]
    for process in processes:
        process.start()
    try:
        for _ in jobs:
            yield _next_result(results, processes)
    finally:
        for process in processes:
            process.join(0 if sys.exc_info()[0] else 20)
            process.kill()


def _next_result(results: Any, processes: list[Any]) -> Outcome:
    end = perf_counter() + TIMEOUT
    while perf_counter() < end:
        try:
            found = results.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a rank failed") from None
            continue
        return torch.load(io.BytesIO(found), weights_only=False)
    raise RuntimeError(f"no result in {TIMEOUT} s")


def _bytes_of(outcome: Outcome) -> bytes:
    file = io.BytesIO()
    torch.save(outcome, file)
    return file.getvalue()


def run(cases: list[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Runs all cases in one set of processes, then the second halves of resumed ones in a set of
    2."""
    halves = {c: c.steps // 2 if c.way == "resumed" else None for c in cases}
    begun: list[tuple[Case, Outcome]] = []
    first = on_ranks(RANKS, [(case, None, halves[case]) for case in cases])
    for case, outcome in zip(cases, first, strict=True):
        if halves[case] is None or outcome.failure:
            yield case, outcome
        else:
            begun.append((case, outcome))
    if begun:
        rest = on_ranks(2, [(c, o.state, c.steps - c.steps // 2) for c, o in begun])
        for (case, half), later in zip(begun, rest, strict=True):
            yield case, later._replace(losses=half.losses + later.losses)


def compare(case: Case, got: Outcome, wanted: Outcome) -> tuple[float, float]:
    """The largest relative differences of losses and of weights."""
    losses = [abs(a / b - 1) for a, b in zip(got.losses, wanted.losses, strict=True)]
    assert len(losses) == case.steps
    weights = [
        ((got.weights[name] - weight).abs().max() / weight.abs().max()).item()
        for name, weight in wanted.weights.items()
    ]
    return max(losses), max(weights)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, failed = perf_counter(), 0
    cases = [
        Case(model, mask, way, options.steps)
        for model in options.models.split(",")
        for way in options.ways.split(",")
        for mask in options.masks.split(",")
    ]
    alone: dict[Any, Outcome] = {}
    print(f"{'model':20} {'mask':16} {'way':9} {'losses':>8} {'weights':>8} {'split':>6}")
    for case, got in run(cases):
        if got.failure:
            failed += 1
            print(f"{case.model:20} {case.mask:16} {case.way:9} FAILED\n{got.failure}", flush=True)
            continue
        key = case.model, case.mask, case.accumulation, case.way == "resumed"
        if key not in alone:
            alone[key] = train_alone(case)
        losses, weights = compare(case, got, alone[key])
        good = losses < LOSSES and weights < WEIGHTS and got.split > 0
        failed += not good
        print(
            f"{case.model:20} {case.mask:16} {case.way:9} {losses:8.1e} {weights:8.1e} "
            f"{got.split:6} {'' if good else 'WRONG'}",
            flush=True,
        )
    print(f"{len(cases)} cases, {failed} wrong, {perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

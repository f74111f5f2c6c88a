"""Transformers models on 4 gloo ranks have the losses and weights of one process."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity import branching, optimizer_of
from benchmarks.parity_models import NAMES, config_of, make_model

from dyncp import (
    DCPExecutor,
    make_local_data,
    masks,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.integrations.transformers import attach
from hf_cases import plain_model, planned, whole_loss
from processes import run_ranks
from sizes import pick

RANKS, BATCHES = 4, (0, 1, 2)
# Layers of different kinds, sinks, rescaled RoPE, biases; test_hybrid_ranks.py has others.
VARIED = ("llama", "gemma3", "gpt_oss", "phi3 longrope", "opt")
SMALL = (3, 0, 3)  # the first and the last have two documents, which stay whole


def losses_and_weights(model, executor, mask_fn=masks.causal, numbers=BATCHES, **options):
    """Three steps of SGD with momentum under dyncp, on this rank."""
    attach(model)
    optimizer, losses = optimizer_of(model), []
    for number in numbers:
        samples, batch, plan = planned(model.config, number, RANKS, mask_fn, **options)
        part = plan.parts[dist.get_rank()]
        data = make_local_data(samples, batch, part)
        loss = model(**data, dyncp_step=executor.prepare(part)).loss
        loss.backward()
        sum_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(loss.detach().double()).item())
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


def alone(name, mask_fn=masks.causal, numbers=BATCHES):
    model = plain_model(name)
    optimizer, losses = optimizer_of(model), []
    for number in numbers:
        loss = whole_loss(model, number, mask_fn)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


def check(found, wanted):
    (losses, weights), (wanted_losses, wanted_weights) = found, wanted
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for name, weight in wanted_weights.items():
        assert abs(weights[name] - weight).max() <= 1e-4 * abs(weight).max(), name


def models(rank, names):
    executor = DCPExecutor(timeout=60)
    return [losses_and_weights(make_model(name), executor) for name in names]


def test_every_architecture_trains_as_in_one_process():
    names = pick(VARIED, NAMES)
    found = run_ranks(models, RANKS, names, timeout=280)[0]
    for name, outcome in zip(names, found, strict=True):
        check(outcome, alone(name))


QUESTION = masks.shared_question(answers=2)


def special_cases(rank):
    """Outcomes of branches with local layers, ranks without tokens, trees, and FSDP."""
    executor = DCPExecutor(timeout=60)
    branches = losses_and_weights(make_model("gemma3"), executor, QUESTION)
    whole = {"solver": "uncut", "local_multiple": 1, "numbers": SMALL}
    empty = losses_and_weights(make_model("gemma3"), executor, **whole)
    moe = losses_and_weights(make_model("qwen3_moe"), executor, **whole)
    rope = losses_and_weights(make_model("llama dynamic rope"), executor, **whole)
    trees = losses_and_weights(make_model("qwen3_moe"), executor, branching)
    return branches, empty, moe, rope, trees, sharded(executor)


def sharded(executor):
    """The loss of a step with FSDP2, checkpointing and mixed precision, whether all layers got the
    same step object, and how often they were called."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model("llama")
    attach(model, dtype="bf16")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["dyncp_step"].step), with_kwargs=True
        )
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    samples, batch, plan = planned(model.config, 0, RANKS)
    part = plan.parts[dist.get_rank()]
    step = executor.prepare(part)
    loss = model(**make_local_data(samples, batch, part), dyncp_step=step).loss
    loss.backward()
    return sum_over_ranks(loss.detach().double()).item(), all(x is step for x in seen), len(seen)


def test_branches_empty_ranks_experts_and_rescaled_rope_are_as_in_one_process():
    branches, empty, moe, rope, trees, fsdp = run_ranks(special_cases, RANKS, timeout=280)[0]
    check(branches, alone("gemma3", QUESTION))
    plan = planned(config_of("gemma3"), 3, RANKS, local_multiple=1)[2]
    assert min(part.local_rows for part in plan.parts) == 0
    check(empty, alone("gemma3", numbers=SMALL))
    check(moe, alone("qwen3_moe", numbers=SMALL))
    check(rope, alone("llama dynamic rope", numbers=SMALL))
    check(trees, alone("qwen3_moe", branching))
    loss, untouched, calls = fsdp
    assert loss == pytest.approx(alone("llama")[0][0], rel=1e-2)
    assert untouched
    assert calls == 4  # two layers, and once more in backward

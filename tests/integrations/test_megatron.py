"""Megatron-Core's GPTModel under dyncp trains as one process does, document by document."""

from itertools import chain

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from dyncp import (
    DCPDataLoader,
    DCPExecutor,
    PlannerConfig,
    masks,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.integrations.megatron import (
    PositionRotary,
    attach,
    attention_shape,
    check_config,
    loss_of,
    model_inputs,
    plan_mesh,
    with_dyncp,
)
from framework_cases import DOCUMENTS, SAMPLES, documents_of, most_owners, optimizer_of, planned
from megatron_cases import DenseAttention, config_of, layer_spec, tiny_gpt
from processes import free_port, run_ranks

# The number of ranks of a plan, and of tensor parallelism.
MESHES = {"cp 4": (4, 1), "cp 2 x tp 2": (2, 2)}


def train(cp, tp, start):
    """Losses, this rank's weights, the documents of every step, and the largest number of ranks
    over which a document was split."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    mesh = plan_mesh(cp)
    model = attach(tiny_gpt(with_dyncp(layer_spec())))
    for name, parameter in model.named_parameters():
        own = share(name, start[name], tp, dist.get_rank() % tp)
        parameter.data.copy_(torch.from_numpy(own))
    optimizer, executor = optimizer_of(model), DCPExecutor(mesh, timeout=60)
    losses, documents, split = [], [], 0
    loader = DCPDataLoader(
        SAMPLES, masks.causal, group=mesh, model=attention_shape(model.config),
        tokens_per_batch=200, local_multiple=8,
        planner=PlannerConfig(block_size=16, max_tokens_per_rank=200 // cp + 16),
    )  # fmt: skip
    with loader:
        for data, plan in loader:
            loss = loss_of(model(**model_inputs(data, executor.prepare(plan))), data)
            loss.backward()
            sum_gradients(model, mesh)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum_over_ranks(loss.detach().double(), mesh).item())
            documents.append(documents_of(plan))
            split = max(split, most_owners(plan))
    executor.close()
    parallel_state.destroy_model_parallel()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return losses, weights, documents, split


def all_meshes(rank, start):
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    with pytest.raises(ValueError, match="Megatron's context_parallel_size is 2, which"):
        plan_mesh()
    parallel_state.destroy_model_parallel()
    return {name: train(*sizes, start) for name, sizes in MESHES.items()}


@pytest.fixture(scope="module")
def megatron():
    """Megatron needs process groups, even for one process."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def whole_loss(model, documents):
    """The mean loss over all targets, computed document by document."""
    total = torch.zeros(())
    for tokens in documents:
        positions = torch.arange(len(tokens))[None]
        if model.position_embedding_type == "rope":
            model.rotary_pos_emb.get_rotary_seq_len = lambda *_, at=positions: at
        losses = model(tokens[None], positions, None, labels=tokens.roll(-1)[None])
        total = total + losses[0, :-1].sum()
    return total / sum(len(tokens) - 1 for tokens in documents)


def dense_model(positions="rope"):
    """A model with torch's attention and RoPE at given positions: Megatron's own need a GPU."""
    spec = layer_spec()
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    model = tiny_gpt(spec, positions=positions)
    if positions == "rope":
        model.rotary_pos_emb = PositionRotary(model.rotary_pos_emb)
    return model


def alone(batches):
    model = dense_model()
    optimizer, losses = optimizer_of(model), []
    for numbers in batches:
        loss = whole_loss(model, [DOCUMENTS[number] for number in numbers])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


def share(name, weight, parts, number):
    """The part of a weight that one tensor-parallel rank holds."""
    if "linear_fc1" in name:  # gate and up projection
        halves = [np.split(half, parts)[number] for half in np.split(weight, 2)]
        return np.concatenate(halves)
    if "norm" in name:
        return weight
    rows = "linear_proj" in name or "linear_fc2" in name
    return np.split(weight, parts, axis=1 if rows else 0)[number]


def test_a_llama_trains_as_in_one_process_also_with_tensor_parallelism(megatron):
    start = {name: p.detach().numpy() for name, p in dense_model().named_parameters()}
    found = run_ranks(all_meshes, 4, start, timeout=280)
    for name, (_, tp) in MESHES.items():
        ranks = [of_rank[name] for of_rank in found]
        steps = zip(*(documents for _, _, documents, _ in ranks), strict=True)
        batches = [sorted(set().union(*step)) for step in steps]
        assert sorted(chain(*batches)) == list(range(len(DOCUMENTS)))
        losses, weights = alone(batches)
        for rank, (own_losses, own_weights, _, split) in enumerate(ranks):
            assert split > 1
            assert own_losses == pytest.approx(losses, rel=1e-5)
            for weight, own in own_weights.items():
                wanted = share(weight, weights[weight], tp, rank % tp)
                assert abs(own - wanted).max() <= 1e-4 * abs(wanted).max(), (name, weight)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
def test_losses_and_gradients_are_those_of_documents_one_by_one(megatron, positions):
    data, step = planned(ranks=4)
    model = attach(tiny_gpt(with_dyncp(layer_spec()), positions=positions))
    plain = dense_model(positions)
    loss = loss_of(model(**model_inputs(data, step)), data)
    wanted = whole_loss(plain, DOCUMENTS[:3])
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max()


def test_rope_by_local_index_is_refused(megatron):
    data, step = planned(ranks=2)
    with pytest.raises(ValueError, match="a token's row on its rank is not its position; call"):
        tiny_gpt(with_dyncp(layer_spec()))(**model_inputs(data, step))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_angles_are_megatrons_own_at_the_positions_of_rows(megatron, interleaved):
    own = RotaryEmbedding(8, 1.0, interleaved, seq_len_interpolation_factor=2.0, rope_scaling=True,
                          use_cpu_initialization=True)  # fmt: skip
    positions = torch.tensor([[5, 0, 99, 7]])
    angles = own.get_freqs_non_repeated(100)[positions[0]]
    pairs = (angles, angles)
    wanted = torch.stack(pairs, -1).flatten(1) if interleaved else torch.cat(pairs, -1)
    torch.testing.assert_close(PositionRotary(own)(positions), wanted[:, None, None])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"packed_seq_params": None}, "packed_seq_params is NoneType; expected the step"),
        ({"attention_mask": torch.ones(1)}, "got an attention mask or bias; masks are part of"),
        ({"input_ids": torch.zeros(1, 8, dtype=torch.int64)}, "8 tokens|size"),
        ({"input_ids": torch.zeros(2, 192, dtype=torch.int64)}, "batch size of 2|size"),
    ],
)
def test_a_model_without_its_step_or_rows_is_refused(megatron, wrong, message):
    data, step = planned(ranks=2)
    model = attach(tiny_gpt(with_dyncp(layer_spec())))
    with pytest.raises((ValueError, RuntimeError), match=message):
        model(**model_inputs(data, step) | wrong)


def test_local_data_of_another_batch_and_tokens_with_several_targets_are_refused():
    data, step = planned(ranks=2)
    with pytest.raises(ValueError, match="local data and step are of different batches"):
        model_inputs(data, planned(ranks=2, numbers=(0, 1, 4))[1])
    with pytest.raises(ValueError, match="several targets or weights"):
        model_inputs(data | {"target_rows": torch.zeros(1, 0)}, step)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("attention_dropout", 0.1),
        ("window_size", (64, 0)),
        ("softmax_type", "learnable"),
        ("qk_clip", True),
        ("mtp_num_layers", 1),
        ("context_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("multi_latent_attention", True),
    ],
)
def test_unsupported_options_are_refused_by_name(option, value):
    config = config_of()
    setattr(config, option, value)
    with pytest.raises(ValueError, match=f"the TransformerConfig has {option}="):
        check_config(config)


def test_auxiliary_losses_of_experts_are_refused():
    config = config_of()
    config.num_moe_experts, config.moe_aux_loss_coeff = 4, 0.01
    with pytest.raises(ValueError, match="Megatron averages over each rank's own tokens"):
        check_config(config)


def test_models_with_other_attention_or_positions_are_refused(megatron):
    with pytest.raises(ValueError, match="layer 0 has DotProductAttention, which attends only"):
        attach(tiny_gpt(layer_spec()))
    model = tiny_gpt(with_dyncp(layer_spec()))
    model.position_embedding_type = "mrope"
    with pytest.raises(ValueError, match="position_embedding_type is 'mrope'; allowed are rope"):
        attach(model)
    with pytest.raises(ValueError, match="the layer spec has self attention MLASelfAttention"):
        with_dyncp(get_gpt_layer_local_spec(multi_latent_attention=True))
    with pytest.raises(ValueError, match="model is Linear; expected Megatron-Core's GPTModel"):
        attach(torch.nn.Linear(2, 2))

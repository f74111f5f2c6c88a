"""torchtitan's Llama under dyncp trains as one process does with torchtitan's own attention."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention, VarlenAttention
from torchtitan.models.deepseek_v3 import deepseekv3_configs
from torchtitan.models.gpt_oss import gptoss_configs
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3 import qwen3_configs
from torchtitan.tools import utils

from dyncp import (
    PlannerConfig,
    masks,
    next_token_loss,
    sum_over_ranks,
)
from dyncp.integrations.torchtitan import (
    PlannedAttention,
    PlannedDataLoader,
    attention_shape,
    model_inputs,
    plan_mesh,
    use_dyncp,
)
from framework_cases import (
    DOCUMENTS,
    SAMPLES,
    VOCAB,
    documents_of,
    most_owners,
    optimizer_of,
    planned,
)
from processes import run_ranks
from titan_cases import built, tiny_llama, whole_loss

BACKEND = "partial_dtensor"  # torchtitan's default, spmd_types, needs a later torch for FSDP
# The number of ranks of a plan, and of tensor parallelism; the remaining factor is replicas.
MESHES = {"dp 2 x cp 2": (2, 1), "cp 2 x tp 2": (2, 2)}


def parallel_model(tp):
    """The tiny Llama, parallelized by torchtitan on its own meshes, which are set to the CPU."""
    parallel_dims.device_type = utils.device_type = "cpu"
    set_spmd_backend(BACKEND)
    sizes = ParallelismConfig(tensor_parallel_degree=tp, spmd_backend=BACKEND)
    dims = ParallelDims.from_config(sizes, dist.get_world_size())
    config = use_dyncp(tiny_llama())
    set_llama3_sharding_config(config, enable_sp=True)
    training = TrainingConfig(mixed_precision_param="float32")
    model = parallelize_llama(
        built(config), parallel_dims=dims, training=training, parallelism=sizes,
        compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
    return config, model, dims


def train(cp, tp):
    """Losses, weights, the documents of every step, and the most ranks that share a document."""
    config, model, dims = parallel_model(tp)
    optimizer, mesh = optimizer_of(model), plan_mesh(dims, cp)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=VOCAB).build()
    planner = PlannerConfig(block_size=16, max_tokens_per_rank=200 // cp + 16)
    options = {"tokens_per_batch": 200, "planner": planner}
    loader = PlannedDataLoader.Config(
        samples=lambda _: SAMPLES, mask_fn=masks.causal, cp=cp, options=options,
        model=attention_shape(config, tp, "fp32"),
    ).build(
        dp_world_size=dims.dp_shard, dp_rank=dist.get_rank() // tp, tokenizer=None, seq_len=512
    )  # fmt: skip
    losses, documents, split = [], [], 0
    for inputs, labels in loader:
        tokens, plan = inputs.pop("input"), inputs["attention_masks"].plan
        targets = sum_over_ranks((labels != -100).sum(), mesh)
        with get_spmd_context(parallel_dims=dims)():
            loss, _ = loss_fn(model(tokens, **inputs), labels, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_over_ranks(loss.detach().double(), mesh).item())
        documents.append(documents_of(plan))
        split = max(split, most_owners(plan))
    loader.loader.close()
    loader.executor.close()
    weights = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    return losses, weights, documents, split


def all_meshes(rank):
    return {name: train(*sizes) for name, sizes in MESHES.items()}


def alone(batches):
    """Losses and weights of the same batches in one process, document by document."""
    model = built(tiny_llama())
    optimizer, losses = optimizer_of(model), []
    for numbers in batches:
        loss = whole_loss(model, [DOCUMENTS[number] for number in numbers])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_a_llama_trains_as_in_one_process_with_fsdp_replicas_and_tensor_parallelism():
    found = run_ranks(all_meshes, 4, timeout=280)
    for name in MESHES:
        ranks = [of_rank[name] for of_rank in found]
        steps = zip(*(documents for _, _, documents, _ in ranks), strict=True)
        batches = [sorted(set().union(*step)) for step in steps]
        assert sorted(chain(*batches)) == list(range(len(DOCUMENTS)))
        losses, weights = alone(batches)
        for own_losses, own_weights, _, split in ranks:
            assert split > 1
            assert own_losses == pytest.approx(losses, rel=1e-5)
            for weight, wanted in weights.items():
                difference = abs(own_weights[weight] - wanted).max()
                assert difference <= 1e-4 * abs(wanted).max(), (name, weight)


def tiny_qwen():
    config = qwen3_configs["debugmodel"]("flex")
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return config


@pytest.mark.parametrize("config_of", [tiny_llama, tiny_qwen])
def test_losses_and_gradients_are_those_of_torchtitans_own_attention(config_of):
    data, step = planned(ranks=4, shape=attention_shape(config_of(), dtype=torch.float32))
    model, plain = built(use_dyncp(config_of())), built(config_of())
    loss = next_token_loss(model(**model_inputs(data, step)), data)
    wanted = whole_loss(plain, DOCUMENTS[:3])
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max()


def test_compiled_layers_are_whole_graphs_that_serve_all_batches():
    graphs = []
    model, plain = built(use_dyncp(tiny_llama(layers=1))), built(tiny_llama(layers=1))
    for layer in model.layers.values():
        layer.compile(backend=lambda graph, _: graphs.append(1) or graph.forward, fullgraph=True)
    for numbers in ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9, 10)):
        data, step = planned(ranks=2, numbers=numbers)
        loss = next_token_loss(model(**model_inputs(data, step)), data)
        wanted = whole_loss(plain, [DOCUMENTS[number] for number in numbers])
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attention_masks": None}, "attention_masks is NoneType; expected the step"),
        ({"positions": None}, "got no positions: RoPE would use a token's row"),
        ({"positions": torch.zeros(1, 8, dtype=torch.int64)}, "local data have 8 rows"),
        ({"tokens": torch.zeros(1, 8, dtype=torch.int64)}, "shape|size"),
        ({"tokens": torch.zeros(2, 192, dtype=torch.int64)}, "the model got a batch size of 2"),
    ],
)
def test_a_model_without_its_step_positions_or_rows_is_refused(wrong, message):
    data, step = planned(ranks=2)
    model = built(use_dyncp(tiny_llama(layers=1)))
    with pytest.raises((ValueError, RuntimeError), match=message):
        model(**model_inputs(data, step) | wrong)


def test_local_data_of_another_batch_are_refused():
    data, _ = planned(ranks=2)
    _, step = planned(ranks=2, numbers=(0, 1, 4))
    with pytest.raises(ValueError, match="local data and step are of different batches"):
        model_inputs(data, step)


def test_windows_sinks_masks_of_models_and_other_attention_are_refused():
    windowed = tiny_llama(inner=VarlenAttention.Config(window_size=(64, 0)))
    with pytest.raises(ValueError, match=r"layer 0 has inner attention .* with window \(64, 0\)"):
        use_dyncp(windowed)
    with pytest.raises(ValueError, match="makes its own masks"):
        use_dyncp(gptoss_configs["debugmodel"](moe_comm_backend="standard"))
    with pytest.raises(ValueError, match=r"layer 0 has .*Attention\.Config; dyncp replaces only"):
        use_dyncp(deepseekv3_configs["debugmodel"]("flex", "standard"))
    with pytest.raises(ValueError, match="layer 0 balances its experts by row counts"):
        use_dyncp(qwen3_configs["debugmodel_moe"]("flex"))
    with pytest.raises(ValueError, match="config is int; expected a torchtitan decoder"):
        use_dyncp(3)
    with pytest.raises(ValueError, match="layer 0 has PlannedGQAttention"):
        use_dyncp(use_dyncp(tiny_llama()))
    with pytest.raises(ValueError, match="the layer calls attention with out_transform"):
        PlannedAttention.Config().build()(*[torch.zeros(1, 2, 2, 8)] * 3, out_transform=abs)


def test_torchtitans_own_context_parallelism_and_pipelines_are_refused():
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1}
    with pytest.raises(ValueError, match="context_parallel_degree is 2, which does not work"):
        plan_mesh(SimpleNamespace(**sizes | {"cp": 2}))
    with pytest.raises(ValueError, match="pipeline_parallel_degree is 2"):
        plan_mesh(SimpleNamespace(**sizes | {"pp": 2}))
    with pytest.raises(ValueError, match="2 kv heads; 4 tensor-parallel ranks cannot share them"):
        attention_shape(tiny_llama(), tp=4)


def planned_loader():
    utils.device_type = "cpu"
    config = tiny_llama()
    return PlannedDataLoader.Config(
        samples=lambda _: SAMPLES, mask_fn=masks.causal, model=attention_shape(config, 1, "fp32"),
        options={"tokens_per_batch": 200, "shuffle": True, "planner": PlannerConfig(block_size=16)},
    ).build(
        dp_world_size=dist.get_world_size(), dp_rank=dist.get_rank(), tokenizer=None, seq_len=512
    )  # fmt: skip


def saved_and_loaded(rank, folder):
    """The documents of all batches after the first, and those of a loader that resumes there.
    torchtitan saves its loader in torch's distributed checkpoints."""
    loader = planned_loader()
    batches = iter(loader)
    next(batches)
    checkpoints.save({"dataloader": loader}, checkpoint_id=folder)
    expected = [documents_of(inputs["attention_masks"].plan) for inputs, _ in batches]
    resumed = planned_loader()
    checkpoints.load({"dataloader": resumed}, checkpoint_id=folder)
    found = [documents_of(inputs["attention_masks"].plan) for inputs, _ in resumed]
    for one in (loader, resumed):
        one.loader.close()
        one.executor.close()
    return expected, found


def test_a_loader_resumes_from_a_checkpoint(tmp_path):
    for expected, found in run_ranks(saved_and_loaded, 2, str(tmp_path)):
        assert found == expected
        assert len(found) > 1

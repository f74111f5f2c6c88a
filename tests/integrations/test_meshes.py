"""A Llama on meshes of replicas, shards, context and tensor parallelism trains as one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.meshes import NAMES, compare, divide_heads, samples, train
from benchmarks.parity_models import make_model

from dyncp import (
    BatchMismatch,
    DCPDataLoader,
    ModelConfig,
    masks,
    sum_gradients,
    sum_over_ranks,
)
from dyncp.gradients import times_ranks
from dyncp.integrations.transformers import attach
from dyncp.integrations.transformers.trainer import TrainerMixin
from processes import run_ranks
from sizes import pick

CASES = {
    "shards and tensors": ((1, 1, 2, 2), "fsdp"),
    "replicas": ((2, 1, 2, 1), "fsdp"),
    "sums and tensors": ((1, 1, 2, 2), "sums"),
}


def on_meshes(rank, names):
    outcomes = {name: train(*CASES[name]) for name in names}
    check_factors()
    check_refusals(rank)
    return outcomes


def check_factors():
    """Factors of a mesh count the ranks with different tokens: replicas, shards and cp."""
    mesh = init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=NAMES)
    one = torch.ones(())
    assert times_ranks(one, mesh) == sum_over_ranks(one.clone(), mesh) == 2
    assert times_ranks(one, mesh["tp"]) == 2
    assert times_ranks(one) == 4


def check_refusals(rank):
    """Refused are tensor-parallel ranks that disagree, heads that cannot be divided, and gradients
    that would be summed twice or over ranks with different shards."""
    mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=NAMES)
    with pytest.raises(BatchMismatch, match="ranks made different loaders"):
        DCPDataLoader(samples()[rank % 2 :], masks.causal, group=mesh)
    with pytest.raises(ValueError, match="3 kv heads; 2 tensor-parallel ranks cannot share"):
        DCPDataLoader(samples(), masks.causal, group=mesh, model=ModelConfig(24, 1, 8, 97, 6, 3, 4))
    model = make_model("llama")
    attached = attach(model)
    assert attached.loader(samples(), masks.causal, group=mesh).shape == attached.shape(2)
    divide_heads(model, mesh)
    with pytest.raises(ValueError, match="pass the mesh, or the group of"):
        sum_gradients(model)
    with pytest.raises(ValueError, match="the mesh has 2 ranks in dimension 'tp', with the same"):
        TrainerMixin(model, None, mask_fn=masks.causal, loader_options={"group": mesh})
    sharded = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp_shard", "cp"]._flatten("both"))
    with pytest.raises(ValueError, match="FSDP must span whole dimensions of the mesh; pass the"):
        sum_gradients(sharded)
    with pytest.raises(ValueError, match=r"which ranks have different tokens .dp\.\.\.. and"):
        sum_over_ranks(torch.ones(()), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    dist.barrier()


def test_a_llama_trains_as_in_one_process_on_meshes_of_four_dimensions():
    names = pick(("shards and tensors", "sums and tensors"), tuple(CASES))
    found = run_ranks(on_meshes, 4, names, timeout=280)
    for name in names:
        ranks = [outcomes[name] for outcomes in found]
        assert ranks[0].split == 2
        assert len(ranks[0].losses) > 1
        loss, weight = compare(ranks)
        assert loss < 1e-5, name
        assert weight < 1e-4, name

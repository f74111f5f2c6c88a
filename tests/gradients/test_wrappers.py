"""`sum_gradients` makes the gradients of one process, whatever wraps the model."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from small_model import Model, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dyncp import DCPExecutor, sum_gradients
from processes import run_ranks


def shard(model, mesh=None, factor=None):
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        if factor is not None:
            module.set_gradient_divide_factor(factor)
    return model


def of_inner_model(model, group):
    """`sum_gradients` for users who pass the model and not its wrapper."""
    sum_gradients(model.module, group)


def all_ways(rank):
    """The norms of gradients under every wrapper, by name."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both = grid["dp", "cp"]._flatten("both")
    world, found = DCPExecutor(timeout=60), {}
    run = partial(train, world, clip=0.5)
    found["plain"] = run(Model())
    found["mesh of one dimension"] = train(
        DCPExecutor(flat, timeout=60), Model(), group=flat, clip=0.5
    )
    found["DDP"] = run(DistributedDataParallel(Model()))
    found["DDP, inner model"] = run(DistributedDataParallel(Model()), reduce=of_inner_model)
    found["FSDP2"] = run(shard(Model()))
    found["FSDP2 without its average"] = run(shard(Model(), factor=1.0))
    found["FSDP2 with another factor"] = run(shard(Model(), factor=3.0))
    found["HSDP"] = run(shard(Model(), mesh=grid))
    run = partial(train, world, clip=0.5, accumulation=2)
    sync = {"set_sync": lambda model, last: model.set_requires_gradient_sync(last)}
    found["2: plain"] = run(Model())
    found["2: DDP"] = run(DistributedDataParallel(Model()))
    found["2: FSDP2"] = run(shard(Model()))
    found["2: FSDP2, one reduction"] = run(shard(Model()), **sync)
    replicas = DCPExecutor(grid, timeout=60)
    run = partial(train, replicas, group=grid, clip=0.5)
    found["dp: plain"] = run(Model())
    found["dp: DDP"] = run(DistributedDataParallel(Model()))
    found["dp: DDP over dp"] = run(
        DistributedDataParallel(Model(), process_group=grid["dp"].get_group())
    )
    found["dp: FSDP2"] = run(shard(Model(), mesh=both))
    found["dp: FSDP2 over dp"] = run(shard(Model(), mesh=grid["dp"]))
    found["dp: FSDP2 over cp"] = run(shard(Model(), mesh=grid["cp"]))
    found["dp: HSDP"] = run(shard(Model(), mesh=grid))
    return found, refusals(world, grid)


def reduce_over(group, model, _):
    sum_gradients(model, group)


def refusals(world, grid):
    """What `sum_gradients` says of gradients that it cannot make sums of."""
    told = []

    def attempt(model, group=None, **options):
        try:
            train(
                world,
                model,
                steps=1,
                reduce=lambda model, _: sum_gradients(model, group),
                **options,
            )
        except ValueError as error:
            told.append(str(error))

    attempt(shard(Model()), set_sync=lambda model, _: model.set_requires_gradient_sync(False))
    attempt(shard(Model(), mesh=grid["cp"]))
    attempt(FullyShardedDataParallel(Model(), device_id=torch.device("cpu")))
    dist.barrier()
    return told


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(all_ways, 4)


def test_norms_and_weights_are_those_of_one_process_under_every_wrapper(ranks):
    alone = DCPExecutor(virtual_ranks=4, check_gradients=False)
    expected = {
        "2:": train(alone, Model(), accumulation=2, clip=0.5),
        "dp": ranks[0][0]["dp: plain"],  # two batches in each step
        "": train(alone, Model(), clip=0.5),
    }
    for found, _ in ranks:
        for name, norms in found.items():
            whole = expected[name[:2] if name[:2] in expected else ""]
            assert norms == pytest.approx(whole, rel=1e-9), name


def test_gradients_that_cannot_be_summed_are_refused(ranks):
    for _, told in ranks:
        assert len(told) == 3
        assert "FSDP has not reduced the gradients of " in told[0]
        assert "set_requires_gradient_sync(True) before the last micro-batch" in told[0]
        assert "FSDP must span whole dimensions of the mesh; pass the mesh" in told[1]
        assert "FullyShardedDataParallel (FSDP1)" in told[2]

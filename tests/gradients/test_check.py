"""Gradients that are not the sums over ranks, and unequal weights, end in an error."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from small_model import Model, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from dyncp import DCPExecutor, sum_gradients
from processes import run_ranks

STEPS = 5


def forget(model, group):
    """A loop without sum_gradients."""


def sum_own(model, group=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


def sum_twice(model, group):
    sum_own(model)
    sum_gradients(model, group)


def sum_some(model, group):
    sum_gradients(model.layers[0], group)


def sum_in_parts(model, group):
    for part in model.children():
        sum_gradients(part, group)


def sum_over_plan_only(model, group):
    sum_gradients(model, group["cp"])


def shard(model, mesh=None):
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    return model


def with_sums(model):
    """DDP whose communication hook sums."""

    def hook(group, bucket):
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda f: f.value()[0])
        )

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def with_adapter(rank):
    """A model of equal weights, but for one parameter."""
    model = Model()
    with torch.no_grad():
        model.layers[1].out.weight[0, 0] += 0.01 * rank
    return model


def mistakes(rank):
    """What a loop with each mistake says."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    world, replicas = DCPExecutor(timeout=60), DCPExecutor(grid, timeout=60)
    told = {}

    def attempt(name, model, executor=world, **options):
        try:
            train(executor, model, steps=STEPS, **options)
            told[name] = ""
        except ValueError as error:
            told[name] = str(error)

    over_cp = partial(DistributedDataParallel, process_group=grid["cp"].get_group())
    of_grid = {"executor": replicas, "group": grid}
    attempt("right", Model())
    attempt("forgotten", Model(), reduce=forget)
    attempt("forgotten while warming up", Model(), reduce=forget, rate=0.0)
    attempt("some forgotten", Model(), reduce=sum_some)
    attempt("replicas forgotten", Model(), reduce=sum_over_plan_only, **of_grid)
    within = DCPExecutor(grid["cp"].get_group(), timeout=60)
    of_groups = {"executor": within, "group": grid}
    attempt("right: executor of a group", Model(), **of_groups)
    attempt(
        "replicas forgotten: executor of a group", Model(), reduce=sum_over_plan_only, **of_groups
    )
    attempt("DDP over a part", over_cp(Model()), reduce=forget, **of_grid)
    attempt("FSDP over a part", shard(Model(), grid["cp"]), reduce=forget, **of_grid)
    attempt("averaged by DDP", DistributedDataParallel(Model()), reduce=forget)
    attempt("averaged by FSDP", shard(Model()), reduce=forget)
    attempt("averaged by HSDP", shard(Model(), grid), reduce=forget, **of_grid)
    attempt("twice", Model(), reduce=sum_twice)
    attempt("twice by DDP", with_sums(Model()))
    attempt("other weights", Model(seed=rank))
    attempt("another adapter", with_adapter(rank))
    attempt("other replicas", shard(Model(seed=rank // 2), grid), **of_grid)
    return told


@pytest.fixture(scope="module")
def told():
    return run_ranks(mistakes, 4)


def test_a_right_loop_is_left_alone(told):
    for of in told:
        assert of["right"] == of["right: executor of a group"] == ""


def test_missing_sums_are_errors_on_all_ranks(told):
    for of in told:
        for name in (
            "forgotten", "forgotten while warming up", "some forgotten", "DDP over a part",
            "FSDP over a part",
        ):  # fmt: skip
            assert "its gradients were not summed over all ranks; call sum_gradients(mo" in of[name]
        assert "sum_gradients(model, mesh)" in of["replicas forgotten"]
        assert "sum_gradients(model, mesh)" in of["replicas forgotten: executor of a group"]


def test_averages_and_double_sums_are_errors_on_all_ranks(told):
    for of in told:
        for name in ("averaged by DDP", "averaged by FSDP", "averaged by HSDP"):
            assert "are 0.25 times those of the step's loss, and 0.25 times the sum" in of[name]
            assert "DDP or FSDP averaged them, or they were summed twice" in of[name]
        for name in ("twice", "twice by DDP"):
            assert "are 4 times the sum of what backward computed on all ranks with" in of[name]


def test_unequal_initial_weights_are_errors_on_all_ranks(told):
    for of in told:
        for name in ("other weights", "another adapter", "other replicas"):
            assert "ranks began training with different weights" in of[name]


def other_optimisers(rank):
    """Optimisers without attention, or with a share of the parameters."""
    torch.manual_seed(rank)
    executor, critic = DCPExecutor(timeout=60), nn.Linear(3, 1)
    own = torch.optim.SGD(critic.parameters(), lr=0.1)
    joint = Model()
    sharing = ZeroRedundancyOptimizer(joint.parameters(), torch.optim.SGD, lr=0.1)

    def step_with_critic(model, group):
        critic(torch.ones(2, 3) * rank).sum().backward()
        own.step()
        own.zero_grad()
        sum_gradients(model, group)

    def step_with_shares(model, group):
        sum_gradients(model, group)
        for parameter, given in zip(joint.parameters(), model.parameters(), strict=True):
            parameter.grad = given.grad.clone()
        sharing.step()

    norms = [
        train(executor, Model(), steps=STEPS, reduce=step_with_critic),
        train(executor, Model(), steps=STEPS, reduce=step_with_shares),
        train(executor, Model(), steps=STEPS, reduce=sum_in_parts),
        train(DCPExecutor(check_gradients=False, timeout=60), Model(rank), steps=2),
    ]
    frozen, new = nn.Linear(2, 2).requires_grad_(False), shard(Model())
    for model in (frozen, new):  # before the first forward: so the state of an optimiser is loaded
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    return norms


def test_other_optimisers_and_sums_in_parts_raise_nothing():
    for norms in run_ranks(other_optimisers, 2):
        assert norms[0] == norms[1] == norms[2]
        assert len(norms[3]) == 2

"""Gradients and losses of many ranks; loaders and executors that were made too early."""

import torch
import torch.distributed as dist
from torch import nn

from dyncp import (
    DCPDataLoader,
    DCPExecutor,
    masks,
    sum_gradients,
    sum_over_ranks,
)
from processes import free_port, run_ranks

SAMPLES = [{"input_ids": list(range(20))}]


def sums_of_rank(rank):
    """Rank 1 does not use the second weight, and no rank uses the third."""
    weights = nn.ParameterList(torch.full((2,), float(i + 1)) for i in range(3))
    weights.append(torch.ones(3, dtype=torch.float64))
    weights.append(nn.Parameter(torch.ones(1), requires_grad=False))
    loss = weights[0].sum() * (rank + 1) + weights[3].sum()
    if not rank:
        loss = loss + weights[1].sum() * 5
    loss.backward()
    sum_gradients(weights)
    total = sum_over_ranks(torch.tensor(float(rank))).item()
    return total, [None if w.grad is None else w.grad.tolist() for w in weights]


def test_gradients_are_summed_also_where_a_rank_did_not_use_a_parameter():
    for total, gradients in run_ranks(sums_of_rank, 2):
        assert total == 1
        assert gradients == [[3.0, 3.0], [5.0, 5.0], None, [2.0] * 3, None]


def summed_twice(rank):
    """A second sum raises, without a backward in between or after a further micro-batch. The next
    step does not raise, whether its gradients are new or were zeroed in place."""
    weights = nn.ParameterList([torch.ones(2), torch.ones(2)])
    optimizer, errors = torch.optim.SGD(weights.parameters()), []

    def step(*, zeroed, used=2):
        if zeroed is not None:
            optimizer.zero_grad(set_to_none=zeroed)
        for weight in list(weights)[:used]:
            (weight.sum() * (rank + 1)).backward()
        try:
            sum_gradients(weights)
        except ValueError as error:
            errors.append(str(error))

    step(zeroed=True)
    step(zeroed=None, used=0)
    step(zeroed=None)
    step(zeroed=None, used=1)
    found = len(errors)
    step(zeroed=True)
    step(zeroed=False)
    step(zeroed=False, used=1)
    return found, errors, [weight.grad.tolist() for weight in weights]


def test_gradients_that_were_summed_are_not_summed_again():
    for found, errors, gradients in run_ranks(summed_twice, 2):
        assert found == len(errors) == 2
        assert "call sum_gradients once per optimiser step, after the last micro-batch" in errors[0]
        assert gradients == [[3.0, 3.0], [0.0, 0.0]]


def made_too_early(rank, port):
    dist.destroy_process_group()
    loader = DCPDataLoader(SAMPLES, masks.causal, tokens_per_batch=20)
    executor, alone = DCPExecutor(), DCPExecutor(virtual_ranks=1)
    ((_, plan),) = loader
    executor.prepare(plan)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    alone.prepare(plan)
    errors = []
    for act in (lambda: iter(loader), lambda: executor.prepare(plan)):
        try:
            act()
        except ValueError as error:
            errors.append(str(error))
    dist.barrier()
    return errors


def test_what_was_made_before_the_process_group_does_not_run_on_every_rank_alone():
    for errors in run_ranks(made_too_early, 2, free_port()):
        assert ["made before torch.distributed was initialised" in e for e in errors] == [True] * 2

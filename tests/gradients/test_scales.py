"""Gradients that are multiples of the right ones are errors, also if clipping hides it; loops that
come to the right gradients in other ways are left alone."""

import logging
from functools import partial

import pytest
import torch
from small_model import Model, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dyncp import DCPExecutor, sum_gradients
from dyncp.gradients import times_ranks
from processes import run_ranks

RANKS, CLIP = 2, 0.01


def forget(model, group):
    """A loop without sum_gradients."""


def shard(model):
    for module in (*model.layers, model):
        fully_shard(module)
    return model


def by_hand(model, group):
    for parameter in model.parameters():
        parameter.grad *= RANKS


def too_early(model, last):
    if last:
        sum_gradients(model)


def made_before_sharding(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    return optimizer


def within_backward(model):
    """An optimiser for each parameter, which steps as soon as it has a gradient."""
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(partial(step_now, own))
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def step_now(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


class Told(logging.Handler):
    """Collects what the check of gradients logs."""

    def __enter__(self):
        self.texts = []
        logging.getLogger("dyncp.gradients").addHandler(self)
        return self

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("dyncp.gradients").removeHandler(self)


class Checkpointed(Model):
    def forward(self, data, step):
        x = self.tokens(data["input_ids"][0])
        for layer in self.layers:
            x = checkpoint(layer, x, step, use_reentrant=True)
        return self.logits(x)


def loops(rank):
    """What loops say, right ones first."""
    executor, told = DCPExecutor(timeout=60), {}

    def attempt(name, model, **options):
        try:
            train(executor, model, steps=5, **options)
            told[name] = ""
        except ValueError as error:
            told[name] = str(error)

    def over_ddp():
        return DistributedDataParallel(Model())

    scaler, averaged = torch.amp.GradScaler("cpu"), {"times": times_ranks, "reduce": forget}
    attempt("right: DDP, times ranks", over_ddp(), **averaged)
    attempt("right: FSDP, times ranks, 2 batches", shard(Model()), accumulation=2, **averaged)
    attempt("right: times ranks, scaled", over_ddp(), scaler=scaler, **averaged)
    attempt("right: times ranks, reentrant", DistributedDataParallel(Checkpointed()), **averaged)
    attempt("right: DDP undone by hand", over_ddp(), reduce=by_hand, clip=CLIP)
    attempt("right: steps left out", Model(), skip=lambda number: number % 2)
    attempt("right: a mean of means", Model(), accumulation=2, planned=1, times=lambda x: x / 2)
    attempt("right: a weight", Model(), times=lambda x: x * 0.3)
    attempt("clipped: DDP", over_ddp(), reduce=forget, clip=CLIP)
    attempt("clipped: FSDP", shard(Model()), reduce=forget, clip=CLIP, accumulation=2)
    attempt("loss / ranks", Model(), times=lambda x: x / RANKS, clip=CLIP)
    attempt("loss / batches", over_ddp(), times=lambda x: x / 3, accumulation=3, clip=CLIP)
    attempt("times ranks and summed", over_ddp(), times=times_ranks)
    attempt("loss * rank", Model(), times=lambda x: x * (rank + 1))
    attempt("too early", over_ddp(), accumulation=2, set_sync=too_early, reduce=forget)
    attempt("two of the loader's", Model(), accumulation=2, planned=1)
    attempt("half of the loader's", Model(), accumulation=1, planned=2)
    attempt("stale", Model(), optimizer=made_before_sharding)
    with Told() as heard:
        attempt("within backward", Model(), optimizer=within_backward, reduce=forget)
    told["warnings"] = heard.texts
    return told


@pytest.fixture(scope="module")
def told():
    return run_ranks(loops, RANKS)


def test_right_loops_are_left_alone(told):
    for of in told:
        assert {text for name, text in of.items() if name.startswith("right")} == {""}


def test_averages_that_are_clipped_are_errors(told):
    for of in told:
        for name in ("clipped: DDP", "clipped: FSDP"):
            assert "0.5 times the sum over ranks of what backward computed: DDP" in of[name]


def test_losses_multiplied_before_backward_are_errors(told):
    for of in told:
        for name, multiple in (("ranks", "0.5"), ("batches", "0.3333")):
            assert f"are {multiple} times those of the step's loss" in of[f"loss / {name}"]
            assert f"multiplied by {multiple}: use losses as they are" in of[f"loss / {name}"]
        assert "are 2 times those of the step's loss" in of["times ranks and summed"]
        assert "by different numbers before backward, 1 to 2" in of["loss * rank"]


def test_steps_of_other_batches_than_the_loader_planned_are_errors(told):
    for of in told:
        assert "backward added to gradients that sum_gradients had summed" in of["too early"]
        assert "sum of 2 of the loader's optimiser steps" in of["two of the loader's"]
        assert "before the loader's optimiser step is complete" in of["half of the loader's"]


def test_an_optimiser_of_parameters_that_were_replaced_is_an_error(told):
    for of in told:
        assert "Make the optimiser after fully_shard" in of["stale"]


def test_optimisers_that_step_during_backward_are_warned_of_once(told):
    for of in told:
        assert len(of["warnings"]) == 1
        assert "an optimiser steps during backward" in of["warnings"][0]

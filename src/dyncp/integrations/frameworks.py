"""What the integrations share: whether a model got a step and local data that belong to it, and the
mesh of loader and executor beside a framework's own process groups."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dyncp.checks import instance_of
from dyncp.dataloader.local_fields import LISTED, fingerprint_tensor
from dyncp.executor import Step

Kind = TypeVar("Kind")


def checked_step(name: str, given: Any, kind: type[Kind]) -> Kind:
    """What a layer got as argument `name`, which carries the step; ValueError if it does not."""
    call = "model(**model_inputs(local_data, executor.prepare(plan)))"
    instance_of(name, given, kind, f"the step of this batch: call {call}")
    return cast(Kind, given)


def check_batch(step: Step, positions: Tensor, batch: Tensor | None) -> None:
    """Raises ValueError where `positions` [1, rows] and the fingerprint `batch` (None: unknown) of
    local data are not those of the step."""
    if batch is not None:
        own = fingerprint_tensor(step.fingerprint)
        if batch.is_cuda:  # not waited for
            torch._assert_async((batch == own.to(batch.device, non_blocking=True)).all())
        elif not torch.equal(batch, own):
            raise ValueError(
                "local data and step are of different batches: the loader gives them together, as "
                "(local_data, plan); prepare that plan"
            )
    if positions.shape[1] != step.num_rows:
        raise ValueError(
            f"local data have {positions.shape[1]} rows and the step's plan {step.num_rows}: they "
            "are of different batches, or not this rank's"
        )


def check_one_row(num_rows: int) -> None:
    """Of tokens [rows, ...] that a model got."""
    if num_rows != 1:
        raise ValueError(f"the model got {num_rows} rows of tokens; local data have 1")


def check_single_targets(local_data: Mapping[str, Tensor], hint: str) -> None:
    """For losses of frameworks; `hint` says what to do instead."""
    if any(name in local_data for name in LISTED):
        raise ValueError(
            "the batch has tokens with several targets or weights (prefix trees), and this "
            f"framework's losses know one; {hint} with dyncp.next_token_loss"
        )


def check_processes(who: str, seen: int) -> None:
    """Raises ValueError unless a framework runs as many processes as torch.distributed."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if seen != ranks:
        raise ValueError(
            f"{who} runs {seen} process{'' if seen == 1 else 'es'} and torch.distributed {ranks}: "
            "every rank would train by its own gradients; start it by torchrun or accelerate launch"
        )


def make_mesh(device_type: str, data_ranks: int, tensor_ranks: int, cp: int | None) -> DeviceMesh:
    """(dp, cp, tp), tensor-parallel ranks being neighbours. `cp` of the `data_ranks` run a plan
    together (None: all); they divide them, and the others are replicas."""
    cp = data_ranks if cp is None else cp
    if cp < 1 or data_ranks % cp:
        raise ValueError(f"cp is {cp}; it has to divide the {data_ranks} data-parallel ranks")
    sizes = (data_ranks // cp, cp, tensor_ranks)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp", "tp"))

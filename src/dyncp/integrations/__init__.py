"""Integrations with training frameworks. This file has what they share: the checks that a model got
its step and local data of the same batch, and the mesh that loader and executor use."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dyncp.checks import instance_of
from dyncp.executor import Step
from dyncp.samples import TARGET_FIELDS
from dyncp.samples.local_data import fingerprint_tensor

# A rank's rows are padded to a multiple of this: it suits tensor cores, and no rank is empty.
ROWS = 8


def checked_step(name: str, given: Any, kind: type[Any]) -> Any:
    """The argument `name` that carries the step to a layer; ValueError unless it is a `kind`."""
    call = "model(**model_inputs(local_data, executor.prepare(plan)))"
    instance_of(name, given, kind, f"the step of this batch: call {call}")
    return given


def check_batch(step: Step, positions: Tensor, batch: Tensor | None) -> None:
    """Raises ValueError unless the local data's positions `[1, rows]` and batch fingerprint match
    the step."""
    own = fingerprint_tensor(step.fingerprint)
    if batch is None:
        raise ValueError(
            "the model was called without batch_fingerprint, which tells whether local data and "
            "step are of the same batch: pass it along with the other local data"
        )
    if batch.is_cuda:  # checked on the device, without a synchronization
        torch._assert_async((batch == own.to(batch.device, non_blocking=True)).all())
    elif not torch.equal(batch, own):
        raise ValueError(
            "local data and step are of different batches: prepare the plan that the loader "
            "yielded together with this local data"
        )
    check_rows(step, positions)


def check_rows(step: Step, positions: Tensor) -> None:
    """Raises ValueError unless there are as many positions `[1, rows]` as the step has rows."""
    if positions.shape[1] != step.num_rows:
        raise ValueError(
            f"local data have {positions.shape[1]} rows and the step's plan has {step.num_rows}: "
            "they are of different batches, or of different ranks"
        )


def check_one_row(batch_size: int) -> None:
    """Raises ValueError unless the batch size is 1: local data have shape `[1, rows]`."""
    if batch_size != 1:
        raise ValueError(f"the model got a batch size of {batch_size}; local data have 1")


def check_single_targets(local_data: Mapping[str, Tensor], hint: str) -> None:
    """Raises ValueError if tokens have several targets, for frameworks whose losses take one target
    per token. `hint` says what to do instead."""
    if any(name in local_data for name in TARGET_FIELDS):
        raise ValueError(
            "the batch has tokens with several targets or weights (prefix trees), but this "
            f"framework's losses take one target per token; {hint} with dyncp.next_token_loss"
        )


def check_processes(who: str, seen: int) -> None:
    """Raises ValueError unless a framework runs as many processes as torch.distributed."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if seen != ranks:
        raise ValueError(
            f"{who} runs {seen} process{'' if seen == 1 else 'es'} and torch.distributed {ranks}, "
            "so gradients would not be summed over all ranks; start it with torchrun or accelerate "
            "launch"
        )


def check_own_parallelism(sizes: Mapping[str, int]) -> None:
    """Raises ValueError if a framework's own context or pipeline parallelism is on; `sizes` maps
    the names of its settings to their values."""
    for setting, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{setting} is {size}, which does not work with dyncp: plans already split the "
                "sequences, and ranks get different numbers of rows. Set it to 1; its ranks then "
                "become data-parallel ranks"
            )


def make_mesh(device_type: str, data_ranks: int, tensor_ranks: int, cp: int | None) -> DeviceMesh:
    """The mesh (dp, cp, tp), in which the ranks of a tensor-parallel group are adjacent. Of the
    `data_ranks` data-parallel ranks, groups of `cp` run a plan together (None: all of them)."""
    cp = data_ranks if cp is None else cp
    if cp < 1 or data_ranks % cp:
        raise ValueError(f"cp is {cp}; it must divide the {data_ranks} data-parallel ranks")
    sizes = (data_ranks // cp, cp, tensor_ranks)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp", "tp"))

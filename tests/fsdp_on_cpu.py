"""Accelerate's FSDP2 on CPUs, which Accelerate itself uses on accelerators only."""

from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def use_fsdp(accelerator: Any) -> None:
    """Makes an Accelerator shard models with `fully_shard` from now on."""
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    for state in (accelerator.state, PartialState()):  # the first is updated by the second
        state.distributed_type = DistributedType.FSDP


def whole(weight: Any) -> Any:
    """A weight as an array, gathered if it is sharded."""
    tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return tensor.detach().numpy()

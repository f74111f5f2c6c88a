"""What FSDP2 (`fully_shard`) does with gradients. Torch has no interface for it, so this file reads
FSDP's own objects, of torch 2.11 to 2.13."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp import FSDPModule


class Sharded(NamedTuple):
    """A parameter that FSDP shards or replicates. Its gradient is that of `ranks`, added up and
    divided by `divisor`."""

    parameter: nn.Parameter  # this rank's shard, which the optimiser has
    whole: Tensor | None  # what layers use, with this rank's own gradient; None before forward
    ranks: frozenset[int]
    divisor: float
    copies: Any  # group of ranks that hold the same shard; None if only this one does
    state: Any  # FSDP's own object

    @property
    def waits(self) -> bool:
        """Whether it has gradients that were not reduced."""
        left = getattr(self.whole, "grad", None), self.state.unsharded_accumulated_grad
        return any(gradient is not None for gradient in left)


def sharded_parameters(modules: Iterable[nn.Module]) -> dict[int, Sharded]:
    """The parameters that FSDP manages in these modules, by the id of the optimiser's one."""
    return {id(found.parameter): found for module in modules for found in _of_module(module)}


def _of_module(module: nn.Module) -> Iterator[Sharded]:
    if not isinstance(module, FSDPModule):
        return
    state: Any = _get_module_state(module)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        for parameter in group.fsdp_params if group is not None else ():
            yield _of_parameter(group, parameter)


def _of_parameter(group: Any, parameter: Any) -> Sharded:
    mesh = group.mesh_info
    ranks = frozenset(mesh.mesh.mesh.flatten().tolist())
    whole = getattr(parameter, "_unsharded_param", None)
    return Sharded(
        parameter.sharded_param,
        whole,
        ranks,
        group.gradient_divide_factor or float(len(ranks)),
        getattr(mesh, "replicate_process_group", None),
        parameter,
    )

"""dyncp: dynamic context parallelism for long-context training.

    loader   = DCPDataLoader(dataset, masks.causal)
    executor = DCPExecutor(group=group)
    for local_data, plan in loader:
        step = executor.prepare(plan)
        loss = model(local_data, step)        # layers call DCPAttn.apply(step, q, kv)

Planning (masks to plan) needs no torch; the names that do are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

if TYPE_CHECKING:
    from dyncp.dataloader import DCPDataLoader, local_data, undo_gradient_average
    from dyncp.executor import DCPAttn, DCPExecutor, Step, attention

    DCPDataloader = DCPDataLoader

_LAZY = {
    "DCPAttn": "dyncp.executor",
    "DCPExecutor": "dyncp.executor",
    "Step": "dyncp.executor",
    "attention": "dyncp.executor",
    "DCPDataLoader": "dyncp.dataloader",
    "DCPDataloader": "dyncp.dataloader",
    "local_data": "dyncp.dataloader",
    "undo_gradient_average": "dyncp.dataloader",
}

__all__ = [
    "AttentionShape",
    "Batch",
    "DCPAttn",
    "DCPDataLoader",
    "DCPDataloader",
    "DCPExecutor",
    "Plan",
    "PlannerConfig",
    "RankPlan",
    "Step",
    "Topology",
    "attention",
    "local_data",
    "masks",
    "plan_batch",
    "undo_gradient_average",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dyncp' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)

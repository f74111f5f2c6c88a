"""dyncp: dynamic context parallelism for long-context training.

    loader   = DCPDataLoader(dataset, masks.causal)
    executor = DCPExecutor(group=group)
    for local_data, plan in loader:
        step = executor.prepare(plan)
        loss = model(local_data, step)        # layers call attention(step, q, k, v)

Planning (masks to plan) works without torch. Names that need torch are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import (
    CostModel,
    ModelConfig,
    Profile,
    StepTraffic,
    find_model,
    find_profile,
    load_profile,
    save_profile,
)
from dyncp.placement import Limits
from dyncp.plan import Layout, Plan, RankPlan, load_plan, save_plan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Link, Topology, preset

if TYPE_CHECKING:
    from dyncp.dataloader import (
        BatchMismatch,
        DCPDataLoader,
        LoaderTuning,
        PeerError,
        StoreError,
    )
    from dyncp.executor import DCPAttn, DCPExecutor, Step, attention
    from dyncp.gradients import sum_gradients, sum_over_ranks
    from dyncp.losses import next_token_loss, target_log_probs
    from dyncp.samples import SampleError, make_local_data
    from dyncp.transport import TransportError
    from dyncp.transport.distributed import Distributed

    DCPDataloader = DCPDataLoader

_LAZY = {
    "BatchMismatch": "dyncp.dataloader",
    "DCPAttn": "dyncp.executor",
    "DCPDataLoader": "dyncp.dataloader",
    "DCPDataloader": "dyncp.dataloader",
    "DCPExecutor": "dyncp.executor",
    "Distributed": "dyncp.transport.distributed",
    "LoaderTuning": "dyncp.dataloader",
    "PeerError": "dyncp.dataloader",
    "SampleError": "dyncp.samples",
    "Step": "dyncp.executor",
    "StoreError": "dyncp.dataloader",
    "TransportError": "dyncp.transport",
    "attention": "dyncp.executor",
    "make_local_data": "dyncp.samples",
    "next_token_loss": "dyncp.losses",
    "sum_gradients": "dyncp.gradients",
    "sum_over_ranks": "dyncp.gradients",
    "target_log_probs": "dyncp.losses",
}

__all__ = [
    "AttentionShape",
    "Batch",
    "BatchMismatch",
    "CostModel",
    "DCPAttn",
    "DCPDataLoader",
    "DCPDataloader",
    "DCPExecutor",
    "Distributed",
    "Layout",
    "Limits",
    "Link",
    "LoaderTuning",
    "ModelConfig",
    "PeerError",
    "Plan",
    "PlannerConfig",
    "Profile",
    "RankPlan",
    "SampleError",
    "Step",
    "StepTraffic",
    "StoreError",
    "Topology",
    "TransportError",
    "attention",
    "find_model",
    "find_profile",
    "load_plan",
    "load_profile",
    "make_local_data",
    "masks",
    "next_token_loss",
    "plan_batch",
    "preset",
    "save_plan",
    "save_profile",
    "sum_gradients",
    "sum_over_ranks",
    "target_log_probs",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dyncp' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

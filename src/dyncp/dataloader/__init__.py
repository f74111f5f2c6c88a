"""Batches, plans and local data for the training loop.

Names are loaded on first use: the planning process imports `plan_worker` from here, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.dataloader.config import LoaderConfig
    from dyncp.dataloader.errors import BatchMismatch, PeerError, SampleError, StoreError
    from dyncp.dataloader.loader import DCPDataLoader
    from dyncp.dataloader.local_tokens import count_targets, local_data
    from dyncp.dataloader.loss import sum_gradients, sum_over_ranks, undo_gradient_average
    from dyncp.dataloader.metrics import LoaderMetrics
    from dyncp.dataloader.samples import NO_TARGET

    DCPDataloader = DCPDataLoader

_LAZY = {
    "BatchMismatch": "errors",
    "DCPDataLoader": "loader",
    "LoaderConfig": "config",
    "LoaderMetrics": "metrics",
    "NO_TARGET": "samples",
    "PeerError": "errors",
    "SampleError": "errors",
    "StoreError": "errors",
    "count_targets": "local_tokens",
    "local_data": "local_tokens",
    "sum_gradients": "loss",
    "sum_over_ranks": "loss",
    "undo_gradient_average": "loss",
}

__all__ = [
    "NO_TARGET",
    "BatchMismatch",
    "DCPDataLoader",
    "DCPDataloader",
    "LoaderConfig",
    "LoaderMetrics",
    "PeerError",
    "SampleError",
    "StoreError",
    "count_targets",
    "local_data",
    "sum_gradients",
    "sum_over_ranks",
    "undo_gradient_average",
]


def __getattr__(name: str) -> Any:
    if name == "DCPDataloader":
        name = "DCPDataLoader"
    if name not in _LAZY:
        raise AttributeError(f"module 'dyncp.dataloader' has no attribute {name!r}")
    return getattr(import_module(f"dyncp.dataloader.{_LAZY[name]}"), name)

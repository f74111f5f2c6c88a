"""Batches, plans and local data for the training loop.

Names are loaded on first use: the planning process imports `planning_process` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.dataloader.loader import DCPDataLoader
    from dyncp.dataloader.local_fields import count_targets, local_data
    from dyncp.dataloader.loss import (
        next_token_loss,
        sum_gradients,
        sum_over_ranks,
        undo_gradient_average,
    )
    from dyncp.dataloader.metrics import LoaderMetrics
    from dyncp.dataloader.options import LoaderConfig
    from dyncp.dataloader.reading import SampleError
    from dyncp.dataloader.sample_format import NO_TARGET
    from dyncp.dataloader.store import BatchMismatch, PeerError, StoreError

    DCPDataloader = DCPDataLoader

_LAZY = {
    "BatchMismatch": "store",
    "DCPDataLoader": "loader",
    "LoaderConfig": "options",
    "LoaderMetrics": "metrics",
    "NO_TARGET": "sample_format",
    "PeerError": "store",
    "SampleError": "reading",
    "StoreError": "store",
    "count_targets": "local_fields",
    "local_data": "local_fields",
    "next_token_loss": "loss",
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
    "next_token_loss",
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

"""Batches, plans and local data for the training loop.

Names are loaded on first use: the planning process imports `planning` without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp.dataloader.loader import DCPDataLoader as DCPDataLoader
    from dyncp.dataloader.local_fields import count_targets as count_targets
    from dyncp.dataloader.local_fields import local_data as local_data
    from dyncp.dataloader.local_fields import next_token_loss as next_token_loss
    from dyncp.dataloader.local_fields import sum_gradients as sum_gradients
    from dyncp.dataloader.local_fields import sum_over_ranks as sum_over_ranks
    from dyncp.dataloader.local_fields import undo_gradient_average as undo_gradient_average
    from dyncp.dataloader.look_ahead import LoaderMetrics as LoaderMetrics
    from dyncp.dataloader.options import LoaderConfig as LoaderConfig
    from dyncp.dataloader.ranks import BatchMismatch as BatchMismatch
    from dyncp.dataloader.ranks import PeerError as PeerError
    from dyncp.dataloader.ranks import StoreError as StoreError
    from dyncp.dataloader.reading import NO_TARGET as NO_TARGET
    from dyncp.dataloader.reading import SampleError as SampleError

    DCPDataloader = DCPDataLoader

_MODULES = {
    "loader": ["DCPDataLoader"],
    "local_fields": [
        "count_targets", "local_data", "next_token_loss", "sum_gradients", "sum_over_ranks",
        "undo_gradient_average",
    ],
    "look_ahead": ["LoaderMetrics"],
    "options": ["LoaderConfig"],
    "ranks": ["BatchMismatch", "PeerError", "StoreError"],
    "reading": ["NO_TARGET", "SampleError"],
}  # fmt: skip
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["DCPDataloader", *_LAZY]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "DCPDataloader":
        name = "DCPDataLoader"
    if name not in _LAZY:
        raise AttributeError(f"module 'dyncp.dataloader' has no attribute {name!r}")
    return getattr(import_module(f"dyncp.dataloader.{_LAZY[name]}"), name)

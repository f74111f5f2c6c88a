"""Batches, plans and local data for the training loop."""

from dyncp.dataloader.loader import DCPDataLoader
from dyncp.dataloader.local_data import count_targets, local_data
from dyncp.dataloader.loss import undo_gradient_average
from dyncp.dataloader.samples import NO_TARGET

DCPDataloader = DCPDataLoader

__all__ = [
    "NO_TARGET",
    "DCPDataLoader",
    "DCPDataloader",
    "count_targets",
    "local_data",
    "undo_gradient_average",
]

"""Batches, plans and local data for the training loop."""

from dyncp.dataloader.loader import DCPDataLoader
from dyncp.dataloader.look_ahead import LoaderMetrics
from dyncp.dataloader.options import LoaderConfig, LoaderTuning
from dyncp.dataloader.peers import BatchMismatch, PeerError
from dyncp.dataloader.store import StoreError

DCPDataloader = DCPDataLoader

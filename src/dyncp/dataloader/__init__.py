"""Batches, plans and local data for the training loop."""

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

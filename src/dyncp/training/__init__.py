"""Losses over the targets of an optimiser step, and sums over ranks."""

from dyncp.training.gradients import sum_gradients, sum_over_ranks, undo_gradient_average
from dyncp.training.losses import next_token_loss

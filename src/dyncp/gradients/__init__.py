"""Which gradients are summed over which ranks: the sums, and a check of the first steps."""

from dyncp.gradients.check import GradientCheck
from dyncp.gradients.events import YieldedBatches, watch_loss
from dyncp.gradients.sums import sum_gradients, sum_over_ranks, times_ranks

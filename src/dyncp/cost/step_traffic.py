"""StepTraffic: what a training step moves besides attention, over the same links."""

from dataclasses import dataclass

from dyncp.blocks import ITEM_BYTES
from dyncp.checks import one_of, whole_number
from dyncp.topology import Topology

# Each with the number of times that all bytes travel around a ring.
# "reduced": every rank gets the whole sum (DDP). "sharded": every rank gets its shard (FSDP, and
# Megatron's distributed optimizer).
GRADIENTS = {"none": 0, "reduced": 2, "sharded": 1}
# "step": once per step (a distributed optimizer's all-gather). "layer": before every layer, forward
# and backward (FSDP).
GATHERED = {"none": 0, "step": 1, "layer": 2}


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Gradients and weights that the ranks of a plan exchange in a step.

    - `gradients`: none, reduced (DDP) or sharded (FSDP, distributed optimizers);
      `gradient_dtype` is that of the sums.
    - `gathered`: when weights are gathered: none, step or layer; `weight_dtype` is theirs.
    - `overlaps`: whether this travels while the model computes. Attention's messages use the same
      links, so only what these leave free hides it.
    - `batches`: batches per optimiser step.
    """

    gradients: str = "none"
    gathered: str = "none"
    overlaps: bool = True
    batches: int = 1
    gradient_dtype: str = "fp32"
    weight_dtype: str = "bf16"

    def __post_init__(self) -> None:
        one_of("StepTraffic.gradients", self.gradients, GRADIENTS)
        one_of("StepTraffic.gathered", self.gathered, GATHERED)
        whole_number("StepTraffic.batches", self.batches, 1)
        for field in ("gradient_dtype", "weight_dtype"):
            one_of(f"StepTraffic.{field}", getattr(self, field), ITEM_BYTES)

    def seconds(self, weights: float, topology: Topology) -> float:
        """Seconds of the links per batch, for `weights` weights on every rank.

        Sums and gathers run in rings: with n ranks, each sends (n − 1) / n of its bytes once for a
        gather or a scattered sum, twice for a whole sum. A ring crosses every node border once. On
        2 nodes with 10 GB/s each, the sum of 1e9 weights in fp32, scattered over 16 ranks, takes
        15 / 16 × 4 GB / 10 GB/s = 0.375 s.
        """
        ranks = topology.num_ranks
        alone = topology.nodes == 1
        bandwidth = topology.intra.bandwidth if alone else topology.inter.bandwidth
        once = weights * (ranks - 1) / ranks / bandwidth
        sums, gathers = GRADIENTS[self.gradients] / self.batches, float(GATHERED[self.gathered])
        if self.gathered == "step":
            gathers /= self.batches
        bytes_each = ITEM_BYTES[self.gradient_dtype], ITEM_BYTES[self.weight_dtype]
        return once * (sums * bytes_each[0] + gathers * bytes_each[1])

"""Simulated: the time of one optimiser step's forward and backward under a plan."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dyncp.simulate.attention_times import AttentionTimes

Both = tuple[AttentionTimes, AttentionTimes | None]


@dataclass(frozen=True, eq=False)
class Simulated:
    """Seconds of a step.

    `attention` has the forward and backward times of one layer per mask name, `layers` how many
    layers use that mask. `token_seconds` is the per-token work of the fullest rank, forward and
    backward, 0 without a model. `ideal_seconds` is the step without communication and kernel-call
    overhead and with all work spread evenly.
    """

    attention: Mapping[str, Both]
    layers: Mapping[str, float]
    token_seconds: float
    ideal_seconds: float

    @property
    def num_layers(self) -> float:
        return sum(self.layers.values())

    @property
    def forward_seconds(self) -> float:
        """One attention layer; the mean over layers when they have different masks."""
        return self._per_layer(0, "seconds")

    @property
    def backward_seconds(self) -> float:
        """As forward_seconds; 0 in plans for evaluation."""
        return self._per_layer(1, "seconds")

    @property
    def layer_seconds(self) -> float:
        """One attention layer, forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to one attention layer, forward and backward together."""
        return self._per_layer(0, "exposed_seconds") + self._per_layer(1, "exposed_seconds")

    @property
    def attention_seconds(self) -> float:
        """All attention layers, forward and backward."""
        return self.num_layers * self.layer_seconds

    @property
    def step_seconds(self) -> float:
        """All attention layers and the per-token work, forward and backward."""
        return self.attention_seconds + self.token_seconds

    def runs(self) -> Iterator[tuple[str, AttentionTimes]]:
        """Every simulated direction with a name for it, forward ones first."""
        for side, direction in enumerate(("forward", "backward")):
            for name, both in self.attention.items():
                times = both[side]
                if times is not None:
                    yield f"{name} {direction}", times

    def _per_layer(self, side: int, field: str) -> float:
        total = 0.0
        for name, both in self.attention.items():
            times = both[side]
            if times is not None and self.layers[name]:
                total += self.layers[name] * float(getattr(times, field))
        return total / self.num_layers

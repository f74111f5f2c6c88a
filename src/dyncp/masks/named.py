"""Several masks by name, for models whose layers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dyncp.masks.compose import IntArray, agree
from dyncp.masks.function import Sample
from dyncp.masks.mask import Mask

AnyMaskFunction = Callable[[Any], Mask]


@dataclass(frozen=True, repr=False)
class NamedMasks:
    """A function of a sample (or a length) that gives a mask for every name."""

    functions: dict[str, AnyMaskFunction]

    def __call__(self, subject: int | Sample) -> dict[str, Mask]:
        result = {name: function(subject) for name, function in self.functions.items()}
        lengths = {name: mask.length for name, mask in result.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"masks of one sample have different lengths: {lengths}")
        positions_and_targets(result.values())
        return result

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={function!r}" for name, function in self.functions.items())
        return f"masks.named({given})"


def named(**functions: AnyMaskFunction) -> NamedMasks:
    """One mask per name: `named(default=masks.causal, local=masks.sliding_window(window=1024))`.

    A layer asks for its mask by name; "default" is the one of layers that do not ask. Positions and
    targets belong to the sample, so masks that set them have to set them alike.
    """
    if not functions:
        raise ValueError("masks.named needs at least one mask, such as default=masks.causal")
    for name, function in functions.items():
        if not callable(function):
            raise ValueError(
                f"masks.named: {name} is {type(function).__name__}; allowed is a mask function"
            )
    return NamedMasks(functions)


def positions_and_targets(masks: Iterable[Mask]) -> tuple[IntArray | None, IntArray | None]:
    """Those of one sequence, which may have several masks: each comes from the masks that set it,
    which have to set it alike; None is the default."""
    positions: IntArray | None = None
    targets: IntArray | None = None
    for mask in masks:
        positions = agree("positions", positions, mask.positions)
        targets = agree("targets", targets, mask.targets)
    return positions, targets

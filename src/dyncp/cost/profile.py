"""Profile: what one kind of machine can do."""

import math
from dataclasses import dataclass

from dyncp.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of one rank, and the links of a machine with `ranks_per_machine` of them.

    `attention_forward` and `attention_backward` are FLOP/s of the attention kernel on kernel tiles
    that are full; `kernel_tile` is their side in rows. `call_seconds` is what a kernel call costs
    on top of its tiles. `dense` is FLOP/s of the linear layers. `copy` is bytes per second of
    packing and unpacking messages. Links, NICs and `ordered_phases` are those of `Topology`.
    `overlap_slowdown` is how many times longer attention takes while messages come in; it is
    reported, and simulations do not use it.
    """

    name: str
    attention_forward: float
    attention_backward: float
    dense: float
    copy: float
    call_seconds: float
    kernel_tile: int
    ranks_per_machine: int
    intra: Link
    inter: Link
    nics: int
    ordered_phases: bool = True
    overlap_slowdown: float = 1.0

    def __post_init__(self) -> None:
        for field in ("attention_forward", "attention_backward", "dense", "copy"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"Profile.{field} is {value}; a finite number above 0 is needed")
        if not 0 <= self.call_seconds < math.inf:
            raise ValueError(
                f"Profile.call_seconds is {self.call_seconds}; seconds from 0 on are allowed"
            )
        if not 1 <= self.overlap_slowdown < math.inf:
            raise ValueError(
                f"Profile.overlap_slowdown is {self.overlap_slowdown}; "
                "factors from 1 on are allowed"
            )
        for field in ("kernel_tile", "ranks_per_machine", "nics"):
            if getattr(self, field) < 1:
                raise ValueError(f"Profile.{field} is {getattr(self, field)}; at least 1 is needed")

    def topology(
        self,
        machines: int = 1,
        ranks_per_machine: int | None = None,
        speeds: tuple[float, ...] = (),
    ) -> Topology:
        """A cluster of such machines, with fewer (or more) ranks in each where asked for."""
        ranks = self.ranks_per_machine if ranks_per_machine is None else ranks_per_machine
        return Topology(
            machines,
            ranks,
            self.intra,
            self.inter,
            self.nics,
            speeds,
            self.ordered_phases,
            self.name,
        )

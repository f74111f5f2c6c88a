"""Profile: what one kind of machine can do."""

import math
from dataclasses import dataclass

from dyncp.topology import Link, Topology

_SLOWDOWNS = ("overlap_slowdown", "edge_forward", "edge_backward")
_SECONDS = ("call_seconds", "launch_seconds", "host_seconds", "host_seconds_eager")


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of one rank, and the links of a machine with `ranks_per_machine` of them.

    `attention_forward` and `attention_backward` are FLOP/s of the attention kernel on kernel tiles
    that are full; `kernel_tile` is their side in rows. `call_seconds` is what a kernel call costs
    on top of its tiles. `dense` is FLOP/s of the linear layers. `copy` is bytes per second of
    copying, as packing and unpacking of messages do: a byte read and written counts once. Links,
    NICs and `ordered_phases` are those of `Topology`. `overlap_slowdown` is how many times longer
    attention takes while messages come in or go out. `edge_forward` and `edge_backward` are how
    many times longer a kernel tile takes that is not full: with a mask's edge or the end of a block
    in it.
    `row_forward` and `row_backward` are what each row of kernel tiles in a call (backward: column)
    costs on top, as many keys; `lanes` is how many of them run at a time, each on a processor of
    its own, at the full rate all together. `launch_seconds` is the gap between kernels that follow
    each other; where it is 0, a call is its attention kernels and the copies of messages, and
    nothing else is priced (see row_work.py). `host_seconds` is what the host needs to issue one
    instruction of a program when plans are replayed as graphs, `host_seconds_eager` when they are
    not. The defaults leave all of this out.
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
    edge_forward: float = 1.0
    edge_backward: float = 1.0
    row_forward: float = 0.0
    row_backward: float = 0.0
    lanes: int = 0
    launch_seconds: float = 0.0
    host_seconds: float = 0.0
    host_seconds_eager: float = 0.0

    def __post_init__(self) -> None:
        for field in ("attention_forward", "attention_backward", "dense", "copy"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"Profile.{field} is {value}; a finite number above 0 is needed")
        for field in _SECONDS:
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(
                    f"Profile.{field} is {getattr(self, field)}; seconds from 0 on are allowed"
                )
        for least, names in ((1, _SLOWDOWNS), (0, ("row_forward", "row_backward", "lanes"))):
            for field in names:
                value = getattr(self, field)
                if not least <= value < math.inf:
                    raise ValueError(
                        f"Profile.{field} is {value}; numbers from {least} on are allowed"
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

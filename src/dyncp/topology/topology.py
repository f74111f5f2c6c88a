"""Topology: machines with equally many ranks, their links and speeds."""

from dataclasses import dataclass, replace

import numpy as np

from dyncp.arrays import Float64, frozen
from dyncp.checks import finite_number, instance_of, whole_number
from dyncp.topology.link import Link

# Those of a p4de machine, see presets.py.
DEFAULT_INTRA = Link(latency=5e-6, bandwidth=240e9)
DEFAULT_INTER = Link(latency=20e-6, bandwidth=45e9)
DEFAULT_NICS = 4
MOST_RANKS = 2**16


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank r runs on machine r // ranks_per_machine.

    A machine's `nics` share the bandwidth of `inter` evenly, and its ranks are spread over them: 8
    ranks and 4 NICs make pairs that share one; with 8 NICs every rank has its own.
    `speeds` are the ranks' compute speeds relative to the profile (empty: all 1.0; 0.5 takes twice
    as long). With `ordered_phases` a rank's phase starts to travel only when its earlier ones have
    arrived, inside machines and between them apart, as on two NCCL communicators; without, every
    launched message may travel, and those under way share links evenly, as over gloo.
    """

    machines: int = 1
    ranks_per_machine: int = 1
    intra: Link = DEFAULT_INTRA
    inter: Link = DEFAULT_INTER
    nics: int = DEFAULT_NICS
    speeds: tuple[float, ...] = ()
    ordered_phases: bool = True
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("machines", "ranks_per_machine", "nics"):
            value = whole_number(f"Topology.{field}", getattr(self, field), 1, MOST_RANKS)
            object.__setattr__(self, field, value)
        if self.num_ranks > MOST_RANKS:
            raise ValueError(
                f"Topology has {self.machines} × {self.ranks_per_machine} = {self.num_ranks} "
                f"ranks; at most {MOST_RANKS:,} are allowed"
            )
        for field in ("intra", "inter"):
            instance_of(f"Topology.{field}", getattr(self, field), Link, "a Link")
        instance_of("Topology.speeds", self.speeds, (tuple, list), "a tuple with one per rank")
        if self.speeds:
            _check_speeds(self.speeds, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.machines * self.ranks_per_machine

    @property
    def nic_bandwidth(self) -> float:
        """Bytes per second of one NIC, each way."""
        return self.inter.bandwidth / self.nics

    @property
    def ranks_per_nic(self) -> int:
        """Ranks that share a NIC, 1 where there are more NICs than ranks."""
        return max(1, self.ranks_per_machine // self.nics)

    @property
    def rank_speeds(self) -> Float64:
        return frozen(self.speeds or np.ones(self.num_ranks), np.float64)

    def machine_of(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; allowed are 0 to {self.num_ranks - 1}")
        return rank // self.ranks_per_machine

    def check_ranks(self, num_ranks: int, what: str) -> None:
        """Raises ValueError unless `what`, made for `num_ranks` ranks, fits."""
        if num_ranks != self.num_ranks:
            raise ValueError(
                f"the {what} has {num_ranks} ranks, but Topology(machines={self.machines}, "
                f"ranks_per_machine={self.ranks_per_machine}) has {self.num_ranks}; "
                "both must have the same"
            )

    def scaled(self, bandwidth: float = 1.0, latency: float = 1.0) -> "Topology":
        """All links with this many times the bandwidth and the latency."""
        intra, inter = self.intra.scaled(bandwidth, latency), self.inter.scaled(bandwidth, latency)
        return replace(self, intra=intra, inter=inter)

    def jittered(self, spread: float, seed: int) -> "Topology":
        """Every rank up to `spread` (a share from 0 to below 1) slower, at random."""
        if not 0 <= spread < 1:
            raise ValueError(f"spread is {spread}; allowed are shares from 0 to below 1")
        slower = 1 - spread * np.random.default_rng(seed).random(self.num_ranks)
        return replace(self, speeds=tuple((self.rank_speeds * slower).tolist()))


def _check_speeds(speeds: tuple[float, ...], num_ranks: int) -> None:
    if len(speeds) != num_ranks:
        raise ValueError(
            f"Topology.speeds has {len(speeds)} entries for {num_ranks} ranks; "
            "one per rank is needed, or none"
        )
    wrong = [speed for speed in speeds if not finite_number("Topology.speeds", speed) > 0]
    if wrong:
        raise ValueError(f"Topology.speeds holds {wrong[0]}; finite numbers above 0 are needed")

"""Topology: the nodes and ranks that a plan is made for, and their links; presets by name."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dyncp.arrays import Float64, frozen
from dyncp.checks import MOST_RANKS, finite_number, instance_of, one_of, whole_number


@dataclass(frozen=True, slots=True)
class Link:
    """`latency` in seconds per message, `bandwidth` in bytes per second in each direction.

    The intra-node bandwidth is that of one rank's port. The inter-node bandwidth is that of all
    NICs of a node together.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        for field in ("latency", "bandwidth"):
            instance_of(f"Link.{field}", getattr(self, field), (int, float), "a number")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"Link.latency is {self.latency}; it must be finite and at least 0")
        if not 0 < self.bandwidth < math.inf:
            raise ValueError(f"Link.bandwidth is {self.bandwidth}; it must be finite and above 0")

    def scaled(self, bandwidth: float, latency: float) -> "Link":
        return Link(self.latency * latency, self.bandwidth * bandwidth)


# The links of a p4de node, see PRESETS.
DEFAULT_INTRA = Link(latency=5e-6, bandwidth=240e9)
DEFAULT_INTER = Link(latency=20e-6, bandwidth=45e9)
DEFAULT_NICS = 4


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank r runs on node r // ranks_per_node.

    A node's `nics` share the bandwidth of `inter` evenly, and its ranks are spread over them: with
    8 ranks and 4 NICs, two ranks share a NIC; with 8 NICs, every rank has its own.
    `speeds` are the ranks' compute speeds relative to the profile (empty: all 1.0; 0.5 takes twice
    as long). With `ordered_phases`, a phase of a rank starts to travel only when the rank's earlier
    phases have arrived, separately for intra-node and inter-node messages, as on two NCCL
    communicators. Without, every launched message may travel, and messages in flight share links
    evenly, as over gloo.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    intra: Link = DEFAULT_INTRA
    inter: Link = DEFAULT_INTER
    nics: int = DEFAULT_NICS
    speeds: tuple[float, ...] = ()
    ordered_phases: bool = True
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("nodes", "ranks_per_node", "nics"):
            value = whole_number(f"Topology.{field}", getattr(self, field), 1, MOST_RANKS)
            object.__setattr__(self, field, value)
        if self.num_ranks > MOST_RANKS:
            raise ValueError(
                f"Topology has {self.nodes} × {self.ranks_per_node} = {self.num_ranks} "
                f"ranks; at most {MOST_RANKS:,} are allowed"
            )
        for field in ("intra", "inter"):
            instance_of(f"Topology.{field}", getattr(self, field), Link, "a Link")
        instance_of("Topology.speeds", self.speeds, (tuple, list), "a tuple with one per rank")
        if self.speeds:
            _check_speeds(self.speeds, self.num_ranks)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nic_bandwidth(self) -> float:
        """Bytes per second of one NIC, in each direction."""
        return self.inter.bandwidth / self.nics

    @property
    def ranks_per_nic(self) -> int:
        """Number of ranks that share a NIC; 1 if there are more NICs than ranks."""
        return max(1, self.ranks_per_node // self.nics)

    @property
    def rank_speeds(self) -> Float64:
        return frozen(self.speeds or np.ones(self.num_ranks), np.float64)

    def node_of(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank is {rank}; allowed are 0 to {self.num_ranks - 1}")
        return rank // self.ranks_per_node

    def check_ranks(self, num_ranks: int, what: str) -> None:
        """Raises ValueError unless this topology has `num_ranks` ranks, like `what`."""
        if num_ranks != self.num_ranks:
            raise ValueError(
                f"the {what} has {num_ranks} ranks, but Topology(nodes={self.nodes}, "
                f"ranks_per_node={self.ranks_per_node}) has {self.num_ranks}; "
                "both must have the same"
            )

    def slice(self, tp: int) -> "Topology":
        """The links that one of `tp` tensor-parallel ranks has, if each rank of this topology
        stands for `tp` neighbouring GPUs, whose messages share the NICs of their node.

        On a node with 4 NICs and 2 × 4 GPUs, two GPUs share a NIC: a rank has half a NIC."""
        if tp == 1:
            return self
        per_nic = max(1.0, self.ranks_per_node * tp / self.nics)
        sharing = min(per_nic, tp)
        nics = max(1, round(self.ranks_per_node / max(1.0, per_nic / tp)))
        inter = Link(self.inter.latency, nics * self.nic_bandwidth / sharing)
        return replace(self, inter=inter, nics=nics)

    def scaled(self, bandwidth: float = 1.0, latency: float = 1.0) -> "Topology":
        """This topology with the bandwidth and latency of all links multiplied by these factors."""
        intra, inter = self.intra.scaled(bandwidth, latency), self.inter.scaled(bandwidth, latency)
        return replace(self, intra=intra, inter=inter)

    def jittered(self, spread: float, seed: int) -> "Topology":
        """This topology with every rank slowed down by a random share below `spread`, 0 to 1."""
        if not 0 <= spread < 1:
            raise ValueError(f"spread is {spread}; it must be at least 0 and below 1")
        slower = 1 - spread * np.random.default_rng(seed).random(self.num_ranks)
        return replace(self, speeds=tuple((self.rank_speeds * slower).tolist()))


def _check_speeds(speeds: tuple[float, ...], num_ranks: int) -> None:
    if len(speeds) != num_ranks:
        raise ValueError(
            f"Topology.speeds has {len(speeds)} entries for {num_ranks} ranks; "
            "give one per rank, or none"
        )
    wrong = [speed for speed in speeds if not finite_number("Topology.speeds", speed) > 0]
    if wrong:
        raise ValueError(f"Topology.speeds holds {wrong[0]}; speeds must be finite and above 0")


# Clusters by name. Bandwidths are vendor figures times the share that large messages are assumed to
# achieve: 0.8 for NVLink, 0.9 for a NIC. Latencies are assumptions. `dyncp calibrate` measures
# both.
PRESETS = {
    # 8 × A100-80G. NVSwitch: 600 GB/s per GPU, both directions together. 4 × 100 Gb/s per node, one
    # NIC for every two GPUs.
    "p4de": Topology(1, 8, DEFAULT_INTRA, DEFAULT_INTER, DEFAULT_NICS),
    # 8 × H100 or H200. NVLink 4: 900 GB/s per GPU, both directions together. One 400 Gb/s NIC per
    # GPU.
    "h100": Topology(1, 8, Link(5e-6, 360e9), Link(15e-6, 360e9), 8),
    "h200": Topology(1, 8, Link(5e-6, 360e9), Link(15e-6, 360e9), 8),
    # 72 × B200 in one NVLink domain, which is one node here. NVLink 5: 1.8 TB/s per GPU, both
    # directions together. One 400 Gb/s NIC per GPU.
    "gb200_nvl72": Topology(1, 72, Link(5e-6, 720e9), Link(15e-6, 3240e9), 72),
    # Processes that use loopback inside a node, and 10 Gb/s Ethernet between nodes. Estimates.
    "cpu_gloo": Topology(1, 4, Link(100e-6, 1.5e9), Link(150e-6, 1.1e9), 1, ordered_phases=False),
}


# Other names of presets.
ALIASES = {"a100": "p4de", "gb200": "gb200_nvl72"}


def preset(name: str, nodes: int = 1, ranks_per_node: int | None = None) -> Topology:
    """A cluster of `nodes` nodes, with the preset's ranks per node by default.

    With fewer ranks, a node keeps all of its NICs, and every rank still uses one of them.
    """
    one_of("topology preset", name, (*PRESETS, *ALIASES))
    name = ALIASES.get(name, name)
    base = PRESETS[name]
    ranks = base.ranks_per_node if ranks_per_node is None else ranks_per_node
    return replace(base, nodes=nodes, ranks_per_node=ranks, name=name)


def data_dimensions(mesh: Any) -> list[str]:
    """The dimensions of a mesh along which ranks have different tokens: dp... and "cp"."""
    names = mesh.mesh_dim_names or ()
    return [name for name in names if name == "cp" or name.startswith("dp")]

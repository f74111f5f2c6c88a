"""Clusters by name.

Bandwidths are vendor figures times the share that large messages are assumed to reach: 0.8 of
NVLink, 0.9 of a NIC. Latencies are assumptions. Both are meant to be replaced by measurements: see
the profile file of `dyncp.cost`.
"""

from dataclasses import replace

from dyncp.topology.link import Link
from dyncp.topology.topology import DEFAULT_INTER, DEFAULT_INTRA, DEFAULT_NICS, Topology

PRESETS = {
    # 8 × A100-80G. NVSwitch: 600 GB/s per GPU, both ways together. 4 × 100 Gb/s per machine, one
    # for every two GPUs.
    "p4de": Topology(1, 8, DEFAULT_INTRA, DEFAULT_INTER, DEFAULT_NICS),
    # 8 × H200. NVLink 4: 900 GB/s per GPU, both ways together. One 400 Gb/s NIC per GPU.
    "h200": Topology(1, 8, Link(5e-6, 360e9), Link(15e-6, 360e9), 8),
    # 72 × B200 in one NVLink domain, which counts as one machine here. NVLink 5: 1.8 TB/s per GPU,
    # both ways together. One 400 Gb/s NIC per GPU.
    "gb200_nvl72": Topology(1, 72, Link(5e-6, 720e9), Link(15e-6, 3240e9), 72),
    # Processes of one machine over loopback, 10 Gb/s Ethernet between machines. Estimates.
    "cpu_gloo": Topology(1, 4, Link(100e-6, 1.5e9), Link(150e-6, 1.1e9), 1, ordered_phases=False),
}


def preset(name: str, machines: int = 1, ranks_per_machine: int | None = None) -> Topology:
    """A cluster of `machines` machines; by default with as many ranks as the preset's machine has.

    With fewer ranks than that a machine keeps its NICs, and a rank still uses one of them.
    """
    if name not in PRESETS:
        raise ValueError(f"topology preset is {name!r}; choose one of {', '.join(PRESETS)}")
    base = PRESETS[name]
    ranks = base.ranks_per_machine if ranks_per_machine is None else ranks_per_machine
    return replace(base, machines=machines, ranks_per_machine=ranks, name=name)

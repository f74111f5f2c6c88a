"""A topology's ports, and which of them messages pass.

A message passes two ports: inside a machine its source's and its target's own, between machines the
NIC of its source and that of its target. Every port works each way on its own. With n ranks and m
NICs in all machines the ports are numbered

    0 to n     out of a rank      2n to 2n + m        out of a NIC
    n to 2n    into a rank        2n + m to 2n + 2m   into a NIC
"""

import numpy as np

from dyncp.arrays import Bool, Float64, Int64
from dyncp.topology import Topology


def port_bandwidths(topology: Topology) -> Float64:
    """Bytes per second of every port."""
    own, nics = 2 * topology.num_ranks, 2 * topology.machines * topology.nics
    return np.repeat([topology.intra.bandwidth, topology.nic_bandwidth], [own, nics])


def is_inside(topology: Topology, source: Int64, target: Int64) -> Bool:
    """Which messages stay inside a machine."""
    inside: Bool = source // topology.ranks_per_machine == target // topology.ranks_per_machine
    return inside


def nic_of(topology: Topology, rank: Int64) -> Int64:
    """The NIC of every rank, counted over all machines."""
    machine, local = np.divmod(rank, topology.ranks_per_machine)
    nic: Int64 = machine * topology.nics + local * topology.nics // topology.ranks_per_machine
    return nic


def routes(topology: Topology, source: Int64, target: Int64) -> Int64:
    """The two ports of every message, int64[messages, 2]."""
    n, m = topology.num_ranks, topology.machines * topology.nics
    inside = np.stack([source, n + target], axis=1)
    out_of, into = nic_of(topology, source), nic_of(topology, target)
    between = np.stack([2 * n + out_of, 2 * n + m + into], axis=1)
    return np.where(is_inside(topology, source, target)[:, None], inside, between)

"""Builds nodes from network namespaces, with links of a chosen rate. Needs root.

Every rank has a namespace with two interfaces: `inside` connects to the ranks of its node,
`between` to all other ranks, over a link that the node's ranks share. Bridges and the other ends
are in one more namespace, the hub:

    rank 0 ─ inside ══╗                  node 0                       node 1
    rank 1 ─ inside ══╩ bridge
    rank 0 ─ between ─╖
    rank 1 ─ between ─╨ bridge ══ bridge of all nodes ══ bridge ─╥─ between ─ rank 2
                                                                    ╙─ between ─ rank 3

Double lines are shaped at both ends, each direction separately, by a token bucket (htb). Small
packets (acknowledgements, and gloo's messages that a receiver is ready) overtake data: queued after
other ranks' data they would arrive tens of milliseconds late, and slow down ranks that send both
ways. Queues are long enough that nothing is dropped.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Bytes of a packet before it is cut into frames, and the burst size of a token bucket.
PACKET, BURST = 8_192, 10_000
QUEUE = 64 << 20
NAMESPACES = Path("/run/netns")
SMALL = 256  # a power of two: shorter packets go first
# Bytes that a connection may have in flight; more would only wait in queues and delay others.
IN_FLIGHT = 32_768
SETTINGS = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_wmem": f"4096 {IN_FLIGHT} {IN_FLIGHT}",
}


class NotAllowedError(Exception):
    """Says why namespaces or shaped links cannot be created here."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Megabits per second in each direction: of a rank inside its node, and of a node."""

    inside: int
    between: int


class Namespaces:
    """`with Namespaces(nodes, ranks_per_node, rates) as net:` creates the namespaces, and removes
    them with all their interfaces at the end."""

    def __init__(self, nodes: int, ranks_per_node: int, rates: Rates) -> None:
        self.nodes, self.ranks_per_node, self.rates = nodes, ranks_per_node, rates
        self.num_ranks = nodes * ranks_per_node
        self._prefix, self._made = f"dyncp{os.getpid()}", list[str]()

    def name(self, rank: int) -> str:
        return f"{self._prefix}-rank{rank}"

    @staticmethod
    def address(rank: int) -> str:
        return f"10.77.{rank // 200}.{rank % 200 + 1}"

    def __enter__(self) -> "Namespaces":
        _remove_left_over()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(self._made):
            _delete(name)
        self._made.clear()

    @property
    def _hub(self) -> str:
        return f"{self._prefix}-hub"

    def _build(self) -> None:
        self._make_namespace(self._hub)
        self._make_bridge("core")
        for node in range(self.nodes):
            self._make_node(node)
        for rank in range(self.num_ranks):
            self._make_rank(rank)

    def _make_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)
        _run("ip", "-n", name, "link", "set", "dev", "lo", "up")

    def _make_bridge(self, name: str) -> None:
        _run("ip", "-n", self._hub, "link", "add", "name", name, "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "dev", name, "up")

    def _make_node(self, node: int) -> None:
        inside, between = f"inside{node}", f"between{node}"
        self._make_bridge(inside)
        self._make_bridge(between)
        ends = (self._hub, f"up{node}"), (self._hub, f"down{node}")
        _connect(*ends)
        for (space, end), bridge in zip(ends, (between, "core"), strict=True):
            _run("ip", "-n", space, "link", "set", "dev", end, "master", bridge)
            _shape(space, end, self.rates.between)

    def _make_rank(self, rank: int) -> None:
        name, node = self.name(rank), rank // self.ranks_per_node
        self._make_namespace(name)
        for setting, value in SETTINGS.items():
            _run("ip", "netns", "exec", name, "sysctl", "-qw", f"{setting}={value}")
        for side in ("inside", "between"):
            ends = (name, side), (self._hub, f"{side[0]}{rank}")
            _connect(*ends)
            _run(
                "ip",
                "-n",
                self._hub,
                "link",
                "set",
                "dev",
                ends[1][1],
                "master",
                f"{side}{node}",
            )
            if side == "inside":
                for end in ends:
                    _shape(*end, self.rates.inside)
        _run("ip", "-n", name, "address", "add", f"{self.address(rank)}/16", "dev", "between")
        first = node * self.ranks_per_node
        for peer in set(range(first, first + self.ranks_per_node)) - {rank}:
            to, own = f"{self.address(peer)}/32", self.address(rank)
            _run("ip", "-n", name, "route", "add", to, "dev", "inside", "src", own)


def _delete(namespace: str) -> None:
    command = ["ip", "netns", "delete", namespace]
    subprocess.run(command, check=False, capture_output=True, timeout=30)


def _remove_left_over() -> None:
    """Removes namespaces of processes that were killed before they could do it."""
    for path in NAMESPACES.glob("dyncp*-*"):
        process = path.name.removeprefix("dyncp").partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            _delete(path.name)


def _connect(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Connects two interfaces, each given as a namespace and a name."""
    peer = ["type", "veth", "peer", "name", other[1], "netns", other[0]]
    _run("ip", "link", "add", "name", one[1], "netns", one[0], *peer)
    for space, end in (one, other):
        _run("ip", "-n", space, "link", "set", "dev", end, "gso_max_size", str(PACKET), "up")


def _shape(space: str, end: str, rate: int) -> None:
    """Limits the rate of an interface; small packets go first."""
    tc = ["tc", "-n", space]
    where = ["dev", end, "parent"]
    bucket = ["htb", "rate", f"{rate}mbit", "burst", f"{BURST}b", "cburst", f"{BURST}b"]
    share = ["htb", "rate", f"{rate // 2}mbit", "ceil", *bucket[2:], "quantum", f"{PACKET}"]
    _run(*tc, "qdisc", "add", "dev", end, "root", "handle", "1:", "htb", "default", "3")
    _run(*tc, "class", "add", *where, "1:", "classid", "1:1", *bucket)
    for number, prio in ((2, 0), (3, 1)):
        own = f"1:{number}"
        _run(*tc, "class", "add", *where, "1:1", "classid", own, *share, "prio", str(prio))
        _run(*tc, "qdisc", "add", *where, own, "pfifo", "limit", str(QUEUE // PACKET))
    small = ["match", "u16", "0", hex(0x10000 - SMALL), "at", "2"]  # the length of an IP packet
    _run(*tc, "filter", "add", *where, "1:", "protocol", "ip", "u32", *small, "flowid", "1:2")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAllowedError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        reason = said[0] if said else f"exit status {done.returncode}"
        raise NotAllowedError(f"{' '.join(command)}: {reason}")

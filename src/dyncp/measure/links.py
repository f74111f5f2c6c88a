"""Links between ranks: messages of many sizes, and the latency and bandwidth that explain them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.measure.fit import fit_seconds
from dyncp.measure.timing import wait_for
from dyncp.measure.world import World
from dyncp.topology import Link

# Bytes of messages, by kind of device.
SIZES = {
    "cpu": (4 << 10, 64 << 10, 512 << 10, 4 << 20),
    "cuda": (64 << 10, 1 << 20, 16 << 20, 128 << 20),
}
WARM_UP = 2

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link, the relative error of its fit, and what was measured: (bytes, seconds) each."""

    link: Link
    mean_error: float
    messages: tuple[tuple[int, float], ...]


def measure_link(pairs: Pairs, world: World, repeats: int = 5) -> MeasuredLink:
    """Latency and bandwidth of one of `pairs` while all of them exchange messages at once. All
    ranks call it together."""
    messages = tuple(
        (size, exchange_seconds(pairs, size, world, repeats)) for size in SIZES[world.device.type]
    )
    columns = np.asarray([[1.0, size] for size, _ in messages])
    fit = fit_seconds(columns, np.asarray([seconds for _, seconds in messages]))
    latency, per_byte = fit.coefficients.tolist()
    if not per_byte:  # all of it looks like latency
        per_byte = messages[-1][1] / messages[-1][0]
    return MeasuredLink(Link(latency, 1 / per_byte), fit.mean_error, messages)


def exchange_seconds(pairs: Pairs, size: int, world: World, repeats: int = 5) -> float:
    """Median seconds of a message of `size` bytes one way, the slowest pair's."""
    buffer = torch.ones(size, dtype=torch.uint8, device=world.device)
    peers = {a: (b, True) for a, b in pairs} | {b: (a, False) for a, b in pairs}
    peer = peers.get(world.rank)
    seconds = []
    for repeat in range(WARM_UP + repeats):
        wait_for(world.device)
        dist.barrier()
        wait_for(world.device)
        start = time.perf_counter()
        if peer is not None:
            _ping_pong(buffer, *peer)
            wait_for(world.device)
        if repeat >= WARM_UP:
            seconds.append((time.perf_counter() - start) / 2 if peer is not None else 0.0)
    return _slowest(statistics.median(seconds), world)


def _ping_pong(buffer: Tensor, peer: int, first: bool) -> None:
    for send in (first, not first):
        if send:
            dist.send(buffer, peer)
        else:
            dist.recv(buffer, peer)


def _slowest(seconds: float, world: World) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def inside_pairs() -> Pairs:
    """Two ranks of the first machine."""
    return [(0, 1)]


def border_pairs(world: World) -> Pairs:
    """All ranks of the first machine, each with its counterpart on the second."""
    return [(rank, world.ranks_per_machine + rank) for rank in range(world.ranks_per_machine)]


def all_gather_rate(world: World, repeats: int = 5) -> float:
    """Bytes per second that every rank receives in an all-gather of large messages."""
    mine = torch.ones(SIZES[world.device.type][-1], dtype=torch.uint8, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.num_ranks)]
    seconds = []
    for _ in range(WARM_UP + repeats):
        wait_for(world.device)
        dist.barrier()
        wait_for(world.device)
        start = time.perf_counter()
        dist.all_gather(every, mine)
        wait_for(world.device)
        seconds.append(time.perf_counter() - start)
    slowest = _slowest(statistics.median(seconds[WARM_UP:]), world)
    return (world.num_ranks - 1) * mine.nbytes / slowest


def bandwidth_matrix(
    world: World, size: int, tell: Callable[[str], None] = lambda _: None
) -> list[list[float | None]]:
    """Bytes per second between all pairs of ranks, one pair at a time; None on the diagonal."""
    matrix: list[list[float | None]] = [[None] * world.num_ranks for _ in range(world.num_ranks)]
    for a in range(world.num_ranks):
        tell(f"messages of rank {a} of {world.num_ranks} ...")
        for b in range(a + 1, world.num_ranks):
            matrix[a][b] = matrix[b][a] = size / exchange_seconds([(a, b)], size, world, 3)
    return matrix

"""Measures rates of a device and of links: matrix products, copies, latency and bandwidth between
ranks, and how much attention slows down during copies and messages."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.arrays import Float64
from dyncp.calibrate.calls import DTYPES, Run
from dyncp.calibrate.timing import Repeats, device_seconds, time_call, wait_for
from dyncp.calibrate.world import World
from dyncp.topology import Link

# Tokens, hidden and MLP size of a matrix product, and bytes of a copy, by kind of device.
PRODUCTS = {"cpu": (512, 1024, 2048), "cuda": (8192, 4096, 14336)}
COPY_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
# Bytes of messages, by kind of device.
SIZES = {
    "cpu": (4 << 10, 64 << 10, 512 << 10, 4 << 20),
    "cuda": (64 << 10, 1 << 20, 16 << 20, 128 << 20),
}
REPEATS, FEW = Repeats(timed=5), Repeats(timed=3)
# Copies that run concurrently with a call take this many times as long as the call alone, and are
# cut into chunks of these bytes.
BESIDE = 3.0
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Fit:
    """`coefficients` has one entry per column, `errors` one per row: fitted / measured − 1."""

    coefficients: Float64
    errors: Float64

    @property
    def mean_error(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        return float(np.abs(self.errors).max())


def fit_seconds(columns: Float64, seconds: Float64) -> Fit:
    """Fits coefficients c ≥ 0 so that columns @ c ≈ seconds. Relative errors are minimised: 10 %
    too much has the same weight at 20 µs and at 20 ms.

    Rows (calls, work) of (1, 10) and (1, 30) with 7 and 17 seconds give 2 seconds per call and 0.5
    per unit of work."""
    needed = int(columns.any(axis=0).sum())  # a column of zeros has coefficient 0
    if len(columns) < needed:
        raise ValueError(
            f"{len(columns)} measurements cannot determine {needed} coefficients; measure more "
            "sizes"
        )
    if not (seconds > 0).all():
        raise ValueError("measured seconds must be positive")
    relative = columns / seconds[:, None]
    size = np.abs(relative).max(axis=0)  # FLOPs and calls differ by many powers of ten
    scaled = relative / np.where(size > 0, size, 1.0)
    free, found = size > 0, np.zeros(columns.shape[1])
    while free.any():
        solved = np.linalg.lstsq(scaled[:, free], np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        free[np.flatnonzero(free)[solved.argmin()]] = False  # negative: noise around 0
    coefficients = found / np.where(size > 0, size, 1.0)
    errors: Float64 = relative @ coefficients - 1
    return Fit(coefficients, errors)


def dense_rate(device: torch.device, dtype: str, repeats: Repeats) -> float:
    """FLOP/s of a linear layer with the sizes of an 8B model's MLP (on CPUs, smaller)."""
    tokens, hidden, ffn = PRODUCTS[device.type]
    x = torch.randn(tokens, hidden, device=device, dtype=DTYPES[dtype])
    weight = torch.randn(ffn, hidden, device=device, dtype=DTYPES[dtype])
    timed = time_call(lambda: torch.nn.functional.linear(x, weight), device, repeats)
    return 2.0 * tokens * hidden * ffn / timed.seconds


def copy_rate(device: torch.device, repeats: Repeats) -> float:
    """Bytes per second of a copy on the device; a byte read and written is counted once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = time_call(lambda: target.copy_(source), device, repeats)
    return source.nbytes / timed.seconds


def num_lanes(device: torch.device) -> int:
    """Rows of kernel tiles that run at once: one per multiprocessor of a GPU; 0 on CPUs, where this
    is not modelled."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A fitted link, the mean relative error of the fit, and the messages as (bytes, seconds)."""

    link: Link
    mean_error: float
    messages: tuple[tuple[int, float], ...]


def measure_link(pairs: Pairs, world: World) -> MeasuredLink:
    """Latency and bandwidth between two ranks of a pair, while all `pairs` exchange messages at the
    same time. All ranks call it together."""
    messages = tuple(
        (size, exchange_seconds(pairs, size, world)) for size in SIZES[world.device.type]
    )
    columns = np.asarray([[1.0, size] for size, _ in messages])
    fit = fit_seconds(columns, np.asarray([seconds for _, seconds in messages]))
    latency, per_byte = fit.coefficients.tolist()
    if not per_byte:  # the fit explains everything by latency
        per_byte = messages[-1][1] / messages[-1][0]
    return MeasuredLink(Link(latency, 1 / per_byte), fit.mean_error, messages)


def measure_links(world: World) -> tuple[MeasuredLink | None, MeasuredLink | None]:
    """The intra-node link, between ranks 0 and 1, and the inter-node link, between all ranks of the
    first node and their counterparts on the second. None if a node has one rank, or if there is one
    node."""
    local = world.ranks_per_node
    intra = measure_link([(0, 1)], world) if local > 1 else None
    between = [(rank, local + rank) for rank in range(local)]
    inter = measure_link(between, world) if world.nodes > 1 else None
    return intra, inter


def exchange_seconds(pairs: Pairs, size: int, world: World, repeats: Repeats = REPEATS) -> float:
    """Median seconds of a one-way message of `size` bytes between the slowest pair."""
    buffer = torch.ones(size, dtype=torch.uint8, device=world.device)
    peers, first = dict(pairs) | {b: a for a, b in pairs}, world.rank in dict(pairs)

    def ping_pong() -> None:
        if world.rank in peers:
            for send in (first, not first):
                (dist.send if send else dist.recv)(buffer, peers[world.rank])

    return _slowest_median(ping_pong, world, repeats) / 2


def all_gather_rate(world: World) -> float:
    """Bytes per second that each rank receives in an all-gather of large messages."""
    mine = torch.ones(SIZES[world.device.type][-1], dtype=torch.uint8, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.num_ranks)]
    seconds = _slowest_median(lambda: dist.all_gather(every, mine), world)
    return (world.num_ranks - 1) * mine.nbytes / seconds


def _slowest_median(run: Run, world: World, repeats: Repeats = REPEATS) -> float:
    """The slowest rank's median seconds of a call that all ranks make together."""
    return _slowest(statistics.median(seconds_together(run, world.device, repeats)), world)


def seconds_together(run: Run, device: torch.device, repeats: Repeats) -> list[float]:
    """Seconds of each repeat of a call that all ranks make together: from a barrier until this
    rank's device is done."""
    seconds = []
    for _ in range(repeats.warm_up + repeats.timed):
        _barrier(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds[repeats.warm_up :]


def _barrier(device: torch.device) -> None:
    """Waits until the devices of all ranks are idle."""
    wait_for(device)
    dist.barrier()
    wait_for(device)


def _slowest(seconds: float, world: World) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def bandwidth_matrix(
    world: World, size: int, tell: Callable[[str], None] = lambda _: None
) -> list[list[float | None]]:
    """Bytes per second between all pairs of ranks, one pair at a time; None on the diagonal."""
    matrix: list[list[float | None]] = [[None] * world.num_ranks for _ in range(world.num_ranks)]
    for a in range(world.num_ranks):
        tell(f"messages of rank {a} of {world.num_ranks} ...")
        for b in range(a + 1, world.num_ranks):
            matrix[a][b] = matrix[b][a] = size / exchange_seconds([(a, b)], size, world, FEW)
    return matrix


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a call alone, and during copies or messages of this `kind`."""

    kind: str
    alone_seconds: float
    beside_seconds: float

    @property
    def slowdown(self) -> float:
        """At least 1: if the call got faster, that was measurement noise."""
        return max(1.0, self.beside_seconds / self.alone_seconds)


def beside_copies(run: Run, device: torch.device, repeats: Repeats) -> list[Overlap]:
    """Times a call during copies, the most realistic kind first. On GPUs these are copies from the
    host, which cross a link and are written by a copy engine, and copies on the device, which use
    all of its memory bandwidth and give an upper bound. On CPUs, a thread copies."""
    alone = time_call(run, device, repeats).seconds
    if device.type == "cpu":
        return [Overlap("thread", alone, _beside_thread(run, repeats))]
    target = torch.empty(CHUNK_BYTES["cuda"], dtype=torch.uint8, device=device)
    sources = {
        "host": torch.empty(CHUNK_BYTES["cuda"], dtype=torch.uint8, pin_memory=True),
        "device": torch.empty_like(target),
    }
    return [
        Overlap(kind, alone, _beside_stream(run, source, target, alone, repeats))
        for kind, source in sources.items()
    ]


def _beside_thread(run: Run, repeats: Repeats) -> float:
    source = torch.ones(CHUNK_BYTES["cpu"], dtype=torch.uint8)
    target, stop = torch.empty_like(source), threading.Event()

    def copy() -> None:
        while not stop.is_set():
            target.copy_(source)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        return time_call(run, torch.device("cpu"), repeats).seconds
    finally:
        stop.set()
        thread.join()


def _beside_stream(
    run: Run, source: Tensor, target: Tensor, alone: float, repeats: Repeats
) -> float:
    device = target.device
    one = time_call(lambda: target.copy_(source, non_blocking=True), device, repeats).seconds
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    count, seconds = 1 + math.ceil(BESIDE * alone / one), []
    for _ in range(repeats.timed):
        with torch.cuda.stream(stream):
            for _ in range(count):
                target.copy_(source, non_blocking=True)
        seconds.append(device_seconds(run, device))
    return statistics.median(seconds)


def beside_messages(run: Run, world: World, repeats: Repeats) -> Overlap:
    """Times a call while this rank sends to the next rank and receives from the previous one. All
    ranks call it together."""
    alone = time_call(run, world.device, repeats).seconds
    out = torch.ones(CHUNK_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    into = torch.empty_like(out)
    one = device_seconds(
        lambda: [work.wait() for work in _exchange(out, into, world)], world.device
    )
    most = _slowest(alone / one, world)  # all ranks send the same number of messages
    count, seconds = 1 + math.ceil(BESIDE * most), []
    for _ in range(repeats.timed):
        _barrier(world.device)
        works = [work for _ in range(count) for work in _exchange(out, into, world)]
        seconds.append(device_seconds(run, world.device))
        for work in works:
            work.wait()
    wait_for(world.device)
    return Overlap("link", alone, statistics.median(seconds))


def _exchange(out: Tensor, into: Tensor, world: World) -> list["dist.Work"]:
    after, before = (world.rank + 1) % world.num_ranks, (world.rank - 1) % world.num_ranks
    sends = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
    works: list[dist.Work] = dist.batch_isend_irecv(sends)
    return works

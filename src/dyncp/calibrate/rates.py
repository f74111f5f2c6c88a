"""Rates of a device and of links: matrix products, copies, latency and bandwidth between ranks, and
how much traffic slows attention down."""

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
from dyncp.calibrate.calls import DTYPES, World
from dyncp.calibrate.timing import Repeats, Run, mark, seconds_between, time_call, wait_for
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
# Copies beside a call take this many times as long as the call alone, in chunks of these bytes.
BESIDE = 3.0
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Fit:
    """One coefficient per column. `errors` are fitted over measured − 1, by row."""

    coefficients: Float64
    errors: Float64

    @property
    def mean_error(self) -> float:
        return float(np.abs(self.errors).mean())

    @property
    def worst_error(self) -> float:
        return float(np.abs(self.errors).max())


def fit_seconds(columns: Float64, seconds: Float64) -> Fit:
    """Coefficients c ≥ 0 with columns @ c ≈ seconds, where 10 % too much counts the same at 20 µs
    and at 20 ms.

    Rows (calls, work) of 1, 10 and 1, 30 with 7 and 17 seconds give 2 seconds a call and 0.5 per
    unit of work."""
    needed = int(columns.any(axis=0).sum())  # a column of zeros has coefficient 0
    if len(columns) < needed:
        raise ValueError(
            f"{len(columns)} measurements cannot determine {needed} coefficients; measure more "
            "sizes"
        )
    if not (seconds > 0).all():
        raise ValueError("measured seconds must be positive")
    relative = columns / seconds[:, None]
    size = np.abs(relative).max(axis=0)  # work in FLOPs and calls differ by many powers of ten
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
    """FLOP/s of a linear layer as wide as a decoder's."""
    tokens, hidden, ffn = PRODUCTS[device.type]
    x = torch.randn(tokens, hidden, device=device, dtype=DTYPES[dtype])
    weight = torch.randn(ffn, hidden, device=device, dtype=DTYPES[dtype])
    timed = time_call(lambda: torch.nn.functional.linear(x, weight), device, repeats)
    return 2.0 * tokens * hidden * ffn / timed.seconds


def copy_rate(device: torch.device, repeats: Repeats) -> float:
    """Bytes per second of a copy on the device; read and write count once."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timed = time_call(lambda: target.copy_(source), device, repeats)
    return source.nbytes / timed.seconds


def num_lanes(device: torch.device) -> int:
    """Rows of kernel tiles that run at a time: one per multiprocessor of a GPU; 0 on CPUs, where
    that is not modelled."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link, the relative error of its fit, and what was measured: (bytes, seconds) each."""

    link: Link
    mean_error: float
    messages: tuple[tuple[int, float], ...]


def measure_link(pairs: Pairs, world: World) -> MeasuredLink:
    """Latency and bandwidth of one of `pairs` while all of them exchange messages at once. All
    ranks call it together."""
    messages = tuple(
        (size, exchange_seconds(pairs, size, world)) for size in SIZES[world.device.type]
    )
    columns = np.asarray([[1.0, size] for size, _ in messages])
    fit = fit_seconds(columns, np.asarray([seconds for _, seconds in messages]))
    latency, per_byte = fit.coefficients.tolist()
    if not per_byte:  # all of it looks like latency
        per_byte = messages[-1][1] / messages[-1][0]
    return MeasuredLink(Link(latency, 1 / per_byte), fit.mean_error, messages)


def measure_links(world: World) -> tuple[MeasuredLink | None, MeasuredLink | None]:
    """Intra-node, between ranks 0 and 1, and inter-node, between all ranks of the first node and
    their counterparts on the second; None where there is no such link."""
    local = world.ranks_per_node
    intra = measure_link([(0, 1)], world) if local > 1 else None
    between = [(rank, local + rank) for rank in range(local)]
    inter = measure_link(between, world) if world.nodes > 1 else None
    return intra, inter


def exchange_seconds(pairs: Pairs, size: int, world: World, repeats: Repeats = REPEATS) -> float:
    """Median seconds of a one-way message of `size` bytes, of the slowest pair."""
    buffer = torch.ones(size, dtype=torch.uint8, device=world.device)
    peers = {a: (b, True) for a, b in pairs} | {b: (a, False) for a, b in pairs}
    peer = peers.get(world.rank)

    def ping_pong() -> None:
        if peer is not None:
            other, first = peer
            for send in (first, not first):
                (dist.send if send else dist.recv)(buffer, other)

    return _slowest_median(ping_pong, world, repeats) / 2


def all_gather_rate(world: World) -> float:
    """Bytes per second that every rank receives in an all-gather of large messages."""
    mine = torch.ones(SIZES[world.device.type][-1], dtype=torch.uint8, device=world.device)
    every = [torch.empty_like(mine) for _ in range(world.num_ranks)]
    seconds = _slowest_median(lambda: dist.all_gather(every, mine), world)
    return (world.num_ranks - 1) * mine.nbytes / seconds


def _slowest_median(run: Run, world: World, repeats: Repeats = REPEATS) -> float:
    """Median seconds of a call that all ranks make together, on the slowest rank."""
    return _slowest(statistics.median(seconds_together(run, world.device, repeats)), world)


def seconds_together(run: Run, device: torch.device, repeats: Repeats) -> list[float]:
    """Seconds of every call that all ranks make together, from a barrier until this rank's device
    is done."""
    seconds = []
    for _ in range(repeats.warm_up + repeats.timed):
        _barrier(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return seconds[repeats.warm_up :]


def _barrier(device: torch.device) -> None:
    """All ranks, with idle devices."""
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
    """Seconds of a call alone and beside copies of `kind`."""

    kind: str
    alone_seconds: float
    beside_seconds: float

    @property
    def slowdown(self) -> float:
        """At least 1: a call that noise made faster was not slowed down."""
        return max(1.0, self.beside_seconds / self.alone_seconds)


def beside_copies(run: Run, device: torch.device, repeats: Repeats) -> list[Overlap]:
    """The most realistic first: on GPUs copies from the host, which cross a link and are written by
    a copy engine; then copies on the device, which take all of its memory bandwidth: an upper
    bound."""
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
        seconds.append(_timed(run, device))
    return statistics.median(seconds)


def beside_messages(run: Run, world: World, repeats: Repeats) -> Overlap:
    """A call while this rank sends to the next and receives from the previous. All ranks call it
    together."""
    alone = time_call(run, world.device, repeats).seconds
    out = torch.ones(CHUNK_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    into = torch.empty_like(out)
    one = _timed(lambda: [work.wait() for work in _exchange(out, into, world)], world.device)
    most = _slowest(alone / one, world)  # all ranks send the same number of messages
    count, seconds = 1 + math.ceil(BESIDE * most), []
    for _ in range(repeats.timed):
        _barrier(world.device)
        works = [work for _ in range(count) for work in _exchange(out, into, world)]
        seconds.append(_timed(run, world.device, stream_only=True))
        for work in works:
            work.wait()
    wait_for(world.device)
    return Overlap("link", alone, statistics.median(seconds))


def _exchange(out: Tensor, into: Tensor, world: World) -> list["dist.Work"]:
    after, before = (world.rank + 1) % world.num_ranks, (world.rank - 1) % world.num_ranks
    sends = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
    works: list[dist.Work] = dist.batch_isend_irecv(sends)
    return works


def _timed(run: Run, device: torch.device, *, stream_only: bool = False) -> float:
    """Seconds of a call on the current stream; with `stream_only` other streams may still be busy
    afterwards."""
    start = mark(device)
    run()
    end = mark(device)
    if stream_only and device.type == "cuda":
        end.synchronize()
    else:
        wait_for(device)
    return seconds_between(start, end)

"""Attention while something is copied beside it: how many times longer it takes."""

import math
import statistics
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.measure.timing import Repeats, Run, mark, seconds_between, time_call, wait_for
from dyncp.measure.world import World

# The copies that run beside a call take this many times as long as the call alone.
BESIDE = 3.0
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a call alone and beside copies of `kind`."""

    kind: str
    alone_seconds: float
    beside_seconds: float

    @property
    def slowdown(self) -> float:
        """From 1 on: what noise makes faster was not slowed down."""
        return max(1.0, self.beside_seconds / self.alone_seconds)


def beside_copies(run: Run, device: torch.device, repeats: Repeats) -> list[Overlap]:
    """What is to be believed most comes first: on GPUs copies from the host, which go over a link
    and are written by a copy engine; then copies on the device, which take all its memory
    bandwidth: an upper bound."""
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
        start = mark(device)
        run()
        end = mark(device)
        wait_for(device)
        seconds.append(seconds_between(start, end))
    return statistics.median(seconds)


def beside_messages(run: Run, world: World, repeats: Repeats) -> Overlap:
    """A call while this rank sends to the next and receives from the one before. All ranks call it
    together."""
    alone = time_call(run, world.device, repeats).seconds
    out = torch.ones(CHUNK_BYTES[world.device.type], dtype=torch.uint8, device=world.device)
    held = torch.empty_like(out)
    one = _timed(lambda: [work.wait() for work in _exchange(out, held, world)], world)
    most = torch.tensor([alone / one], dtype=torch.float64, device=world.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)  # all ranks send the same number of messages
    count, seconds = 1 + math.ceil(BESIDE * float(most.item())), []
    for _ in range(repeats.timed):
        wait_for(world.device)
        dist.barrier()
        wait_for(world.device)
        works = [work for _ in range(count) for work in _exchange(out, held, world)]
        seconds.append(_timed(run, world, on_device=True))
        for work in works:
            work.wait()
    wait_for(world.device)
    return Overlap("link", alone, statistics.median(seconds))


def _exchange(out: Tensor, held: Tensor, world: World) -> list["dist.Work"]:
    after, before = (world.rank + 1) % world.num_ranks, (world.rank - 1) % world.num_ranks
    sends = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, held, before)]
    works: list[dist.Work] = dist.batch_isend_irecv(sends)
    return works


def _timed(run: Run, world: World, *, on_device: bool = False) -> float:
    """Seconds of a call: of the current stream alone where `on_device`, so that messages may go
    on."""
    start = mark(world.device)
    run()
    end = mark(world.device)
    if on_device and world.device.type == "cuda":
        end.synchronize()
    else:
        wait_for(world.device)
    return seconds_between(start, end)

"""Grouped calls on the real ranks: all ranks send to all, through the transport's own code."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.measure.world import World
from dyncp.transport import Channel, Distributed, TransportError

NUM_PHASES = 4
MESSAGE_BYTES = 4096
LIMIT = 60.0  # seconds until messages that do not come are reported

Buffers = dict[int, Tensor]  # by peer rank


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """`communicators` says how many ranks each has, `operations` how many sends and receives the
    largest grouped call has of the `limit` allowed. `wrong` are (sender, phase) of messages to this
    rank with other contents than were sent."""

    backend: str
    ranks: int
    machines: int
    communicators: dict[str, int]
    operations: int
    limit: int
    phases: int
    wrong: tuple[tuple[int, int], ...]

    @property
    def passed(self) -> bool:
        return not self.wrong


def check_groups(world: World, limit: float = LIMIT) -> GroupCheck:
    """Several phases in a row; all ranks call it together. Raises TransportError where messages do
    not come within `limit` seconds."""
    on_gpu = world.device.type == "cuda"
    # NCCL's watchdog ends the process: it waits longer than we do.
    transport = Distributed(timeout=2 * limit if on_gpu else limit, device=world.device)
    peers = [rank for rank in range(world.num_ranks) if rank != world.rank]
    [channel] = transport.open()
    received = _exchange(channel, world, peers)
    _wait_for_device(world, limit)
    return GroupCheck(
        backend="nccl" if on_gpu else "gloo",
        ranks=world.num_ranks,
        machines=len(set(transport.machines)),
        communicators={one.name: len(one.members) for one in transport.communicators},
        operations=max(one.largest_call for one in transport.communicators),
        limit=transport.grouped_operations,
        phases=NUM_PHASES,
        wrong=_wrong(received, world),
    )


def _exchange(channel: Channel, world: World, peers: list[int]) -> list[Buffers]:
    """What came in every phase. All phases are under way at once."""
    phases = range(NUM_PHASES)
    sent = [{peer: _message(world.rank, peer, phase, world) for peer in peers} for phase in phases]
    received = [{peer: torch.zeros_like(one) for peer, one in sends.items()} for sends in sent]
    for phase in phases:
        channel.launch(phase, sent[phase], received[phase])
    for phase in phases:
        channel.wait(phase)
    channel.finish()
    return received


def _message(sender: int, receiver: int, phase: int, world: World) -> Tensor:
    """Bytes that no other sender, receiver or phase near it has."""
    start = 5 * sender + 11 * receiver + 17 * phase
    count = torch.arange(MESSAGE_BYTES, device=world.device)
    return (count * (1 + phase) + start).remainder(251).to(torch.uint8)


def _wrong(received: list[Buffers], world: World) -> tuple[tuple[int, int], ...]:
    return tuple(
        (sender, phase)
        for phase, buffers in enumerate(received)
        for sender, buffer in buffers.items()
        if not torch.equal(buffer, _message(sender, world.rank, phase, world))
    )


def _wait_for_device(world: World, limit: float) -> None:
    """On a GPU only the stream has waited so far."""
    if world.device.type != "cuda":
        return
    done = torch.cuda.current_stream(world.device).record_event()
    deadline = time.monotonic() + limit
    while not done.query():
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {world.rank} waited {limit:g} s for messages from all ranks in vain"
            )
        time.sleep(0.01)

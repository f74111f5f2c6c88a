"""Transport `torch.distributed`: one rank per process, point-to-point messages over a group."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.transport.transport import TransportError


class Distributed:
    """Ranks of a process group (or one-dimensional DeviceMesh); None is the world.

    Opens groups of its own over the same ranks, so that its messages never mix with the model's:
    gloo to agree on plans, and for messages gloo on the CPU and NCCL on GPUs. All ranks of the
    group must create it together, in the same order.
    """

    def __init__(
        self,
        group: Any = None,
        timeout: float = 600.0,
        device: torch.device | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group "
                "first, or leave group=None to run on one rank"
            )
        group = group.get_group() if hasattr(group, "get_group") else group
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.timeout = timedelta(seconds=timeout)
        self.num_ranks = len(members)
        self.ranks = (members.index(dist.get_rank()),)
        self.bytes_sent = 0
        self.global_ranks = tuple(members)
        self._members = members
        self._group = self._data_group = self._open_group("gloo")
        self.on_gpu = device is not None and device.type == "cuda"
        if self.on_gpu:
            self._data_group = self._open_group("nccl")

    def _open_group(self, backend: str) -> Any:
        return dist.new_group(
            self._members, timeout=self.timeout, backend=backend, use_local_synchronization=True
        )

    def open(self) -> "list[DistributedChannel] | list[NcclChannel]":
        if self.on_gpu:
            return [NcclChannel(self)]
        return [DistributedChannel(self, rank) for rank in self.ranks]

    def agree(self, word: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        words = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(words, mine, group=self._group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]} of {self.num_ranks} got no answer from all other ranks "
                f"while agreeing on the plan: a rank is gone, or did not call prepare within "
                f"{self.timeout.total_seconds():g} s ({error})"
            ) from error
        return [bytes(other.tolist()) for other in words]

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Every rank's `[counts[rank], ...]` tensor."""
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._data_group)
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def send(self, message: Tensor, peer: int, tag: int) -> Any:
        self.bytes_sent += message.nbytes
        return self._start(dist.isend, message, peer, tag)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        return self._start(dist.irecv, buffer, peer, tag)

    def exchange(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> list[Any]:
        """Starts all messages of a phase as one group, on the current stream."""
        self.bytes_sent += sum(message.nbytes for message in sends.values())
        ops = [
            dist.P2POp(function, tensor, self._members[peer], self._data_group)
            for function, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
        ]
        try:
            works: list[Any] = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]} could not start its messages of phase {phase}: {error}"
            ) from error
        return works

    def _start(self, function: Callable[..., Any], tensor: Tensor, peer: int, tag: int) -> Any:
        try:
            return function(tensor, self._members[peer], group=self._group, tag=tag)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]} lost its connection to rank {peer} before phase {tag}: "
                f"{error}"
            ) from error


class DistributedChannel:
    def __init__(self, transport: Distributed, rank: int) -> None:
        self.bytes_sent = 0
        self._transport, self._rank = transport, rank
        self._receives: dict[int, list[tuple[int, Any]]] = {}
        self._sends: list[tuple[int, int, Any, Tensor]] = []

    def launch(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        self._receives[phase] = [
            (peer, self._transport.receive(buffer, peer, phase))
            for peer, buffer in receives.items()
        ]
        for peer, message in sends.items():
            self.bytes_sent += message.nbytes
            work = self._transport.send(message, peer, phase)
            self._sends.append((phase, peer, work, message))

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, phase: int) -> None:
        for peer, work in self._receives.pop(phase):
            self._complete(work, f"a message from rank {peer} in phase {phase}")

    def finish(self) -> None:
        for phase, peer, work, _ in self._sends:
            self._complete(work, f"rank {peer} to take its message of phase {phase}")
        self._sends.clear()

    def _complete(self, work: Any, what: str) -> None:
        limit = self._transport.timeout
        try:
            done = work.wait(limit)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} waited for {what} and got none: {error}"
            ) from error
        if done is False:
            raise TransportError(
                f"rank {self._rank} waited {limit.total_seconds():g} s for {what} in vain"
            )


class NcclChannel:
    """Waiting only makes the current stream wait; NCCL's watchdog bounds it by the timeout."""

    def __init__(self, transport: Distributed) -> None:
        self.bytes_sent = 0
        self._transport = transport
        self._works: dict[int, list[Any]] = {}

    def launch(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        self.bytes_sent += sum(message.nbytes for message in sends.values())
        self._works[phase] = self._transport.exchange(phase, sends, receives)

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, phase: int) -> None:
        for work in self._works.pop(phase):
            work.wait()

    def finish(self) -> None:
        """The stream waits for all sends: the next call uses the same buffers."""
        for phase in list(self._works):
            self.wait(phase)

"""Transport `torch.distributed`: one rank per process, point-to-point messages over groups."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.transport.communicator import Communicator, Started
from dyncp.transport.grouped_channel import GroupedChannel
from dyncp.transport.machines import here, read_machines, settings_word
from dyncp.transport.transport import TransportError

# NCCL was seen to hang on grouped calls of more than 256 sends and receives: it cuts them itself
# then, not in the same places on all ranks (pytorch/pytorch#174288).
GROUPED_OPERATIONS = 128


class Distributed:
    """Ranks of a process group (or one-dimensional DeviceMesh); None is the world.

    Opens groups of its own over the same ranks, so that its messages never mix with the model's:
    gloo to agree on plans, and for messages gloo on the CPU and NCCL on GPUs: one group inside each
    machine and one between machines, so that neither waits for the other. All ranks of the group
    must create it together, in the same order, with the same settings.

    Ranks are on one machine where they run on the same host; `ranks_per_machine` says instead that
    so many consecutive ranks are. `grouped_operations` bounds the sends and receives that are
    started in one grouped call. `communicators` are in the order in which messages are started.
    """

    def __init__(
        self,
        group: Any = None,
        timeout: float = 600.0,
        device: torch.device | None = None,
        *,
        ranks_per_machine: int | None = None,
        grouped_operations: int = GROUPED_OPERATIONS,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group "
                "first, or leave group=None to run on one rank"
            )
        group = group.get_group() if hasattr(group, "get_group") else group
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        _check(len(members), ranks_per_machine, grouped_operations)
        self.timeout = timedelta(seconds=timeout)
        self.num_ranks = len(members)
        self.ranks = (members.index(dist.get_rank()),)
        self.bytes_sent = 0
        self.global_ranks = tuple(members)
        self.grouped_operations = grouped_operations
        self.on_gpu = device is not None and device.type == "cuda"
        self._device = device if self.on_gpu else torch.device("cpu")
        self._arrival_streams: dict[int, torch.cuda.Stream] = {}
        self._group = self._open_group("gloo", members)
        word = settings_word(ranks_per_machine, grouped_operations, here())
        self.machines = read_machines(self._every_word(word, "opening their groups", "get there"))
        self.communicators = self._open_communicators()

    def _open_communicators(self) -> tuple[Communicator, ...]:
        """Only those that some pair of ranks needs; the one between machines comes last."""
        own, everyone = self.machines[self.ranks[0]], range(self.num_ranks)
        sizes = [self.machines.count(machine) for machine in set(self.machines)]
        opened = []
        # A rank that is alone on its machine opens the group as well: torch may split it off the
        # communicator of the world, which all ranks have to do together.
        if max(sizes) > 1:
            inside = [rank for rank in everyone if self.machines[rank] == own]
            opened.append(self._open_communicator("inside", inside))
        if len(sizes) > 1:
            opened.append(self._open_communicator("between", list(everyone)))
        return tuple(opened)

    def _open_communicator(self, name: str, members: list[int]) -> Communicator:
        global_ranks = [self.global_ranks[rank] for rank in members]
        if not self.on_gpu and len(members) == self.num_ranks:
            group = self._group
        else:
            group = self._open_group("nccl" if self.on_gpu else "gloo", global_ranks)
            # The first call of an NCCL group needs all its ranks; a phase may not have them.
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        rank, operations = self.ranks[0], self.grouped_operations
        return Communicator(name, group, members, global_ranks, rank, operations)

    def _open_group(self, backend: str, global_ranks: list[int]) -> Any:
        return dist.new_group(
            global_ranks, timeout=self.timeout, backend=backend, use_local_synchronization=True
        )

    def open(self) -> list[GroupedChannel]:
        return [GroupedChannel(self, None if self.on_gpu else self.timeout)]

    def agree(self, word: bytes) -> list[bytes]:
        return self._every_word(word, "agreeing on the plan", "call prepare")

    def _every_word(self, word: bytes, doing: str, missed: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        words = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(words, mine, group=self._group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.ranks[0]} of {self.num_ranks} got no answer from all other ranks "
                f"while {doing}: a rank is gone, or did not {missed} within "
                f"{self.timeout.total_seconds():g} s ({error})"
            ) from error
        return [bytes(other.tolist()) for other in words]

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        """Every rank's `[counts[rank], ...]` tensor."""
        if self.num_ranks == 1:
            return [rows[: counts[0]]]
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.communicators[-1].group)  # has all ranks
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def start(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> list[Started]:
        """Starts the messages of a phase on the current stream: those inside machines, then those
        between them. All ranks make their grouped calls in this order."""
        self.bytes_sent += sum(message.nbytes for message in sends.values())
        started: list[Started] = []
        for communicator in self.communicators:
            started += communicator.start(
                phase, self._carried(communicator, sends), self._carried(communicator, receives)
            )
        return started

    def arrival_stream(self, phase: int) -> torch.cuda.Stream:
        """Phases have their own: neither later launches nor other phases wait for a phase."""
        if phase not in self._arrival_streams:
            self._arrival_streams[phase] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._arrival_streams[phase]

    def _carried(
        self, communicator: Communicator, messages: Mapping[int, Tensor]
    ) -> Mapping[int, Tensor]:
        """Those that go over this communicator."""
        if len(self.communicators) == 1:
            return messages
        machine, inside = self.machines[self.ranks[0]], communicator.name == "inside"
        return {
            peer: message
            for peer, message in messages.items()
            if (self.machines[peer] == machine) is inside
        }


def _check(num_ranks: int, ranks_per_machine: int | None, grouped_operations: int) -> None:
    if ranks_per_machine is not None and (ranks_per_machine < 1 or num_ranks % ranks_per_machine):
        raise ValueError(
            f"ranks_per_machine is {ranks_per_machine}, and the group has {num_ranks} ranks; give "
            "a divisor of these, or leave it out to go by hosts"
        )
    if grouped_operations < 2:
        raise ValueError(
            f"grouped_operations is {grouped_operations}; at least 2 are needed, a send and a "
            "receive"
        )

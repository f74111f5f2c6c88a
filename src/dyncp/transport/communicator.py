"""Communicator: a process group that carries messages between some ranks, in grouped calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dyncp.transport.cuts import Cut, cut
from dyncp.transport.transport import TransportError

CALLS, PHASES = 2**16, 2**15  # gloo's tags have 31 bits


@dataclass(frozen=True, slots=True)
class Started:
    """Messages under way: from `sources` to this rank, from it to `targets`."""

    work: Any
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Communicator:
    """Carries messages "inside" or "between" machines, as its `name` says.

    `members` are ranks of the transport, `global_ranks` the same ones in torch's numbers, `rank` is
    this process's. A grouped call has at most `operations` sends and receives.
    """

    def __init__(
        self,
        name: str,
        group: Any,
        members: Sequence[int],
        global_ranks: Sequence[int],
        rank: int,
        operations: int,
    ) -> None:
        self.name, self.group, self.members = name, group, tuple(members)
        self._global_ranks = tuple(global_ranks)
        self._positions = {member: i for i, member in enumerate(members)}
        self._rank = rank
        self._classes = operations // 2
        self.largest_call = 0  # sends and receives, so far

    def start(
        self,
        phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        call: int = 0,
    ) -> list[Started]:
        """Starts messages, one per peer rank each way, on the current stream. `call` is below
        `CALLS` and tells the messages of different calls apart."""
        parts = cut(
            self._positions[self._rank],
            len(self.members),
            [self._positions[peer] for peer in sends],
            [self._positions[peer] for peer in receives],
            self._classes,
        )
        tag = call * PHASES + phase % PHASES
        return [one for part in parts for one in self._call(phase, tag, part, sends, receives)]

    def _call(
        self,
        phase: int,
        tag: int,
        part: Cut,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
    ) -> list[Started]:
        sources = tuple(self.members[i] for i in part.receives)
        targets = tuple(self.members[i] for i in part.sends)
        coming = [self._op(dist.irecv, receives[peer], peer, tag) for peer in sources]
        leaving = [self._op(dist.isend, sends[peer], peer, tag) for peer in targets]
        ops = coming + leaving
        self.largest_call = max(self.largest_call, len(ops))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self._rank} could not start its messages of phase {phase} {self.name} "
                f"machines, with {ranks_text({*sources, *targets})}: {error}"
            ) from error
        if len(works) < len(ops):  # NCCL: one work for the whole call
            return [Started(work, sources, targets) for work in works]
        ends = [((peer,), ()) for peer in sources] + [((), (peer,)) for peer in targets]
        return [Started(work, *end) for work, end in zip(works, ends, strict=True)]

    def _op(self, function: Any, tensor: Tensor, peer: int, tag: int) -> dist.P2POp:
        # Gloo tells calls and phases apart by their tags, NCCL by the order of messages.
        to = self._global_ranks[self._positions[peer]]
        return dist.P2POp(function, tensor, to, self.group, tag=tag)


def ranks_text(ranks: set[int] | Sequence[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5" """
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"

"""Transport `null`: counts bytes and moves nothing. Received buffers are zero.

For timing and memory measurements of one rank's compute without its peers; results are wrong.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Null:
    def __init__(self, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"null transport got rank={rank} of {num_ranks} ranks")
        self.num_ranks = num_ranks
        self.ranks = (rank,)
        self.bytes_sent = 0

    def close(self) -> None:
        """It holds nothing."""

    def open(self, call: int = 0) -> "list[NullChannel]":  # noqa: ARG002
        return [NullChannel(self)]

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return [rows.new_zeros(count, *rows.shape[1:]) for count in counts]


class NullChannel:
    def __init__(self, transport: Null) -> None:
        self.bytes_sent = 0
        self._transport = transport

    def launch(
        self,
        _phase: int,
        sends: Mapping[int, Tensor],
        receives: Mapping[int, Tensor],
        arrived: Any = None,
    ) -> None:
        sent = sum(message.nbytes for message in sends.values())
        self.bytes_sent += sent
        self._transport.bytes_sent += sent
        for buffer in receives.values():
            buffer.zero_()
        if arrived is not None:
            arrived.record()

    def ready(self, _phase: int) -> bool:
        return True

    def wait(self, _phase: int) -> None:
        pass

    def finish(self) -> None:
        pass

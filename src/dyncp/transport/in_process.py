"""Transport `in_process`: virtual ranks in one process, driven by one thread."""

from collections.abc import Mapping

from torch import Tensor


class InProcess:
    """`num_ranks` virtual ranks that pass messages through a mailbox."""

    def __init__(self, num_ranks: int = 1) -> None:
        if num_ranks < 1:
            raise ValueError(
                f"in_process transport got num_ranks={num_ranks}; at least 1 is needed"
            )
        self.num_ranks = num_ranks
        self.ranks = tuple(range(num_ranks))
        self.bytes_sent = 0
        self._mailbox: dict[tuple[int, int, int], Tensor] = {}

    def open(self, rank: int) -> "InProcessChannel":
        return InProcessChannel(self, rank)

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return list(rows.split_with_sizes(counts))

    def put(self, key: tuple[int, int, int], message: Tensor) -> None:
        assert key not in self._mailbox, f"(source, target, phase) {key} was sent twice"
        self._mailbox[key] = message
        self.bytes_sent += message.nbytes

    def has(self, key: tuple[int, int, int]) -> bool:
        return key in self._mailbox

    def take(self, key: tuple[int, int, int]) -> Tensor:
        return self._mailbox.pop(key)

    def clear(self) -> None:
        """Forgets undelivered messages, after a call that failed."""
        self._mailbox.clear()


class InProcessChannel:
    def __init__(self, transport: InProcess, rank: int) -> None:
        self.bytes_sent = 0
        self._transport, self._rank = transport, rank
        self._receives: dict[int, Mapping[int, Tensor]] = {}

    def launch(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        if receives:
            self._receives[phase] = receives
        for peer, message in sends.items():
            self.bytes_sent += message.nbytes
            self._transport.put((self._rank, peer, phase), message)

    def ready(self, phase: int) -> bool:
        return all(self._transport.has((p, self._rank, phase)) for p in self._receives[phase])

    def wait(self, phase: int) -> None:
        for peer, buffer in self._receives.pop(phase).items():
            message = self._transport.take((peer, self._rank, phase))
            if message.nbytes != buffer.nbytes:
                raise ValueError(
                    f"rank {self._rank} expects {buffer.nbytes} bytes from rank {peer} in phase "
                    f"{phase}, but {message.nbytes} were sent: the ranks hold different plans"
                )
            buffer.copy_(message)

    def finish(self) -> None:
        assert not self._receives, f"phases {sorted(self._receives)} were never waited for"

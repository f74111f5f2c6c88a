"""Transport `in_process`: virtual ranks in one process, driven by one thread."""

from collections.abc import Mapping

from torch import Tensor

Mailbox = dict[tuple[int, int, int], Tensor]  # (source, target, phase)


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

    def open(self) -> "list[InProcessChannel]":
        mailbox: Mailbox = {}  # of this call alone: one that failed leaves nothing behind
        return [InProcessChannel(self, mailbox, rank) for rank in self.ranks]

    def agree(self, word: bytes) -> list[bytes]:
        return [word] * self.num_ranks

    def gather(self, rows: Tensor, counts: list[int]) -> list[Tensor]:
        return list(rows.split_with_sizes(counts))

    def count(self, num_bytes: int) -> None:
        self.bytes_sent += num_bytes


class InProcessChannel:
    def __init__(self, transport: InProcess, mailbox: Mailbox, rank: int) -> None:
        self.bytes_sent = 0
        self._transport, self._mailbox, self._rank = transport, mailbox, rank
        self._receives: dict[int, Mapping[int, Tensor]] = {}

    def launch(
        self, phase: int, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> None:
        if receives:
            self._receives[phase] = receives
        for peer, message in sends.items():
            key = (self._rank, peer, phase)
            assert key not in self._mailbox, f"(source, target, phase) {key} was sent twice"
            self._mailbox[key] = message
            self.bytes_sent += message.nbytes
            self._transport.count(message.nbytes)

    def ready(self, phase: int) -> bool:
        return all((p, self._rank, phase) in self._mailbox for p in self._receives[phase])

    def wait(self, phase: int) -> None:
        for peer, buffer in self._receives.pop(phase).items():
            message = self._mailbox.pop((peer, self._rank, phase))
            if message.nbytes != buffer.nbytes:
                raise ValueError(
                    f"rank {self._rank} expects {buffer.nbytes} bytes from rank {peer} in phase "
                    f"{phase}, but {message.nbytes} were sent: the ranks hold different plans"
                )
            buffer.copy_(message)

    def finish(self) -> None:
        assert not self._receives, f"phases {sorted(self._receives)} were never waited for"

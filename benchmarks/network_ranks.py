"""Processes in namespaces, one per rank, that answer commands (see network_rank.py)."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.network_links import Namespaces

ENDING = 5.0  # seconds that processes get to end by themselves


class RankFailedError(Exception):
    pass


class Ranks:
    """`with Ranks(namespaces) as ranks:` starts them, and kills them at the end."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces, self._processes = namespaces, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> "Ranks":
        try:
            for rank in range(self._namespaces.num_ranks):
                self._processes.append(self._start(rank))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(ENDING)
        self._processes.clear()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        net = self._namespaces
        sizes = map(str, (rank, net.num_ranks, net.ranks_per_machine))
        module = [sys.executable, "-m", "benchmarks.network_rank", *sizes, net.address(0)]
        return subprocess.Popen(
            ["ip", "netns", "exec", net.name(rank), *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "between", "OMP_NUM_THREADS": "1"},
        )

    def ask(self, commands: Sequence[Mapping[str, Any]], timeout: float = 120.0) -> list[Any]:
        """Gives every rank its command; their answers."""
        for process, command in zip(self._processes, commands, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return [json.loads(line) for line in self._lines(time.monotonic() + timeout)]

    def _lines(self, deadline: float) -> list[bytes]:
        """One line of every rank; raises when one ends, or when they take too long."""
        found = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    missing = [r for r, line in enumerate(found) if not line.endswith(b"\n")]
                    raise RankFailedError(f"ranks {missing} gave no answer in time")
                for key, _ in ready:
                    some = os.read(key.fd, 1 << 20)
                    if not some:
                        raise RankFailedError(f"rank {key.data} ended; its error is above")
                    found[key.data] += some
                    if some.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return found

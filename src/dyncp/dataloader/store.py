"""SharedStore: this rank's own connection to the key-value store of the process group.

Values are small and written in JSON; the parts of plans are bytes of any size."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from dyncp.checks import parse_json
from dyncp.dataloader import patience

CHUNK_BYTES = 4 << 20  # a TCPStore resets the connection for values of more than 8 MiB
MANY = 64  # values that are read in one call
MISSING = "missing"  # no value: those are in JSON


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it was lost."""


class SharedStore:
    """Calls run in a thread so that they can time out: if the server hangs, most calls to a
    TCPStore never return, whatever its timeout. After a failed call, all calls fail."""

    def __init__(self, store: Any, prefix: str, rank: int, timeout: float) -> None:
        self._prefix, self._rank, self.timeout = prefix, rank, timeout
        self.broken: StoreError | None = None
        self.cause: Callable[[], str] = lambda: ""  # why the store may have failed
        self._calls: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="dyncp-store", daemon=True
        )
        self._thread.start()

    def set(self, key: str, value: Any) -> None:
        self._call("set", key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value of a key; None if it does not exist. (A plain "get" would wait for it.)"""
        text = bytes(self._call("compare_set", key, MISSING, MISSING))
        return None if text == MISSING.encode() else _read_json(text)

    def get_all(self, keys: Sequence[str]) -> list[Any]:
        """The values of these keys, which must exist."""
        parts = [list(keys[start : start + MANY]) for start in range(0, len(keys), MANY)]
        return [_read_json(text) for part in parts for text in self._call("multi_get", part)]

    def has(self, *keys: str) -> bool:
        """Whether all of these keys exist."""
        return bool(self._call("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the new sum."""
        return int(self._call("add", key, amount))

    def set_bytes(self, key: str, about: dict[str, Any], data: bytes) -> list[str]:
        """Writes bytes after one line that says what there is to know `about` them; returns the
        keys. The key itself is written last: when it is there, all chunks are."""
        starts = range(0, max(1, len(data)), CHUNK_BYTES)
        line = json.dumps(about | {"chunks": len(starts)}).encode() + b"\n"
        keys = [key, *(f"{key}/{number}" for number in range(1, len(starts)))]
        for name, start in reversed(list(zip(keys, starts, strict=True))):
            chunk = data[start : start + CHUNK_BYTES]
            self._call("set", name, chunk if start else line + chunk)
        return keys

    def get_bytes(self, key: str) -> tuple[dict[str, Any], bytes]:
        line, _, data = bytes(self._call("get", key)).partition(b"\n")
        about = _read_json(line)
        chunks = about.pop("chunks")
        more = [self._call("get", f"{key}/{number}") for number in range(1, chunks)]
        return about, b"".join([data, *map(bytes, more)])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("delete_key", key)

    def list_keys(self, prefix: str) -> list[str]:
        return [key for key in self._call("list_keys") if key.startswith(prefix)]

    def hurry(self) -> None:
        """Waits at most a few seconds for answers from now on, since only clean-up is left."""
        self.timeout = min(self.timeout, patience.HURRY)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(1.0)

    def _call(self, name: str, *args: Any) -> Any:
        if self.broken is not None:
            raise self.broken
        answer: Future[Any] = Future()
        self._calls.put((answer, name, args))
        try:
            return answer.result(self.timeout)
        except Exception as error:
            key = args[0] if args else "*"
            what = f"{name} of key '{self._prefix}/{key[0] if isinstance(key, list) else key}'"
            problem = f"failed at {what}: {str(error).partition(chr(10))[0]}"
            if isinstance(error, TimeoutError):
                problem = f"did not answer {what} within {self.timeout:g} s"
            because = "; ".join(text for text in (problem, self.cause()) if text)
            self.broken = StoreError(f"rank {self._rank}: the store {because}")
            raise self.broken from error

    def _run(self, store: Any) -> None:
        client: Any = None
        while (call := self._calls.get()) is not None:
            answer, name, args = call
            try:
                client = client or self._connect(store)
                answer.set_result(getattr(client, name)(*args))
            except Exception as error:
                answer.set_exception(error)

    def _connect(self, store: Any) -> PrefixStore:
        """A client with its own connection, if this kind of store has connections."""
        client = store.clone()
        client.set_timeout(timedelta(seconds=self.timeout))
        return PrefixStore(self._prefix, client)


def _read_json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise StoreError(f"the store has a text that cannot be read: {error}") from error

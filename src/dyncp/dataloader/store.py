"""The key-value store that ranks talk through, and the errors that tell them apart.

`SharedStore` is a client of the process group's store; `LocalStore` stands in for it in a single
process. Plans and decisions (decision.py), heartbeats and failures (peers.py) are its contents.
"""

import json
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol

from torch.distributed.distributed_c10d import PrefixStore

CHUNK_BYTES = 4 << 20  # values over 8 MiB reset the connection of a TCPStore
FIRST_POLL, LONGEST_POLL = 0.5e-3, 20e-3  # seconds; an answer takes 0.1 ms on one machine
HURRY_SECONDS = 5.0
LINGER_SECONDS = 3.0


class StoreError(RuntimeError):
    """The store did not answer, or the connection to it is lost."""


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree on options, on the content of a sample, or on its masks."""


class PeerError(RuntimeError):
    """Another rank failed while preparing batches, left the loop, or is gone."""


class Store(Protocol):
    """Small values by key. Keys with several writers only use `add` and `compare_set`."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""

    def has(self, key: str) -> bool: ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter; returns the new sum."""

    def compare_set(self, key: str, value: bytes) -> bytes:
        """Sets the key unless it is set; returns its value."""

    def delete(self, key: str) -> None: ...

    def list_keys(self) -> list[str]: ...

    def hurry(self) -> None:
        """From now on, waits at most a few seconds for an answer: only clean-up is left."""

    def close(self) -> None: ...


class LocalStore:
    """For a process that is alone."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        value: bytes = self._values[key]
        return value

    def has(self, key: str) -> bool:
        return key in self._values

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total: int = self._values.get(key, 0) + amount
            self._values[key] = total
            return total

    def compare_set(self, key: str, value: bytes) -> bytes:
        found: bytes = self._values.setdefault(key, value)
        return found

    def delete(self, key: str) -> None:
        self._values.pop(key, None)

    def list_keys(self) -> list[str]:
        return list(self._values)

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        self._values.clear()


class SharedStore:
    """A client of the process group's store, with its own connection and thread.

    The thread bounds every call: most calls to a TCPStore whose server hangs never return, whatever
    timeout is set."""

    def __init__(self, store: Any, prefix: str, rank: int, timeout: float) -> None:
        self._prefix, self._rank, self._timeout = prefix, rank, timeout
        self._broken: StoreError | None = None
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="dyncp-store", daemon=True
        )
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def has(self, key: str) -> bool:
        return bool(self._call("check", [key]))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, value: bytes) -> bytes:
        return bytes(self._call("compare_set", key, "", value.decode()))

    def delete(self, key: str) -> None:
        self._call("delete_key", key)

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def hurry(self) -> None:
        self._timeout = min(self._timeout, HURRY_SECONDS)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(1.0)

    def _call(self, name: str, *args: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((lambda client: getattr(client, name)(*args), answers))
        key = args[0] if args else "*"
        text = f"{self._prefix}/{key[0] if isinstance(key, list) else key}"
        try:
            result, error = answers.get(timeout=self._timeout)
        except queue.Empty:
            self._broken = StoreError(
                f"rank {self._rank}: the store did not answer {name} of key {text!r} within "
                f"{self._timeout:g} s"
            )
            raise self._broken from None
        if error is not None:
            reason = str(error).partition("\n")[0]
            self._broken = StoreError(
                f"rank {self._rank}: the store failed at {name} of key {text!r}: {reason}"
            )
            raise self._broken from error
        return result

    def _run(self, store: Any) -> None:
        client: Any = None
        while (call := self._calls.get()) is not None:
            act, answers = call
            try:
                client = client or self._connect(store)
                answers.put((act(client), None))
            except Exception as error:
                answers.put((None, error))

    def _connect(self, store: Any) -> PrefixStore:
        """A connection of its own, if the store's kind has connections."""
        client = store.clone()
        client.set_timeout(timedelta(seconds=self._timeout))
        return PrefixStore(self._prefix, client)


def put_chunks(store: Store, key: str, data: bytes) -> list[str]:
    """Writes `data` under key, key/1, ... in chunks; returns the keys."""
    keys = chunk_keys(key, len(data))
    for number, name in enumerate(keys):
        store.set(name, data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])
    return keys


def get_chunks(store: Store, key: str, size: int) -> bytes:
    return b"".join(store.get(name) for name in chunk_keys(key, size))


def chunk_keys(key: str, size: int) -> list[str]:
    more = range(1, -(-size // CHUNK_BYTES))
    return [key, *(f"{key}/{number}" for number in more)]


def linger(store: Store, key: str) -> None:
    """Waits briefly for the other ranks to delete a key: this process may host the store, and they
    would see a lost connection instead of the reason."""
    end = monotonic() + LINGER_SECONDS
    with suppress(StoreError):
        while monotonic() < end and store.has(key):
            sleep(LONGEST_POLL)


def wait_for(store: Store, key: str, still_waiting: Callable[[], None]) -> None:
    """Returns when the key exists. `still_waiting` is called now and then, and may raise.

    It polls instead of blocking in the store: a blocked call cannot be interrupted, and its timeout
    makes c10d log warnings."""
    pause, asked = FIRST_POLL, monotonic()
    while not store.has(key):
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL)
        if monotonic() - asked > 10 * LONGEST_POLL:
            try:
                still_waiting()
            except PeerError:
                if store.has(key):  # it was set just before the other rank left
                    return
                raise
            asked = monotonic()


def read_json(text: bytes) -> dict[str, Any]:
    """A dict that another rank wrote; PeerError if it cannot be read."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the store has a text that cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PeerError(f"the store has {type(values).__name__} where a dict was expected")
    return values

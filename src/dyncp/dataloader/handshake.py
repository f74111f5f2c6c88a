"""Handshake: ranks that make a loader together compare what they make it of.

Every rank writes its terms and waits for those of all others. One that cannot make its loader says
so, and the others get PeerError instead of waiting for it.
"""

import json
import logging
from collections.abc import Mapping
from time import monotonic
from types import TracebackType

from dyncp.dataloader.decision import read_json
from dyncp.dataloader.errors import BatchMismatch, PeerError, StoreError
from dyncp.dataloader.peers import WARN_SECONDS
from dyncp.dataloader.plan_store import Store, linger, wait_for
from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

SHOWN = 4  # terms that differ, in an error


class Handshake:
    """Around the making of a loader; `compare` ends it."""

    def __init__(self, store: Store, ranks: LoaderRanks) -> None:
        self._store, self._ranks = store, ranks
        self._left = False

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._left:
                self._say("failed", {"text": f"{type(error).__name__}: {error}"})
                self._leave()
            if error is not None:
                linger(self._store, "left")
        except StoreError as second:
            logger.debug("telling other ranks: %s", second)
        finally:
            self._store.close()

    def compare(self, terms: Mapping[str, str], timeout: float) -> None:
        """Waits for all ranks, at most `timeout` seconds; BatchMismatch names the terms that differ
        and who has which."""
        self._say(f"hello/{self._ranks.process}", {"terms": dict(terms)})
        missing = set(range(self._ranks.num_processes))
        start, warned = monotonic(), [0.0]

        def still_waiting() -> None:
            if self._store.has("failed"):
                told = read_json(self._store.get("failed"))
                raise PeerError(f"rank {told['rank']} could not make its loader: {told['text']}")
            waited = monotonic() - start
            if waited < max(WARN_SECONDS, 2 * warned[0]):
                return
            warned[0] = waited
            names = ", ".join(str(self._ranks.name(p)) for p in sorted(missing))
            text = f"rank {self._ranks.name()} has waited {waited:.0f} s for rank {names} to make "
            if waited > timeout:
                raise PeerError(f"{text}this loader; all ranks make their loaders in one order")
            logger.warning("%sthis loader", text)

        found: dict[int, dict[str, str]] = {}
        try:
            for process in sorted(missing):
                wait_for(self._store, f"hello/{process}", still_waiting)
                said = read_json(self._store.get(f"hello/{process}"))["terms"]
                assert isinstance(said, dict)
                found[process] = said
                missing.discard(process)
        finally:
            self._leave()
        self._check(found)

    def _check(self, found: Mapping[int, Mapping[str, str]]) -> None:
        names = sorted({name for terms in found.values() for name in terms})
        different = [
            name for name in names if len({terms.get(name) for terms in found.values()}) > 1
        ]
        if different:
            told = "; ".join(self._differing(name, found) for name in different[:SHOWN])
            raise BatchMismatch(
                f"ranks made different loaders: {told}; every rank needs the same arguments, "
                "samples and mask function"
            )

    def _differing(self, name: str, found: Mapping[int, Mapping[str, str]]) -> str:
        by_value: dict[str, list[int]] = {}
        for process, terms in found.items():
            value = terms.get(name, "nothing")
            by_value.setdefault(value, []).append(self._ranks.name(process))
        told = [f"{value} on rank {', '.join(map(str, r))}" for value, r in by_value.items()]
        return f"{name} is {', '.join(told)}"

    def _say(self, key: str, text: Mapping[str, object]) -> None:
        said = json.dumps({"rank": self._ranks.name(), **text})
        self._store.compare_set(key, said.encode())

    def _leave(self) -> None:
        """The last rank deletes the keys."""
        self._left = True
        if self._store.add("left", 1) == self._ranks.num_processes:
            hellos = [f"hello/{process}" for process in range(self._ranks.num_processes)]
            for key in (*hellos, "failed", "left"):
                self._store.delete(key)

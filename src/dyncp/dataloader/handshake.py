"""Handshake: ranks that make a loader together compare what they make it of.

The first rank's terms count; every other compares its own with them. The loader is made when all
have come and found them equal. One that differs, or cannot make its loader, says so: the others get
its text instead of waiting for it.

    terms            of the rank that came first
    here/2, came     process 2 has come, and where it runs; how many have
    all              all have, and where they run
    failed, left     a failed rank's message; the last to leave deletes the keys
"""

import json
import logging
from collections.abc import Mapping
from time import monotonic
from types import TracebackType
from typing import Any

from dyncp.dataloader.decision import read_json
from dyncp.dataloader.errors import BatchMismatch, PeerError, StoreError
from dyncp.dataloader.peers import WARN_SECONDS, Place, own_place
from dyncp.dataloader.plan_store import Store, linger, wait_for
from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

SHOWN = 4  # terms that differ, in an error


class Handshake:
    """Around the making of a loader; `compare` ends it."""

    def __init__(self, store: Store, ranks: LoaderRanks) -> None:
        self._store, self._ranks = store, ranks
        self._warn_after = WARN_SECONDS

    def __enter__(self) -> "Handshake":
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, PeerError | StoreError):
                mismatch = isinstance(error, BatchMismatch)
                text = str(error) if mismatch else f"{type(error).__name__}: {error}"
                self._say("failed", text=text, mismatch=mismatch)
            self._leave()
            if error is not None:
                linger(self._store, "left")
        except StoreError as second:
            logger.debug("leaving the handshake: %s", second)
        finally:
            self._store.close()

    def compare(self, terms: Mapping[str, str], timeout: float) -> list[Place]:
        """Waits for all ranks, at most `timeout` seconds; BatchMismatch says which terms differ.
        Returns where the processes run."""
        first = self._say("terms", terms=dict(terms))
        self._check(first["terms"], first["rank"], terms)
        self._store.set(f"here/{self._ranks.process}", json.dumps(own_place()).encode())
        if self._store.add("came", 1) == self._ranks.num_processes:
            self._store.set("all", json.dumps(self._places()).encode())
        start = monotonic()
        wait_for(self._store, "all", lambda: self._look_around(monotonic() - start, timeout))
        told = read_json(self._store.get("all"))
        return [dict(told["machines"][machine], pid=pid) for machine, pid in told["processes"]]

    def _places(self) -> dict[str, Any]:
        """Of all processes: what those of one machine share stands there once."""
        machines: list[dict[str, Any]] = []
        processes = []
        for process in range(self._ranks.num_processes):
            place = dict(read_json(self._store.get(f"here/{process}")))
            pid = place.pop("pid")
            if place not in machines:
                machines.append(place)
            processes.append((machines.index(place), pid))
        return {"machines": machines, "processes": processes}

    def _look_around(self, waited: float, timeout: float) -> None:
        if self._store.has("failed"):
            told = read_json(self._store.get("failed"))
            if told["mismatch"]:
                raise BatchMismatch(told["text"])
            raise PeerError(f"rank {told['rank']} could not make its loader: {told['text']}")
        if waited < min(self._warn_after, timeout):
            return
        self._warn_after *= 2
        processes = range(self._ranks.num_processes)
        missing = [self._ranks.name(p) for p in processes if not self._store.has(f"here/{p}")]
        text = f"rank {self._ranks.name()} has waited {waited:.0f} s for ranks {missing} to make "
        if waited > timeout:
            raise PeerError(f"{text}this loader; all ranks make their loaders in one order")
        logger.warning("%sthis loader", text)

    def _check(self, theirs: Mapping[str, str], rank: int, mine: Mapping[str, str]) -> None:
        names = [name for name in sorted({*theirs, *mine}) if theirs.get(name) != mine.get(name)]
        if not names:
            return
        told = "; ".join(
            f"{name} is "
            + ", ".join(
                f"{terms.get(name, 'nothing')} on rank {who}"
                for who, terms in sorted({rank: theirs, self._ranks.name(): mine}.items())
            )
            for name in names[:SHOWN]
        )
        raise BatchMismatch(
            f"ranks made different loaders: {told}; every rank needs the same arguments, samples "
            "and mask function"
        )

    def _say(self, key: str, **text: Any) -> dict[str, Any]:
        """What was said first under a key."""
        said = json.dumps({"rank": self._ranks.name(), **text})
        return read_json(self._store.compare_set(key, said.encode()))

    def _leave(self) -> None:
        if self._store.add("left", 1) == self._ranks.num_processes:
            here = [f"here/{process}" for process in range(self._ranks.num_processes)]
            for key in ("terms", "came", "all", "failed", *here, "left"):
                self._store.delete(key)

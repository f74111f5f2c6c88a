"""Peers: where the other ranks are, for a rank that waits for them.

Every rank writes a sign of life every second: which batch its training has asked for, whether it is
waiting, up to which step it has agreed. A rank that has been waiting for seconds reads them, and
warns with names. It fails at once for what cannot change (a rank that left, a process that ended);
a rank that only trains on, or writes a checkpoint, is waited for.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from dyncp.dataloader.decision import read_json
from dyncp.dataloader.errors import PeerError, StoreError
from dyncp.dataloader.plan_store import Store
from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

SIGN_SECONDS = 1.0
WATCH_SIGNS = 5
WARN_SECONDS = 5.0  # of waiting; then after twice as long, and so on
SILENT_SECONDS = 5.0  # without a sign: said in warnings
GONE_SECONDS = 60.0  # without a sign: no longer waited for; a busy interpreter may miss a few
HOST = socket.gethostname()
Place = dict[str, Any]  # where a process runs: see `own_place`
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Peers:
    """Writes this rank's signs from a thread of its own, and reads those of the others."""

    def __init__(
        self,
        store: Store,
        ranks: LoaderRanks,
        status: Callable[[], Any],
        places: Sequence[Place] = (),
    ) -> None:
        """`places` are those of all processes when they made the loader, where they are known."""
        self._store, self._ranks, self._status, self._places = store, ranks, status, places
        self._seen: dict[int, tuple[int, float]] = {}  # by process: last sign, and when it changed
        self._looked_at = 0.0
        self._asked: dict[int, int] = {}  # batches that ranks in training had taken, last watched
        self._warned_of: dict[int, int] = {}
        self._warn_after = WARN_SECONDS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sign, name="dyncp-signs", daemon=True)

    def start(self) -> None:
        if self._ranks.shared:
            self._thread.start()

    @property
    def key(self) -> str:
        return f"at/{self._ranks.process}"

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * SIGN_SECONDS)

    def look(self, waited: float, what: str, step: int) -> None:
        """Called while training has been waiting for `waited` seconds for others to agree on a
        step. Warns now and then; raises PeerError for a rank that will never come."""
        if waited < WARN_SECONDS:
            self._warn_after = WARN_SECONDS
            return
        pause = max(SIGN_SECONDS, 0.02 * self._ranks.num_processes)  # they all ask one store
        if monotonic() - self._looked_at < pause:
            return
        self._looked_at = monotonic()
        text = self.describe(step)
        if waited >= self._warn_after:
            self._warn_after *= 2
            logger.warning("%s has waited %.0f s for %s: %s", self._own(), waited, what, text)

    def describe(self, step: int) -> str:
        """Where the ranks are that have not agreed on a step; PeerError if one is gone."""
        others = [p for p in range(self._ranks.num_processes) if p != self._ranks.process]
        found = [(process, self._sign_of(process)) for process in others]
        late = [(p, sign) for p, sign in found if sign is None or sign["agreed"] < step]
        return "; ".join(self._where(*one) for one in late) or "all others have come this far"

    def ended(self) -> dict[int, dict[str, Any]]:
        """The last signs of processes on this machine that ended before they could close."""
        others = [p for p in range(self._ranks.num_processes) if p != self._ranks.process]
        signs = {process: self._sign_of(process) or self._place_of(process) for process in others}
        ended = {p: sign for p, sign in signs.items() if sign and _has_ended(sign)}
        return {p: sign for p, sign in ended.items() if not self._store.has(f"closed/{p}")}

    def in_vain(self, process: int, sign: dict[str, Any]) -> PeerError:
        name = f"rank {self._ranks.name(process)} ({_place(sign)})"
        return PeerError(f"{self._own()} waits in vain: {name} has ended")

    def _where(self, process: int, sign: dict[str, Any] | None) -> str:
        name = f"rank {self._ranks.name(process)}"
        if sign is None:
            known = self._place_of(process)
            if known is not None and _has_ended(known):
                raise self.in_vain(process, known)
            return f"{name} has not begun this iteration"
        silent, place = self._silent(process, sign), _place(sign)
        if silent > SILENT_SECONDS and _has_ended(sign):
            raise self.in_vain(process, sign)
        if silent > GONE_SECONDS:
            raise PeerError(
                f"{self._own()} waits in vain: {name} ({place}) has given no sign of life for "
                f"{silent:.0f} s"
            )
        if silent > SILENT_SECONDS:
            return f"{name} has given no sign of life for {silent:.0f} s ({place})"
        if sign["waiting"]:
            return f"{name} waits for batch {sign['asked'] - 1} as well, and prepares it"
        return f"{name} has taken {sign['asked']} batches and has not asked for the next one yet"

    def _watch(self) -> None:
        """Warns if ranks have been at different batches for a while, all in training: one that
        takes a batch more than others waits for them there, and not in the loader."""
        signs = {p: self._sign_of(p) for p in range(self._ranks.num_processes)}
        asked = {p: sign["asked"] for p, sign in signs.items() if sign and not sign["waiting"]}
        stays = asked == self._asked and len(asked) == self._ranks.num_processes
        self._asked = asked
        if stays and len(set(asked.values())) > 1 and asked != self._warned_of:
            self._warned_of = asked
            places = ", ".join(f"{self._ranks.name(p)}: {taken}" for p, taken in asked.items())
            logger.warning(
                "ranks have taken different numbers of batches for %.0f s, none waits for the "
                "loader (%s): one of them is ahead, or the others are busy",
                WATCH_SIGNS * SIGN_SECONDS,
                places,
            )

    def _silent(self, process: int, sign: dict[str, Any]) -> float:
        number, since = self._seen.get(process, (-1, 0.0))
        if number != sign["number"]:
            since = monotonic()
            self._seen[process] = sign["number"], since
        return monotonic() - since

    def _place_of(self, process: int) -> Place | None:
        return self._places[process] if self._places else None

    def _sign_of(self, process: int) -> dict[str, Any] | None:
        key = f"at/{process}"
        return dict(read_json(self._store.get(key))) if self._store.has(key) else None

    def _own(self) -> str:
        return f"rank {self._ranks.name()}"

    def _sign(self) -> None:
        number = 0
        try:
            while True:
                sign = self._status() | {"number": number} | own_place()
                self._store.set(self.key, json.dumps(sign).encode())
                if self._ended.wait(SIGN_SECONDS):
                    return
                number += 1
                if number % WATCH_SIGNS == 0 and not self._ranks.process:
                    self._watch()
        except StoreError as error:  # which whoever waits gets, too
            logger.debug("signs of life: %s", error)


def _place(sign: dict[str, Any]) -> str:
    return f"process {sign['pid']} on {sign['host']}"


def _has_ended(sign: dict[str, Any]) -> bool:
    """Whether it is certain, which it can be only where process ids mean the same."""
    return sign["ids"] == own_place()["ids"] and not _alive(sign["pid"])


def own_place() -> Place:
    """Host names may be equal on several machines, and in containers with process ids of their own:
    `ids` is the boot and the namespace that an id belongs to."""
    ids = HOST
    with suppress(OSError):  # not Linux
        ids = f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": HOST, "pid": os.getpid(), "ids": ids}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"

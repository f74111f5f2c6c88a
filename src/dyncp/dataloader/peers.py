"""What a process knows of the others that made the loader with it: their heartbeats.

From making the loader until closing it, every process writes a heartbeat each second: the iteration
that it is in, how many batches its training has requested, whether it waits and for what, and which
processes of its node have ended or are stopped. So a process that is busy can be told from one that
is dead:

    it has ended     known within a second or two, from the heartbeats of its node
    it is stopped    no heartbeat for 50 s, and no process of its node sees it run
    it trains, evaluates or writes a checkpoint, however long     its heartbeats go on
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from dyncp.dataloader import patience
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.store import SharedStore, StoreError

logger = logging.getLogger(__name__)

HOST = socket.gethostname()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ROLES = ("deliver", "select")  # threads of an iteration; the first waits for the second
Text = str | Callable[[], str]
Heartbeat = dict[str, Any]  # see `Peers._own_beat`


class BatchMismatch(ValueError):  # noqa: N818 (a user's mistake: the ranks got different arguments)
    """Ranks disagree on options, positions, batches, the content of a sample, or its masks."""


class PeerError(RuntimeError):
    """Another rank failed while preparing batches, left the loop, or died."""


class TrainingProgress:
    """How far training is in an iteration. The training thread sets `asked` and `asked_at`; the
    loader's threads say what they are doing."""

    def __init__(self, rank: int, iteration: int = 0, asked: int = 0) -> None:
        self.iteration, self.asked = iteration, asked  # batches that training took or waits for
        self.asked_at: float | None = None  # when training began to wait; None: it does not wait
        self.others = ""  # what the ranks are doing that this one waits for
        self._name, self._warn_after, self._what = f"rank {rank}", 0.0, ""
        self._doing: dict[str, Text] = {}

    @property
    def stalled(self) -> float:
        """How long training has been waiting, in seconds."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else perf_counter() - asked_at

    def says(self, role: str, text: Text = "") -> None:
        """What a thread is doing; "": the delivering thread waits for the selecting thread."""
        self._doing[role] = text

    @property
    def doing(self) -> str:
        said = next((self._doing[role] for role in ROLES if self._doing.get(role)), "starting")
        return said() if callable(said) else said

    def wait(self, what: str = "") -> None:
        """Training waits from now on."""
        self.asked_at, self._warn_after = perf_counter(), patience.WARNED
        self._what = what or f"batch {self.asked - 1}"

    def warn(self) -> float:
        """Warns if training has waited for 5, 10, 20, ... s; returns the seconds until then."""
        waited = self.stalled
        if waited >= self._warn_after:
            self._warn_after *= 2
            text = f"{self._name} has waited {waited:.0f} s for {self._what}: {self.doing}"
            logger.warning("%s%s", text, self.others and f": {self.others}")
        return max(0.0, self._warn_after - waited)


class Peers:
    """The processes of a loader, and the store that they share."""

    def __init__(self, store: SharedStore, ranks: LoaderRanks, progress: TrainingProgress) -> None:
        self.store, self.ranks, self.progress = store, ranks, progress
        self.late = ""  # process 0: the ranks whose record is missing, and what they are doing
        self.lingering = ""  # a key that the last rank to leave an iteration deletes
        self._processes = range(ranks.num_processes)
        self._places: dict[int, dict[str, Any]] = {}  # where each process runs, if that is known
        self._seen: dict[int, tuple[int, float]] = {}  # by process: last heartbeat, since when
        self._began, self._number = monotonic(), 0
        self._asked: dict[int, int] = {}  # of all ranks in training, at the last comparison
        self._warned_of: dict[int, int] = {}
        self._ended = threading.Event()
        store.cause = self._cause
        self.store.set(self._key(ranks.process), self._own_beat())
        self._thread = threading.Thread(target=self._beat, name="dyncp-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the heartbeat and the connection to the store. Never raises."""
        self._ended.set()
        self.store.hurry()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience.JOIN)
        with suppress(StoreError):
            self.linger()
            self.store.delete(map(self._key, [self.ranks.process, *self.near("ended")]))
        self.store.close()

    def linger(self) -> None:
        """Process 0 waits until all others have left the last iteration, for at most 3 s: it may
        host the store, and they have yet to read the last verdict."""
        end = monotonic() + (0.0 if self.ranks.process else patience.LINGER)
        while self.lingering and monotonic() < end and self.store.has(self.lingering):
            sleep(0.01)
        self.lingering = ""

    def locate(self, places: Iterable[dict[str, Any]]) -> None:
        """Remembers where all processes run."""
        self._places = dict(enumerate(places))

    def near(self, state: str) -> list[int]:
        """The other processes of this node that have "ended" or are "stopped"."""
        places = list(self._places.items())  # another thread may learn of more
        return [p for p, place in places if p != self.ranks.process and _state(place) == state]

    def _cause(self) -> str:
        """Why the store may have failed: a process of this node that hosts it has ended (it closes
        its connections a moment before) or is stopped."""
        end = monotonic() + patience.FATE
        while monotonic() < end:
            for state, text in (("ended", "has ended"), ("stopped", "is stopped")):
                if found := self.near(state):
                    return f"{self._who(found[0])} {text}"
            sleep(0.02)
        return "the process that hosts it (rank 0, or torchrun's agent) may have ended"

    def knows_fate_of(self, processes: Collection[int]) -> bool:
        """Whether all of these processes run on this node."""
        return all(_is_here(self._places[p]) for p in processes if p in self._places)

    def look(self, missing: Collection[int]) -> tuple[str, str]:
        """Why one of these processes will not go on ("": it may), and what they are doing."""
        beats = self._read(missing)
        if any(self._silent(process) > patience.SILENT for process in missing):
            beats |= self._read(self._processes)
        beats[self.ranks.process] = self._own_beat()
        waits = any(beat["waiting"] for beat in beats.values())
        late = []
        for process in missing:
            lost = self._lost(process, beats, waits=waits)
            if lost:
                return f"no rank can continue: {self._who(process)} has {lost}", ""
            late.append(self._describe(process, beats.get(process)))
        return "", "; ".join(late)

    def told_late(self) -> str:
        """The ranks that process 0 waits for, and what they are doing."""
        if not self.ranks.process:
            return self.late
        beat = self._read([0]).get(0)
        here = beat is not None and beat["iteration"] == self.progress.iteration
        return str(beat["late"]) if beat and here else self._describe(0, beat)

    def _lost(self, process: int, beats: dict[int, Heartbeat], *, waits: bool) -> str:
        place, silent = self._places.get(process), self._silent(process)
        if place is None:
            absent = waits and silent > patience.ABSENT
            return f"not begun to make its loader for {silent:.0f} s" if absent else ""
        witnesses = [
            beat
            for p, beat in beats.items()
            if p != process and beat["place"]["ids"] == place["ids"]
            if p == self.ranks.process or self._silent(p) <= patience.SILENT
        ]
        if any(process in beat["ended"] for beat in witnesses):
            return "ended"
        if not waits or silent <= patience.GONE:
            return ""
        if process not in beats:
            return f"closed its loader {silent:.0f} s ago"
        runs = witnesses and not any(process in beat["stopped"] for beat in witnesses)
        return "" if runs else f"sent no heartbeat for {silent:.0f} s"

    def _silent(self, process: int) -> float:
        return monotonic() - self._seen.get(process, (0, self._began))[1]

    def _read(self, processes: Collection[int]) -> dict[int, Heartbeat]:
        """The last heartbeats of these processes, as far as there are any."""
        beats = {process: self.store.get(self._key(process)) for process in processes}
        found = {process: beat for process, beat in beats.items() if beat}
        for process, beat in found.items():
            if self._seen.get(process, (-1, 0.0))[0] != beat["number"]:
                self._seen[process] = beat["number"], monotonic()
                self._places[process] = beat["place"]
        return found

    def _who(self, process: int) -> str:
        place = self._places.get(process)
        where = f" (process {place['pid']} on {place['host']})" if place else ""
        return f"rank {self.ranks.name(process)}{where}"

    def _describe(self, process: int, beat: Heartbeat | None) -> str:
        """What a rank is doing, by its last heartbeat."""
        name, silent = f"rank {self.ranks.name(process)}", self._silent(process)
        if beat is None:
            closed = process in self._places
            return f"{name} has {'closed' if closed else 'not begun to make'} its loader"
        if silent > patience.SILENT:
            return f"{self._who(process)} has sent no heartbeat for {silent:.0f} s"
        if beat["iteration"] != self.progress.iteration:
            return f"{name} has not begun this iteration"
        if beat["waiting"]:
            return f"{name} is also waiting: {beat['doing']}"
        return f"{name} has taken {beat['asked']} batches and not requested the next one"

    # The heartbeat thread

    def _beat(self) -> None:
        compared_at = monotonic()
        try:
            while not self._ended.wait(patience.HEARTBEAT):
                self._number += 1
                self.store.set(self._key(self.ranks.process), self._own_beat())
                if not self.ranks.process and monotonic() - compared_at >= patience.COMPARED:
                    self._compare_batches()
                    compared_at = monotonic()
        except StoreError as error:  # the thread that waits raises it, too
            logger.debug("heartbeat: %s", error)

    def _own_beat(self) -> Heartbeat:
        progress = self.progress
        return {
            "number": self._number,
            "iteration": progress.iteration,
            "asked": progress.asked,
            "waiting": progress.stalled > 0,
            "doing": progress.doing,
            "late": self.late,
            "ended": self.near("ended"),
            "stopped": self.near("stopped"),
            "place": own_place(),
        }

    def _compare_batches(self) -> None:
        """Warns if ranks have stayed at different batches since the last comparison, and none waits
        for the loader: the rank that is ahead may be waiting for the others in a collective."""
        beats = self._read(self._processes)
        same = [beat for beat in beats.values() if beat["iteration"] == self.progress.iteration]
        asked = {p: beat["asked"] for p, beat in beats.items() if not beat["waiting"]}
        stays = asked == self._asked and len(asked) == len(same) == self.ranks.num_processes
        self._asked = asked
        if stays and len(set(asked.values())) > 1 and asked != self._warned_of:
            self._warned_of = asked
            taken = ", ".join(f"{self.ranks.name(p)}: {count}" for p, count in asked.items())
            logger.warning(
                "ranks have taken different numbers of batches for %g s, and none waits for the "
                "loader (%s): one of them is ahead, or the others are busy",
                patience.COMPARED,
                taken,
            )

    @staticmethod
    def _key(process: int) -> str:
        return f"at/{process}"


def own_place() -> dict[str, Any]:
    """Where this process runs."""
    return {"host": HOST, "pid": os.getpid(), "ids": _own_ids()}


@cache
def _own_ids() -> str:
    """The boot, and the namespace of process ids: several nodes, or containers with their own
    process ids, may have the same host name."""
    with suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return HOST  # not Linux


def _is_here(place: dict[str, Any]) -> bool:
    return bool(place["ids"] == _own_ids())


def _state(place: dict[str, Any]) -> str:
    """Whether a process "runs", is "stopped", or has "ended"; "" if it is not on this node."""
    if not _is_here(place):
        return ""
    try:
        os.kill(place["pid"], 0)
    except ProcessLookupError:
        return "ended"
    except OSError:
        return "runs"
    stat, letter = Path(f"/proc/{place['pid']}/stat"), ""
    with suppress(OSError):
        letter = stat.read_text().rpartition(")")[2].split()[0]
    return {"Z": "ended", "X": "ended", "T": "stopped"}.get(letter, "runs")

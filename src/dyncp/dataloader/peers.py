"""Peers: how a rank waits for other ranks, and notices that one of them failed, left or died.

Ranks wait for each other when they make a loader (`compare`), and in every iteration over it.
During an iteration, each rank writes a heartbeat every second: the number of batches that its
training has requested, whether it is waiting, and the last step it agreed on. A rank that waits
checks its peers:

    a peer reported an error              raises the same BatchMismatch, or PeerError with the text
    a peer left the loop (break, close)   raises PeerError with its rank
    a peer's process ended                raises PeerError: at once if it ran on the same node,
                                          otherwise after 60 s without a heartbeat
    a peer is late                        warns after 5, 10, 20, ... s with its rank and progress;
                                          raises PeerError after plan_timeout + store_timeout
    a peer's epoch has other batches      raises BatchMismatch

Timeouts only include time during which training waits, since a peer may be writing a checkpoint. An
error is written to the store before it is raised, so that all ranks raise it. Keys in the store, in
addition to those of decision.py:

    settings, arrived, locations   making a loader: the settings of the first rank; the number of
                                   ranks with the same settings; where all processes run
    at/2                           heartbeat of process 2
    error                          message of the first rank that failed
    end, ended, all_ended          number of batches of the epoch; how many ranks have ended it;
                                   set when all have
    leaving, closed, closed/2      how many ranks are leaving; how many left; report of process 2
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, NoReturn

from dyncp.dataloader import patience
from dyncp.dataloader.ranks import BatchMismatch, LoaderRanks, PeerError, Store, StoreError
from dyncp.planner.process import Closed

logger = logging.getLogger(__name__)

FIRST_POLL, LONGEST_POLL = 0.5e-3, 20e-3  # seconds; the store answers in 0.1 ms on one node
END_OF_EPOCH = 1 << 62  # used as the step after the last one
SHOWN = 4  # an error names this many settings that differ
HOST = socket.gethostname()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Location = dict[str, Any]  # where a process runs: see `own_location`
Heartbeat = dict[str, Any]  # see `_write_heartbeat`


class Peers:
    """The other ranks as this rank sees them: while the loader is made (as a context manager), or
    during one iteration. `locations` are those of all processes when they made the loader. The
    training thread sets `asked` and `asked_at`; the threads that wait read them."""

    def __init__(
        self,
        store: Store,
        ranks: LoaderRanks,
        timeouts: tuple[float, float],
        locations: Sequence[Location] = (),
        asked: int = 0,
    ) -> None:
        self.store, self.ranks, self._locations = store, ranks, locations
        self.plan_timeout, self.store_timeout = timeouts
        self.asked = asked  # number of batches that training has taken or is waiting for
        self.asked_at: float | None = None  # when training started to wait; None: it does not wait
        self.closing = False  # the iteration is being closed
        self._name = f"rank {ranks.name()}"
        self._others = [p for p in range(ranks.num_processes) if p != ranks.process]
        self.agreed_step = -1  # the last step that this rank has agreed on
        self._lingers = False  # other ranks have yet to read why this rank failed
        self._last_beat: dict[int, tuple[int, float]] = {}  # by process: number, when it changed
        self._looked_at = 0.0
        self._asked: dict[int, int] = {}  # `asked` of ranks in training, at the last comparison
        self._warned_of: dict[int, int] = {}
        self._warn_after = patience.WARNED
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="dyncp-heartbeat", daemon=True)

    @property
    def stalled(self) -> float:
        """How long training has been waiting, in seconds."""
        asked_at = self.asked_at
        return 0.0 if asked_at is None else perf_counter() - asked_at

    def start(self) -> None:
        """Starts the heartbeat thread."""
        if self.ranks.shared:
            self._thread.start()

    # Making a loader

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.tell_failure(error, "could not make its loader")
            self._lingers = True
        self.close()

    def compare(self, settings: Mapping[str, str]) -> list[Location]:
        """Waits until all ranks have called this with equal settings; returns where they run.
        Raises BatchMismatch on all ranks if settings differ."""
        said = {"rank": self.ranks.name(), "settings": dict(settings)}
        first = self.store.first("settings", said)
        self._check_settings(first["settings"], first["rank"], settings)
        self.asked_at = perf_counter()
        self.agreed_step = 0
        self._write_heartbeat(0)
        if self.store.add("arrived", 1) == self.ranks.num_processes:
            beats = (self._read(f"at/{p}") for p in range(self.ranks.num_processes))
            self.store.set("locations", [beat["location"] for beat in beats])
        what = "all ranks to make this loader (they must make their loaders in the same order)"
        locations: list[Location] = self.wait_for("locations", what, 0)
        return locations

    def _check_settings(
        self, theirs: Mapping[str, str], rank: int, mine: Mapping[str, str]
    ) -> None:
        names = [name for name in sorted({*theirs, *mine}) if theirs.get(name) != mine.get(name)]
        if not names:
            return
        by_rank = sorted({rank: theirs, self.ranks.name(): mine}.items())
        told = []
        for name in names[:SHOWN]:
            values = [f"{settings.get(name, 'nothing')} on rank {r}" for r, settings in by_rank]
            told.append(f"{name} is {', '.join(values)}")
        self.mismatch(
            f"ranks made different loaders: {'; '.join(told)}; every rank needs the same "
            "arguments, samples and mask function"
        )

    # Waiting

    def wait_for(
        self,
        key: str,
        what: str,
        step: int,
        batch: int = -1,
        *,
        bound: float | None = None,
        overdue: Callable[[], None] | None = None,
    ) -> Any:
        """Waits for a key that other ranks set when they reach the step, and returns its value.
        Raises if a peer will never set it. When training has waited for `bound` seconds (None:
        plan_timeout + store_timeout), calls `overdue`, which may set the key, or raises PeerError.

        This polls instead of blocking in the store: a blocked call cannot be interrupted, and c10d
        logs warnings when it times out."""
        bound = self.plan_timeout + self.store_timeout if bound is None else bound
        pause, checked_at = FIRST_POLL, monotonic()
        while not self.store.has(key):
            sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)
            if monotonic() - checked_at < 10 * LONGEST_POLL:
                continue
            try:
                self._check(what, step, batch)
                if self.stalled > bound:
                    if overdue is None:
                        where = self._describe(step)
                        self.fail(PeerError(f"{self._name} waited {bound:g} s for {what}: {where}"))
                    overdue()
            except PeerError:
                if not self.store.has(key):  # a peer may have set it just before it left
                    raise
            checked_at = monotonic()
        return self.store.get(key)

    def _check(self, what: str, step: int, batch: int) -> None:
        """Raises if the iteration is closing, or if a peer failed, left, died, or has fewer batches
        than `batch`."""
        if self.closing:
            raise Closed
        told = self._read("error")
        if told is not None:
            raise (BatchMismatch if told["mismatch"] else PeerError)(told["text"])
        self._check_left(what)
        self._check_heartbeats(what, step)
        end = self._read("end")
        if end is not None and end <= batch:
            self._epoch_mismatch(f"is at batch {batch}", f"has {end} batches")

    def _check_left(self, what: str) -> None:
        """Raises if a peer has left. A process that died is reported in preference to peers that
        left, since these may have left because of it."""
        if not self.store.has("closed"):
            return
        for process, where in self._dead().items():
            self.fail(self._ended_error(process, where))
        reports = [(self._read(f"closed/{p}"), p) for p in range(self.ranks.num_processes)]
        left = sorted((r["order"], p, r["taken"]) for r, p in reports if r is not None)
        if left:
            (_, first, taken), *others = left
            then = "".join(f", then rank {self.ranks.name(process)}" for _, process, _ in others)
            raise PeerError(
                f"rank {self.ranks.name(first)} left this iteration after {taken} "
                f"batches (break, an exception or close()){then}, while {self._name} waits for "
                f"{what}; all ranks must take the same number of batches"
            )

    def _check_heartbeats(self, what: str, step: int) -> None:
        """Once training has waited for some seconds: warns, or raises if a peer is gone."""
        waited = self.stalled
        if waited < patience.WARNED:
            self._warn_after = patience.WARNED
            return
        pause = max(patience.HEARTBEAT, 0.02 * self.ranks.num_processes)  # spares the shared store
        if monotonic() - self._looked_at < pause:
            return
        self._looked_at = monotonic()
        try:
            text = self._describe(step)
        except PeerError as error:
            self.fail(error)
        if waited >= self._warn_after:
            self._warn_after *= 2
            logger.warning("%s has waited %.0f s for %s: %s", self._name, waited, what, text)

    def _describe(self, step: int) -> str:
        """Progress of the ranks that have not agreed on the step; PeerError if any rank is gone."""
        if not self._others:
            return "there are no other ranks; planning or reading takes this long"
        late = []
        for process in self._others:
            beat = self._read(f"at/{process}")
            where = self._where(process, beat)
            if beat is None or beat["agreed"] < step:
                late.append(where)
        return "; ".join(late) or "all other ranks are this far"

    def _where(self, process: int, beat: Heartbeat | None) -> str:
        """Progress of one rank, by its latest heartbeat."""
        name = f"rank {self.ranks.name(process)}"
        if beat is None:
            if self._locations and _has_ended(self._locations[process]):
                raise self._ended_error(process, self._locations[process])
            return f"{name} has not started"
        silent, location = self._silent_seconds(process, beat), beat["location"]
        at = f"process {location['pid']} on {location['host']}"
        if silent > patience.SILENT and _has_ended(location):
            raise self._ended_error(process, location)
        if silent > patience.GONE:
            raise PeerError(
                f"{self._name} cannot continue: {name} ({at}) has sent no heartbeat for "
                f"{silent:.0f} s"
            )
        if silent > patience.SILENT:
            return f"{name} has sent no heartbeat for {silent:.0f} s ({at})"
        if beat["waiting"]:
            return f"{name} is also waiting for batch {beat['asked'] - 1} and preparing it"
        return f"{name} has taken {beat['asked']} batches and not requested the next one"

    # Failing and leaving

    def fail(self, error: Exception) -> NoReturn:
        """Raises an error on this rank and on all others."""
        self._lingers = True
        told = {"text": str(error), "mismatch": isinstance(error, BatchMismatch)}
        self.store.first("error", told)
        raise error

    def mismatch(self, text: str) -> NoReturn:
        """Raises BatchMismatch on this rank and on all others."""
        self.fail(BatchMismatch(text))

    def tell_failure(self, error: BaseException, what: str = "failed") -> None:
        """Reports an error of this rank to the others, unless they caused it. Never raises."""
        if not isinstance(error, PeerError | StoreError | BatchMismatch | Closed):
            with suppress(PeerError, StoreError):  # the store may be what failed
                self.fail(PeerError(f"{self._name} {what}: {type(error).__name__}: {error}"))

    def end_epoch(self, num_batches: int) -> None:
        """Reports that this rank has no more batches. Raises BatchMismatch if another rank has
        ended its epoch after a different number of batches."""
        found = self.store.first("end", num_batches)
        if found != num_batches:
            self._epoch_mismatch(f"has {num_batches} batches", str(found))
        if self.store.add("ended", 1) == self.ranks.num_processes:
            self.store.set("all_ended", True)

    def _epoch_mismatch(self, mine: str, theirs: str) -> NoReturn:
        self.mismatch(
            f"ranks disagree on the epoch: {self._name} {mine}, another rank {theirs}; every rank "
            "needs the same dataset, lengths and options"
        )

    def wait_for_all_ends(self) -> None:
        """Waits until all ranks have ended the epoch after the same batch."""
        self.agreed_step = END_OF_EPOCH
        self.wait_for("all_ended", "all ranks to end the epoch", END_OF_EPOCH)

    def close(self) -> None:
        """Leaves the iteration and closes the store. The last rank to leave deletes the remaining
        keys; processes that died count as having left. Never raises."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2 * patience.HEARTBEAT)
        try:
            report = {"taken": self.asked, "order": self.store.add("leaving", 1)}
            self.store.set(f"closed/{self.ranks.process}", report)
            dead = len(self._dead())  # read before the last rank can delete the keys
            if self.store.add("closed", 1) + dead >= self.ranks.num_processes:
                self.store.delete(self.store.list_keys())
            elif self._lingers:
                self._linger()
        except StoreError as error:
            logger.debug("closing: %s", error)
        self.store.close()

    def _linger(self) -> None:
        """Waits briefly for the other ranks to leave. This process may host the store, and they
        would get a lost connection instead of the error."""
        end = monotonic() + patience.LINGER
        while monotonic() < end and self.store.has("closed"):
            sleep(LONGEST_POLL)

    # Heartbeats

    def _beat(self) -> None:
        number, compared_at = 0, monotonic()
        try:
            while True:
                self._write_heartbeat(number)
                if self._ended.wait(patience.HEARTBEAT):
                    return
                number += 1
                if not self.ranks.process and monotonic() - compared_at >= patience.COMPARED:
                    self._compare_batches()
                    compared_at = monotonic()
        except StoreError as error:  # the thread that waits raises it, too
            logger.debug("heartbeat: %s", error)

    def _write_heartbeat(self, number: int) -> None:
        beat = {
            "number": number,
            "asked": self.asked,
            "waiting": self.stalled > 0,
            "agreed": self.agreed_step,
            "location": own_location(),
        }
        self.store.set(f"at/{self.ranks.process}", beat)

    def _compare_batches(self) -> None:
        """Warns if ranks have stayed at different batches since the last comparison, and none waits
        for the loader: the rank that is ahead may be waiting for the others in a collective."""
        beats = {p: self._read(f"at/{p}") for p in range(self.ranks.num_processes)}
        asked = {p: beat["asked"] for p, beat in beats.items() if beat and not beat["waiting"]}
        stays = asked == self._asked and len(asked) == self.ranks.num_processes
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

    def _read(self, key: str) -> Any:
        """The value of a key; None if it is not set."""
        return self.store.get(key) if self.store.has(key) else None

    def _silent_seconds(self, process: int, beat: Heartbeat) -> float:
        """For how long this rank has not seen a new heartbeat of a process."""
        number, since = self._last_beat.get(process, (-1, 0.0))
        if number != beat["number"]:
            since = monotonic()
            self._last_beat[process] = beat["number"], since
        return monotonic() - since

    def _dead(self) -> dict[int, Location]:
        """Processes of this node that ended without leaving the iteration."""
        known = {p: self._locations[p] for p in self._others} if self._locations else {}
        ended = {p: where for p, where in known.items() if _has_ended(where)}
        return {p: where for p, where in ended.items() if not self.store.has(f"closed/{p}")}

    def _ended_error(self, process: int, where: Location) -> PeerError:
        name = f"rank {self.ranks.name(process)} (process {where['pid']} on {where['host']})"
        return PeerError(f"{self._name} cannot continue: {name} has ended")


def own_location() -> Location:
    """Where this process runs. `ids` names the boot and the namespace of its process id: several
    nodes, or containers with their own process ids, may have the same host name."""
    ids = HOST
    with suppress(OSError):  # not Linux
        ids = f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return {"host": HOST, "pid": os.getpid(), "ids": ids}


def _has_ended(where: Location) -> bool:
    """Whether a process has certainly ended; False if this process cannot see its process id."""
    return where["ids"] == own_location()["ids"] and not _alive(where["pid"])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"

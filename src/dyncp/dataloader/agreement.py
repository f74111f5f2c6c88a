"""How all ranks agree: in every round each writes one *record*, and one writes the *verdict*.

Making the loader is a round; those of an iteration are its start, its optimiser steps and its end.

    record       what must be equal on all ranks: the settings; the position where the iteration
                 starts; digests of the batches, plans, masks and samples of an update (optimiser
                 step), with this rank's number of targets; how many batches there were. Or why this
                 is the last record of this rank: it failed, or left the iteration
    verdict      go on, with the number of targets on all ranks; or the error that all ranks raise

Process 0 collects the records of a round, compares them (`disagreement`) and writes the verdict. It
sees whose record is missing, so it knows which ranks are late, and looks whether they are alive
(peers.py). An error comes in the same round on all ranks, after all batches before it.

The rank that plans a batch writes each rank's part of the plan. A rank that waits for a part also
looks for the record of the rank that plans: if that came without the part, the two have different
batches, which the verdict will say.

    3/5/of/2       iteration 3 (0: making the loader), round 5: record of process 2
    3/5/records    how many records there are; a last one counts LAST times
    3/5/verdict
    3/plan/1/7/2   replica 1, batch 7: part of rank 2 (further chunks in 3/plan/1/7/2/1, ...)
    3/leaving      how many processes have left the iteration before its end, in order
    3/left/2       process 2 has left it, or knows its last verdict
    at/2           heartbeat of process 2

Process 0 deletes the records of a round after its verdict, the rank that planned deletes parts when
all have read them, and the last process that leaves the iteration deletes what is left."""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dyncp.dataloader import patience
from dyncp.dataloader.batching import SelectedBatch
from dyncp.dataloader.peers import BatchMismatch, PeerError, Peers, TrainingProgress, own_place
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.store import SharedStore, StoreError
from dyncp.planner.process import Closed
from dyncp.samples import digest_of

logger = logging.getLogger(__name__)

FIRST_POLL = 0.5e-3  # seconds; the store answers in 0.1 ms on one node
LONGEST_POLL, POLL_PER_PROCESS = 20e-3, 0.1e-3  # many processes share one store
IDLE_POLL = 0.1  # of process 0, until it has a record of its own
LAST = 1 << 20
SHOWN = 4  # an error names this many settings, or ranks with the same value
Record = dict[str, Any]  # has one of the keys settings, start, update, end, failed and left


class Alone:
    """A single process agrees with itself."""

    def __init__(self, progress: TrainingProgress) -> None:
        self.progress = progress

    def compare_settings(self, settings: Mapping[str, str]) -> None:
        """Waits until all ranks make the loader with equal settings."""

    def conclude(self, record: Record) -> Record:
        """Writes this rank's record of a round; returns the verdict, or raises its error."""
        return {"targets": record.get("targets", 0)}

    def publish(self, selection: SelectedBatch, parts: tuple[bytes, ...], about: Record) -> None:
        """Writes the other ranks' parts of a plan, and what there is to know about it."""

    def part(self, selection: SelectedBatch) -> tuple[Record, bytes] | None:
        """Waits for what another rank publishes for this one; None if that rank has another
        batch."""
        raise AssertionError(f"a single process plans all batches, also {selection}")

    def fail(self, error: BaseException, what: str = "failed") -> None:
        """Tells the other ranks that this one cannot go on, unless they know. Never raises."""

    def stop(self) -> None:
        """Ends the wait of another thread, which raises Closed."""

    def leave(self) -> None:
        """Leaves the iteration. Never raises."""


class Agreement(Alone):
    """This process's part in one iteration. Planning threads publish plans, the delivering thread
    concludes rounds and fails, and the training thread stops it and leaves."""

    def __init__(self, peers: Peers, progress: TrainingProgress) -> None:
        super().__init__(progress)
        self._peers, self._store, self._ranks = peers, peers.store, peers.ranks
        self._iteration = progress.iteration
        peers.progress, peers.late = progress, ""
        self._round, self._wrote = 0, False  # the current round; whether it has this rank's record
        self._parts: dict[int, list[str]] = {}  # keys of this rank's plans, by batch
        self._publishing = threading.Lock()
        self._closing = False
        self._silent = False  # this rank has written its last record
        self._knows_end = False  # it has read the last verdict
        self._is_out = False  # it counts as having left
        self._leaving: Record = {}
        self._collector: threading.Thread | None = None
        if not self._ranks.process:
            self._collector = threading.Thread(
                target=self._collect, name="dyncp-collect", daemon=True
            )
            self._collector.start()

    def compare_settings(self, settings: Mapping[str, str]) -> None:
        # The training thread waits, and warns.
        self.progress.wait("all ranks to make this loader (loaders in the same order everywhere)")
        record = {"settings": dict(settings), "place": own_place()}
        self._peers.locate(self._conclude(record, self.progress.warn)["places"])
        self.progress.asked_at = None

    def conclude(self, record: Record) -> Record:
        return self._conclude(record)

    def _conclude(self, record: Record, meanwhile: Callable[[], object] = lambda: None) -> Record:
        def look() -> None:
            self.progress.others = self._look()
            meanwhile()

        self.progress.says("deliver", "other ranks have not come this far")
        self._write(record)
        self._wait_for(self._key("verdict"), look)
        verdict = self._read_verdict()
        last = record.get("last", -1)
        done = [number for number in list(self._parts) if number <= last]
        self._store.delete(key for number in done for key in self._parts.pop(number))
        return verdict

    def publish(self, selection: SelectedBatch, parts: tuple[bytes, ...], about: Record) -> None:
        ranks = self._ranks
        others = {m % ranks.num_ranks for m in range(ranks.num_members) if m != ranks.member}
        about = about | {"selection": selection.fingerprint}
        with self._publishing:
            for rank in sorted(others) if not self._is_out else ():
                keys = self._store.set_bytes(self._part_key(selection, rank), about, parts[rank])
                self._parts.setdefault(selection.number, []).extend(keys)

    def part(self, selection: SelectedBatch) -> tuple[Record, bytes] | None:
        ranks, number = self._ranks, selection.number
        planner = ranks.replica * ranks.num_members + number % ranks.num_members
        key, theirs = self._part_key(selection, ranks.rank or 0), self._key(f"of/{planner}")
        without: list[bool] = []  # the other rank has come to this round without a plan

        def look() -> None:
            if self._store.has(self._key("verdict")):
                self._read_verdict()  # without this rank's record it can only be an error
            if self._store.has(theirs) and not self._store.has(key):
                without.append(True)
            self.progress.others = self._look(planner)

        self.progress.says("deliver", f"rank {ranks.name(planner)} plans batch {number}")
        self._wait_for(key, look, without)
        self._quiet()
        if without:
            return None
        about, data = self._store.get_bytes(key)
        return (about, data) if about.pop("selection") == selection.fingerprint else None

    def fail(self, error: BaseException, what: str = "failed") -> None:
        if not isinstance(error, StoreError | Closed):
            raised = f"{type(error).__name__}: {error}"
            with suppress(StoreError):  # the store may be what failed
                self._write({"failed": f"rank {self._ranks.name()} {what}: {raised}"}, last=True)

    def stop(self) -> None:
        self._closing = True

    def leave(self) -> None:
        """The last process that leaves deletes all keys; those that died count as having left."""
        self.stop()
        try:
            self._peers.lingering = self._left_key(self._ranks.process)
            if not (self._knows_end or self._is_out):
                order = self._store.add(f"{self._iteration}/leaving", 1)
                self._leaving = {"left": order, "taken": self.progress.asked}
                self._write(self._leaving, last=True)
            if self._collector is not None:
                self._collector.join(patience.JOIN)
            self._go_out()
            if self._knows_end:
                self._peers.linger()
        except StoreError as error:
            logger.debug("leaving: %s", error)

    def _go_out(self) -> None:
        """Says that this process has left. The last one, of those alive, deletes all keys."""
        with self._publishing:
            was_out, self._is_out = self._is_out, True
        if was_out:
            return
        self._store.set(self._left_key(self._ranks.process), True)
        there = {*range(self._ranks.num_processes)} - {*self._peers.near("ended")}
        if self._store.has(*map(self._left_key, there)):
            self._store.delete(self._store.list_keys(f"{self._iteration}/"))

    def _write(self, record: Record, *, last: bool = False) -> None:
        """Writes the record of the current round, or as the last one that of the first round
        without a record. There is none after the last one."""
        if self._silent or self._knows_end:
            return
        self._silent = last
        number = self._round + (last and self._wrote)
        self._store.set(self._key(f"of/{self._ranks.process}", number), record)
        self._store.add(self._key("records", number), LAST if last else 1)
        self._wrote = True

    def _read_verdict(self) -> Record:
        verdict: Record = self._store.get(self._key("verdict"))
        self._quiet()
        if verdict["over"]:
            self._knows_end = True
            self._go_out()
        if "error" in verdict:
            raise (BatchMismatch if verdict["mismatch"] else PeerError)(verdict["error"])
        self._round, self._wrote = self._round + 1, False
        return verdict

    def _look(self, process: int | None = None) -> str:
        """What this process is doing, or the ranks that process 0 waits for. Raises PeerError if
        process 0 will not write a verdict."""
        lost = self._peers.look([0])[0] if self._ranks.process else ""
        if lost:
            self._silent = True
            raise PeerError(lost)
        return self._peers.told_late() if process is None else self._peers.look([process])[1]

    def _quiet(self) -> None:
        self.progress.says("deliver")
        self.progress.others = ""

    def _wait_for(self, key: str, look: Callable[[], None], enough: Iterable[bool] = ()) -> None:
        """Waits for a key, or until `look` has made `enough` true; calls it often at first, then
        once a second. This polls instead of blocking in the store: a blocked call cannot be
        interrupted, and c10d warns when it times out."""
        pause, due, between = FIRST_POLL, monotonic() + IDLE_POLL, IDLE_POLL
        longest = LONGEST_POLL + POLL_PER_PROCESS * self._ranks.num_processes
        while not self._store.has(key) and not any(enough):
            if self._closing:
                raise Closed
            sleep(pause)
            pause = min(2 * pause, longest)
            if monotonic() > due:
                look()
                between = min(2 * between, patience.HEARTBEAT)
                due = monotonic() + between

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._iteration}/{self._round if number is None else number}/{name}"

    def _left_key(self, process: int) -> str:
        return f"{self._iteration}/left/{process}"

    def _part_key(self, selection: SelectedBatch, rank: int) -> str:
        return f"{self._iteration}/plan/{self._ranks.replica}/{selection.number}/{rank}"

    # Collecting: a thread of process 0

    def _collect(self) -> None:
        number, over = 0, False
        everyone = range(self._ranks.num_processes)
        try:
            while not over:
                records, lost = self._records(number)
                verdict = self._judge(records, lost)
                over = verdict["over"]
                self._store.set(self._key("verdict", number), verdict)
                self._peers.late = ""
                gone = [self._key(f"of/{process}", number) for process in everyone]
                self._store.delete([*gone, self._key("records", number)])
                if len(records) == len(everyone) and number:  # all have read the verdict before
                    self._store.delete([self._key("verdict", number - 1)])
                number += 1
        except StoreError as error:  # the thread that waits raises it, too
            logger.debug("collecting: %s", error)
        except Exception as error:  # our mistake: nobody may wait for a verdict forever
            text = f"comparing the ranks' records raised {type(error).__name__}: {error}"
            verdict = {"over": True, "error": text, "mismatch": False}
            with suppress(StoreError):
                self._store.set(self._key("verdict", number), verdict)

    def _records(self, number: int) -> tuple[dict[int, Record], str]:
        """Waits for the records of all ranks, or until some will never come; returns those that
        are there, by process, and which rank was lost."""
        counter, pause, looked = self._key("records", number), FIRST_POLL, monotonic()
        keys = [self._key(f"of/{process}", number) for process in range(self._ranks.num_processes)]

        def found() -> dict[int, Record]:
            return {p: r for p, r in enumerate(map(self._store.get, keys)) if r is not None}

        while (count := self._store.add(counter, 0)) != len(keys):
            if count >= LAST or self._leaving:
                return found(), ""
            wrote = (self._round, self._wrote) >= (number, True)
            pause = min(2 * pause, LONGEST_POLL if wrote else IDLE_POLL)
            sleep(pause)
            if monotonic() - looked > patience.HEARTBEAT:
                lost, self._peers.late = self._peers.look(sorted({*range(len(keys))} - {*found()}))
                if lost:
                    return found(), lost
                looked = monotonic()
        return dict(enumerate(self._store.get_all(keys))), ""

    def _judge(self, records: Mapping[int, Record], lost: str = "") -> Record:
        """The verdict. A rank that failed is named first, then one that died, then those that left:
        they may have left because of it. There is none to go on without the records of all."""
        missing = sorted({*range(self._ranks.num_processes)} - {*records})
        failed = [record["failed"] for record in records.values() if "failed" in record]
        left = [(r["left"], p, r["taken"]) for p, r in records.items() if "left" in r]
        if missing and not left and self._leaving:
            left = [(self._leaving["left"], self._ranks.process, self._leaving["taken"])]
        if left and not self._peers.knows_fate_of(missing):
            sleep(2 * patience.HEARTBEAT)  # another node may report that a process has ended
        if missing and not failed:
            lost = self._peers.look(missing)[0] or lost
        why = failed[0] if failed else lost or self._who_left(left)
        mismatch = "" if why else disagreement(records, self._ranks)
        if why or mismatch:
            return {"over": True, "error": why or mismatch, "mismatch": bool(mismatch)}
        assert not missing, f"no record of {missing}"
        return {
            "over": any("end" in record or "settings" in record for record in records.values()),
            "targets": sum(record.get("targets", 0) for record in records.values()),
            "places": [record.get("place") for record in records.values()],
        }

    def _who_left(self, left: list[tuple[int, int, int]]) -> str:
        if not left:
            return ""
        _, first, taken = min(left)
        return (
            f"rank {self._ranks.name(first)} left this iteration after {taken} batches (break, an "
            "exception or close()); all ranks must take the same number of batches"
        )


class Together:
    """The processes that make a loader together. They agree when they make it, and in every
    iteration."""

    # How many loaders each tuple of global ranks has made: every process counts the same number,
    # which names the loader's keys in the store.
    _num_made: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(self, ranks: LoaderRanks) -> None:
        self._ranks, self._iteration = ranks, -1
        self._number = self._num_made[ranks.all_ranks]
        self._num_made[ranks.all_ranks] += 1
        self._peers: Peers | None = None

    @contextmanager
    def making(self, timeout: float) -> Iterator[Alone]:
        """The agreement in which the loader is made. Other ranks learn of errors."""
        agreement = self.begin(0, timeout)
        try:
            yield agreement
        except BaseException as error:
            agreement.fail(error, "could not make its loader")
            agreement.leave()
            self.close()
            raise
        agreement.leave()

    def begin(self, asked: int, timeout: float) -> Alone:
        """The agreement of the next iteration, in which training has `asked` for this many batches.
        Calls of the store time out."""
        self._iteration += 1
        progress = TrainingProgress(self._ranks.name(), self._iteration, asked)
        if not self._ranks.shared:
            return Alone(progress)
        if self._peers is None:
            self._peers = Peers(self._open_store(timeout), self._ranks, progress)
        self._peers.store.timeout = timeout
        return Agreement(self._peers, progress)

    def close(self) -> None:
        """Ends the heartbeat; a further iteration starts it again."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _open_store(self, timeout: float) -> SharedStore:
        """This process's connection. Keys are named by run, restart, ranks and loader."""
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        loader = f"{digest_of(self._ranks.all_ranks)}/{self._number}"
        store = distributed_c10d._get_default_store()
        return SharedStore(store, f"dyncp/{run}/{restart}/{loader}", dist.get_rank(), timeout)


# Comparing records


def disagreement(records: Mapping[int, Record], ranks: LoaderRanks) -> str:
    """What ranks disagree on; "" if they agree. `records` are those of all processes."""
    texts = (
        *_different_settings(records, ranks),
        *_different_positions(records, ranks),
        *_different_batches(records, ranks),
        *_different_contents(records, ranks),
    )
    return next(iter(texts), "")


def _different_settings(records: Mapping[int, Record], ranks: LoaderRanks) -> Iterator[str]:
    given = {p: record["settings"] for p, record in records.items() if "settings" in record}
    names = sorted({name for settings in given.values() for name in settings})
    told = []
    for name in names:
        values = {p: settings.get(name, "nothing") for p, settings in given.items()}
        told += [f"{name} is {_by_value(values, ranks)}"] if _differ(values) else []
    if told:
        yield (
            f"ranks made different loaders: {'; '.join(told[:SHOWN])}; every rank needs the same "
            "arguments, samples and mask function"
        )


def _different_positions(records: Mapping[int, Record], ranks: LoaderRanks) -> Iterator[str]:
    starts = {p: record["start"] for p, record in records.items() if "start" in record}
    if _differ(starts):
        told = {p: f"after batch {s['batches']} of epoch {s['epoch']}" for p, s in starts.items()}
        values = told if _differ(told) else {p: str(start) for p, start in starts.items()}
        yield (
            f"ranks start at different positions: {_by_value(values, ranks)}; load the same state "
            "on all ranks or on none, and set the same epoch"
        )


def _different_batches(records: Mapping[int, Record], ranks: LoaderRanks) -> Iterator[str]:
    """Batches are the same if all replicas have dealt the same ones."""
    same = "every rank needs the same dataset, lengths, seed, epoch, budget, mask function,"
    values = {p: _end_or_update(record) for p, record in records.items()}
    if any("end" in record for record in records.values()) and _differ(values):
        ends = _by_value(values, ranks)
        yield f"ranks disagree on the epoch: {ends}; {same} options and loaded state"
    updates = {p: record["update"] for p, record in records.items() if "update" in record}
    if not _differ(updates):
        return
    for number, batches in _by_batch(records, ranks):
        told = {p: batch["samples"] for p, batch in batches.items()}
        if _differ(told):
            about = {p: batch["about"] for p, batch in batches.items()}
            what = _by_value(about if _differ(about) else told, ranks)
            yield f"ranks disagree on batch {number}: {what}; {same} options and loaded state"
    yield (
        "replicas dealt the batches of an optimiser step differently: it is "
        f"{_by_value(updates, ranks)}; {same} model= and cost="
    )


def _different_contents(records: Mapping[int, Record], ranks: LoaderRanks) -> Iterator[str]:
    for number, batches in _by_batch(records, ranks):
        for sample in sorted({int(n) for batch in batches.values() for n in batch["digests"]}):
            found = {p: batch["digests"].get(str(sample)) for p, batch in batches.items()}
            for at, what in ((1, "masks"), (2, "content")):
                values = {p: digests[at] for p, digests in found.items() if digests and digests[at]}
                if _differ(values):
                    index = next(digests[0] for digests in found.values() if digests)
                    yield (
                        f"ranks disagree on sample {index} (number {sample} of batch {number}): "
                        f"the {what} is {_by_value(values, ranks)}; every rank must read the same "
                        "tokens and make the same masks: a dataset that shuffles or augments at "
                        "random needs a seed that all ranks share, or torch's own generator"
                    )
        plans = {p: batch["plan"] for p, batch in batches.items()}
        if _differ(plans):
            yield f"ranks hold different plans of batch {number}: {_by_value(plans, ranks)}"


def _by_batch(
    records: Mapping[int, Record], ranks: LoaderRanks
) -> Iterator[tuple[int, dict[int, Record]]]:
    """What the members of each replica say of each batch, by process."""
    for replica in range(ranks.num_replicas):
        first = replica * ranks.num_members
        own = {p: records[p] for p in range(first, first + ranks.num_members) if p in records}
        numbers = {int(n) for record in own.values() for n in record.get("batches", ())}
        for number in sorted(numbers):
            named = {p: record.get("batches", {}).get(str(number)) for p, record in own.items()}
            yield number, {p: batch for p, batch in named.items() if batch}


def _end_or_update(record: Record) -> str:
    if "end" in record:
        return f"it ends after {record['end']} batches"
    return f"it has a batch {record.get('last')}"


def _differ(values: Mapping[int, Any]) -> bool:
    first = next(iter(values.values()), None)
    return any(value != first for value in values.values())


def _by_value(values: Mapping[int, Any], ranks: LoaderRanks) -> str:
    """Who has which value: "0 on rank 0, 1 on ranks 1 and 2"."""
    by_text: dict[str, list[str]] = {}
    for process, value in values.items():
        by_text.setdefault(str(value), []).append(str(ranks.name(process)))
    return ", ".join(
        f"{text} on rank{'s' * (len(names) > 1)} {' and '.join(names[:SHOWN])}"
        f"{' and others' * (len(names) > SHOWN)}"
        for text, names in by_text.items()
    )

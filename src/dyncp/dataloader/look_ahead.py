"""LookAhead: prepares the next batches in background threads.

    selecting thread     selects batches, and makes the masks of the batches that this rank plans
    planning threads     one per planning process: requests plans from it and publishes them
    delivering thread    waits for each batch's plan, cuts local data, counts targets, agrees with
                         the other ranks, prepares plans for the executor

The batches of an optimiser step become ready together, once all ranks have agreed on all of them.
The next one is selected when training is less than `depth` batches behind it; `depth` grows while
few batches are ready. `LoaderMetrics` counts batches, skipped samples, and the time that training
waits.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from dyncp.compiled import count_compiled
from dyncp.dataloader import patience
from dyncp.dataloader.agreement import Alone
from dyncp.dataloader.batching import SelectedUpdate
from dyncp.dataloader.prepare import (
    BatchData,
    BatchPreparer,
    BatchRecord,
    LoaderContext,
    PreparedBatch,
)
from dyncp.dataloader.state import Position
from dyncp.planner.cold_start import is_cold
from dyncp.planner.process import Closed, PlanHere, PlanProcess, PlanReply

logger = logging.getLogger(__name__)

MAX_GROWTH = 4  # the queue may grow to this multiple of `look_ahead`
KEPT = 1000  # percentiles are over this many batches
LOGGED = 3  # a warning names this many skipped samples per reason
HELPED_TOKENS = 16_384  # planning a smaller batch takes less time than starting a process


class LoaderMetrics:
    """Counts since the loader was made, and percentiles over the last 1,000 batches."""

    def __init__(self, processes: Sequence[PlanHere | PlanProcess] = ()) -> None:
        self._processes = processes
        self.batches = 0
        self.static_plans = 0  # batches that got a static plan because the planner failed
        self.stall_seconds = 0.0
        self.solvers: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()  # samples, by reason
        self._records: deque[BatchRecord] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    @property
    def restarts(self) -> int:
        """How often a planning process was restarted."""
        return sum(process.restarts for process in self._processes)

    @property
    def last(self) -> BatchRecord | None:
        """The record of the latest batch that training took."""
        return self._records[-1] if self._records else None

    def record(self, record: BatchRecord) -> None:
        with self._lock:
            self.batches += 1
            self.static_plans += record.static
            self.stall_seconds += record.stall_seconds
            self.solvers[record.solver] += 1
            self._records.append(record)

    def skip(self, reason: str, index: int, text: object) -> None:
        """Counts a skipped sample, and logs the first few for each reason."""
        with self._lock:
            self.skipped[reason] += 1
            count = self.skipped[reason]
        if count <= LOGGED:
            more = "; further ones are only counted" if count == LOGGED else ""
            logger.warning("sample %s is skipped (%s): %s%s", index, reason, text, more)

    def snapshot(self) -> dict[str, Any]:
        """All metrics by name, as plain values for a logger or JSON."""
        with self._lock:
            records, solvers = list(self._records), dict(self.solvers)
            skipped = dict(self.skipped)
        counted = ("batches", "static_plans", "restarts", "stall_seconds")
        numbers: dict[str, Any] = {name: getattr(self, name) for name in counted}
        numbers |= {"solvers": solvers, "skipped": skipped}
        for name in ("plan_seconds", "stall_seconds"):
            values = [getattr(record, name) for record in records] or [0.0]
            p50, p99 = np.percentile(values, [50, 99]).tolist()
            numbers |= {f"{name}_p50": p50, f"{name}_p99": p99}
        if records:
            shown = ("queue_depth", "moved_bytes", "compute_imbalance", "token_imbalance")
            numbers |= {name: getattr(records[-1], name) for name in shown}
            numbers["part_bytes"] = max(record.part_bytes for record in records)
        return numbers

    def line(self) -> str:
        """The metrics as one line for the log."""
        now, last = self.snapshot(), self.last
        text = (
            f"plan {1e3 * now['plan_seconds_p50']:.0f} ms (p99 "
            f"{1e3 * now['plan_seconds_p99']:.0f}), stalled {now['stall_seconds']:.1f} s"
        )
        if last is not None:
            text += (
                f", {last.queue_depth} ready, {last.moved_bytes / 1e6:.1f} MB per layer, imbalance "
                f"{last.compute_imbalance:.2f} compute {last.token_imbalance:.2f} tokens, "
                f"{last.solver}"
            )
        return text


class LookAhead:
    """One iteration. `take` returns the next batch or raises the error that prevents it; `close`
    ends the iteration."""

    def __init__(
        self,
        context: LoaderContext,
        agreement: Alone,
        updates: Iterator[SelectedUpdate],
        start: Position,
    ) -> None:
        self._context, self._agreement, self._progress = context, agreement, agreement.progress
        self._updates, self._start = updates, start
        self._preparer = BatchPreparer(context, agreement)
        self._compiles = is_cold()
        self._changed = threading.Condition()
        self._closing = self._at_exit = False
        self._first = self._progress.asked  # number of the first batch
        self._depth = context.config.tuning.look_ahead
        self._selected: deque[tuple[SelectedUpdate, list[BatchData]] | BaseException] = deque()
        self._unplanned: deque[BatchData] = deque()
        self._ready: deque[PreparedBatch | BaseException] = deque()
        self._planning = {
            process: self._thread(partial(self._plan, process), "dyncp-plan")
            for process in context.processes
        }
        self._threads = [
            self._thread(self._select, "dyncp-select"),
            *self._planning.values(),
            self._thread(self._deliver, "dyncp-deliver"),
        ]
        for thread in self._threads:
            thread.start()

    def _thread(self, loop: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._until_closed, args=(loop,), name=name, daemon=True)

    def _until_closed(self, loop: Callable[[], None]) -> None:
        with suppress(Closed):
            loop()

    # The training thread

    def take(self) -> PreparedBatch | None:
        """The next batch; None at the end of the epoch."""
        start = perf_counter()
        with self._changed:
            depth = len(self._ready)
            self._deepen(depth)
            self._progress.asked += 1
            self._progress.wait()
            self._changed.notify_all()
            try:
                self._wait_for_ready()
            finally:
                self._progress.asked_at = None
            item = self._ready.popleft()
        if isinstance(item, StopIteration):
            return None
        if isinstance(item, BaseException):
            raise item
        record = replace(item.record, stall_seconds=perf_counter() - start, queue_depth=depth)
        return replace(item, record=record)

    def _wait_for_ready(self) -> None:
        """Waits for a batch or an error; warns while that takes long."""
        while not (self._closing or self._ready):
            self._changed.wait(self._progress.warn())
        while self._at_exit:  # a daemon thread that trains waits for the interpreter to end
            self._changed.wait()
        if self._closing:
            raise RuntimeError(
                "this iteration of the loader was closed: by close(), load_state_dict, "
                "set_epoch or a later iter(loader)"
            )

    def _deepen(self, ready: int) -> None:
        """Looks further ahead if the queue has run low."""
        usual = self._context.config.tuning.look_ahead
        filled_once = self._progress.asked >= self._first + usual
        if ready <= usual // 4 and filled_once:
            self._depth = min(self._depth + 1, MAX_GROWTH * usual)

    def close(self, *, at_exit: bool = False) -> None:
        """Ends the threads and leaves the iteration. Plans that are being made get one second, then
        their processes are killed. With `at_exit`, `take` blocks instead of raising."""
        self._at_exit = self._at_exit or at_exit
        if threading.current_thread() in self._threads:  # garbage collection ran in this thread
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._agreement.stop()
        self._end_planning()
        for thread in self._threads:
            thread.join(patience.JOIN)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning(
                "a thread of the loader is stuck in the dataset, the mask function or (with "
                "num_planners=0) the planner"
            )
        self._agreement.leave()

    def _end_planning(self) -> None:
        end = monotonic() + patience.PLAN_END
        for process, thread in self._planning.items():
            thread.join(max(0.0, end - monotonic()))
            if thread.is_alive():
                process.close()
                thread.join(patience.JOIN)

    # The selecting thread. Its errors come after all batches before them.

    def _select(self) -> None:
        number = self._first
        try:
            while (update := self._next_update(number)) is not None:
                batches = [BatchData(self._context, selection) for selection in update.selections]
                self._put(self._selected, (update, batches))
                for batch in batches:
                    self._select_batch(batch)
                number = update.selections[-1].number + 1
            self._put(self._selected, StopIteration(number))
        except Closed:
            raise
        except BaseException as error:
            self._put(self._selected, error)
        self._progress.says("select")

    def _next_update(self, first: int) -> SelectedUpdate | None:
        """Waits until the update that starts with batch `first` is within the look-ahead."""
        self._progress.says("select")
        self._wait_until(lambda: first < self._progress.asked + self._depth)
        reads = "" if self._context.source.knows_lengths else ", reading samples for it"
        self._progress.says("select", f"filling batch {first}{reads}")
        return next(self._updates, None)

    def _select_batch(self, batch: BatchData) -> None:
        if self._closing:
            raise Closed
        context, selection = self._context, batch.selection
        if not batch.plans:
            return
        batch.says(f"making the masks of batch {selection.number}")
        try:
            context.planner.check_tokens(selection.num_tokens, f"batch {selection.number} has")
            batch.batch()
        except Exception as error:
            self._planned(batch, error)
        else:
            batch.says(f"batch {selection.number} waits for a planner")
            self._put(self._unplanned, batch)

    # The planning threads

    def _plan(self, process: PlanHere | PlanProcess) -> None:
        """Plans batches with one process. The first process starts at once, the others with the
        first large batch; small batches are left to the first process."""
        first, queue = process is self._context.processes[0], self._unplanned
        if first:
            if self._compiles:
                logger.info("the planner compiles, once per installation: 10 to 30 s")
            process.start()
        least = 0 if first else HELPED_TOKENS
        while True:
            with self._changed:
                self._wait_until(lambda: bool(queue) and queue[0].selection.num_tokens >= least)
                batch = queue.popleft()
            batch.says(partial(self._describe_planning, process, batch, monotonic()))
            try:
                self._planned(batch, self._plan_batch(process, batch))
            except Closed:
                raise
            except Exception as error:
                self._planned(batch, error)

    def _plan_batch(self, process: PlanHere | PlanProcess, batch: BatchData) -> PlanReply:
        """This rank's part of the plan; publishes the others."""
        ranks, selection = self._context.ranks, batch.selection
        reply = self._context.planner.plan(process, batch.batch())
        if reply.static_because:
            epoch, reason = selection.end.epoch, reply.static_because
            text = "batch %d of epoch %d gets a static plan: %s"
            logger.warning(text, selection.number, epoch, reason)
        about = {"seconds": reply.seconds, "static_because": reply.static_because}
        self._agreement.publish(selection, reply.parts, about)
        return reply if ranks.rank is None else replace(reply, parts=(reply.parts[ranks.rank],))

    def _describe_planning(
        self, process: PlanHere | PlanProcess, batch: BatchData, since: float
    ) -> str:
        text = f"planning batch {batch.selection.number} for {monotonic() - since:.0f} s"
        if not process.has_planned and self._compiles:
            text += f"; the planner compiles, once per installation ({count_compiled()} functions)"
        return text + "; the planner has just started" * (not process.has_planned)

    def _planned(self, batch: BatchData, found: PlanReply | BaseException) -> None:
        with self._changed:
            batch.planned = found
            self._changed.notify_all()

    # The delivering thread, which alone tells the other ranks of errors

    def _deliver(self) -> None:
        try:
            self._agreement.conclude({"start": self._start.summary()})
            while True:
                self._wait_until(lambda: bool(self._selected))
                item = self._selected.popleft()
                if isinstance(item, StopIteration):
                    self._agreement.conclude({"end": item.value})
                if isinstance(item, BaseException):
                    raise item
                self._deliver_update(*item)
        except Closed:
            raise
        except BaseException as error:
            if not isinstance(error, StopIteration):
                self._agreement.fail(error)
            self._put(self._ready, error)

    def _deliver_update(self, update: SelectedUpdate, batches: list[BatchData]) -> None:
        prepared = self._preparer.prepare_update(update, map(self._when_planned, batches))
        if self._context.executor is not None:
            for item in prepared:
                self._context.executor.prepare_ahead(item.plan)
        self._put(self._ready, *prepared)

    def _when_planned(self, batch: BatchData) -> BatchData:
        """Waits until this rank has planned the batch, if it plans it."""
        self._progress.says("deliver", lambda: batch.doing)
        self._wait_until(lambda: batch.planned is not None or not batch.plans)
        return batch

    # Between the threads

    def _put(self, queue: deque[Any], *items: Any) -> None:
        with self._changed:
            queue.extend(items)
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or condition())
            if self._closing:
                raise Closed

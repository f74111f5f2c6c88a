"""LookAhead: prepares the next batches in background threads.

    selecting thread     selects batches, and makes the masks of the batches that this rank plans
    planning threads     one per planning process: requests plans from it and publishes them
    delivering thread    waits for each batch's decision, cuts local data, counts targets,
                         prepares plans for the executor

The batches of an optimiser step become ready together, once all ranks have agreed on all of them.
The next step is selected when training is less than `depth` batches behind it; `depth` grows while
few batches are ready. `LoaderMetrics` counts batches, skipped samples, and the time that training
waits.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import numpy as np

from dyncp.dataloader import patience
from dyncp.dataloader.batching import SelectedStep
from dyncp.dataloader.decision import PlanExchange
from dyncp.dataloader.local_fields import loss_divisor
from dyncp.dataloader.peers import Peers
from dyncp.dataloader.prepare import (
    BatchData,
    BatchPreparer,
    BatchRecord,
    LoaderContext,
    PreparedBatch,
)
from dyncp.dataloader.ranks import PeerError, Store
from dyncp.planner.process import Closed, PlanFailed, PlanHere, PlanProcess

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
        self, context: LoaderContext, steps: Iterator[SelectedStep], store: Store, first: int
    ) -> None:
        self._context, self._steps = context, steps
        config, ranks = context.config, context.ranks
        timeouts = config.plan_timeout, config.store_timeout
        self._peers = Peers(store, ranks, timeouts, context.locations, first)
        self._changed = threading.Condition()
        self._at_exit = False
        self._failure: BaseException | None = None
        self._first = first  # number of the first batch
        self._depth = config.look_ahead
        self._exchange = PlanExchange(self._peers)
        self._preparer = BatchPreparer(context, self._exchange)
        self._selected: deque[tuple[SelectedStep, list[BatchData]] | BaseException] = deque()
        self._unplanned: deque[BatchData] = deque()
        self._unpublished = 0  # batches that this rank has to plan and has not published yet
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
        self._peers.start()
        for thread in self._threads:
            thread.start()

    def _thread(self, loop: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(loop, name), name=name, daemon=True)

    def take(self) -> PreparedBatch | None:
        """The next batch; None at the end of the epoch."""
        with self._changed:
            depth = len(self._ready)
            self._deepen(depth)
            self._peers.asked += 1
            start = self._peers.asked_at = perf_counter()
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._peers.closing or self._ready)
                while self._at_exit:  # a daemon thread that trains waits for the interpreter to end
                    self._changed.wait()
                if self._peers.closing:
                    raise RuntimeError(
                        "this iteration of the loader was closed: by close(), load_state_dict, "
                        "set_epoch or a later iter(loader)"
                    )
            finally:
                self._peers.asked_at = None
            item = self._ready.popleft()
        if isinstance(item, StopIteration):
            return None
        if isinstance(item, BaseException):
            raise item
        stall = perf_counter() - start
        record = replace(item.record, stall_seconds=stall, queue_depth=depth)
        return replace(item, record=record)

    def _deepen(self, ready: int) -> None:
        """Looks further ahead if the queue has run low."""
        usual = self._context.config.look_ahead
        filled_once = self._peers.asked >= self._first + usual
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
            if self._peers.closing:
                return
            self._peers.closing = True
            self._changed.notify_all()
        self._end_planning()
        for thread in self._threads:
            thread.join(patience.JOIN)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning(
                "a thread of the loader is stuck in the dataset, the mask function or (with "
                "num_planners=0) the planner"
            )
            return
        self._peers.store.hurry()
        self._peers.close()

    def _end_planning(self) -> None:
        end = monotonic() + patience.PLAN_END
        for process, thread in self._planning.items():
            thread.join(max(0.0, end - monotonic()))
            if thread.is_alive():
                process.close()
                thread.join(patience.JOIN)

    def _guard(self, loop: Callable[[], None], name: str) -> None:
        """Runs a thread's loop. An error is raised in the training loop, after all batches before
        it, and on the other ranks."""
        try:
            loop()
        except Closed:
            return
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            elif isinstance(error, PeerError):  # other ranks report this rank's own failure back
                error = self._failure
            self._peers.tell_failure(error)
            queue = self._ready if name == "dyncp-deliver" else self._selected
            self._put(queue, error)

    # The selecting thread

    def _select(self) -> None:
        number = self._first
        try:
            while (step := self._next_step(number)) is not None:
                batches = [BatchData(self._context, selection) for selection in step.selections]
                self._put(self._selected, (step, batches))
                for batch in batches:
                    self._select_batch(batch)
                number = step.selections[-1].number + 1
        finally:  # all batches before the end, or before an error, are published
            self._wait_until(lambda: not self._unpublished)
        self._peers.end_epoch(number)
        self._put(self._selected, StopIteration())

    def _next_step(self, first: int) -> SelectedStep | None:
        """Waits until the step that starts with batch `first` is within the look-ahead."""
        self._wait_until(lambda: first < self._peers.asked + self._depth)
        return next(self._steps, None)

    def _select_batch(self, batch: BatchData) -> None:
        if self._peers.closing:
            raise Closed
        context, selection = self._context, batch.selection
        context.planner.check_tokens(selection.num_tokens, f"batch {selection.number} has")
        if not context.ranks.plans(selection.number):
            return
        batch.batch()
        with self._changed:
            self._unplanned.append(batch)
            self._unpublished += 1
            self._changed.notify_all()

    # The planning threads

    def _plan(self, process: PlanHere | PlanProcess) -> None:
        """Plans batches with one process. The first process starts at once, the others with the
        first large batch; small batches are left to the first process."""
        first, queue = process is self._context.processes[0], self._unplanned
        if first:
            process.start()
        least = 0 if first else HELPED_TOKENS
        while True:
            with self._changed:
                self._wait_until(lambda: bool(queue) and queue[0].selection.num_tokens >= least)
                batch = queue.popleft()
            try:
                self._plan_batch(process, batch)
            finally:
                with self._changed:
                    self._unpublished -= 1
                    self._changed.notify_all()

    def _plan_batch(self, process: PlanHere | PlanProcess, batch: BatchData) -> None:
        context, selection = self._context, batch.selection
        try:
            reply = context.planner.plan(process, batch.batch())
        except PlanFailed as failure:
            self._exchange.decide_static(selection, str(failure))
        else:
            self._exchange.publish(selection, reply, batch.digests())

    # The delivering thread

    def _deliver(self) -> None:
        while True:
            self._wait_until(lambda: bool(self._selected))
            item = self._selected.popleft()
            if isinstance(item, StopIteration):
                self._peers.wait_for_all_ends()
            if isinstance(item, BaseException):
                self._put(self._ready, item)
                return
            self._deliver_step(*item)

    def _deliver_step(self, step: SelectedStep, batches: list[BatchData]) -> None:
        prepared = [self._preparer.prepare(step.number, batch) for batch in batches]
        self._exchange.add_targets(step, sum(item.targets for item in prepared))
        counted = self._exchange.total_targets(step)
        items = counted if step.known_items is None else step.known_items
        divisor = {"num_items_in_batch": loss_divisor(items)}
        finished = [
            replace(item, data=item.data | divisor, end=replace(item.end, items=items))
            for item in prepared
        ]
        if self._context.executor is not None:
            for item in finished:
                self._context.executor.prepare_ahead(item.plan)
        self._put(self._ready, *finished)

    # Between the threads

    def _put(self, queue: deque[Any], *items: Any) -> None:
        with self._changed:
            queue.extend(items)
            self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._peers.closing or condition())
            if self._peers.closing:
                raise Closed

"""LookAhead: prepares the next batches in the background, in threads.

    selecting thread     selects batches, makes the masks of those that this rank plans
    planning threads     ask a planning process each for plans, and publish them
    delivering thread    waits for each batch's decision, cuts local data, counts targets

Batches of an optimiser step are ready together, when all ranks have agreed on all of them. A batch
is selected once training has asked for one that is `depth` batches (or one step) before it; `depth`
grows while few batches are ready.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter

from dyncp.dataloader.batch_data import BatchData, Masking
from dyncp.dataloader.batching import SelectedStep
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.dataset import Source
from dyncp.dataloader.errors import Closed, PeerError, PlanFailed
from dyncp.dataloader.exchange import Exchange, Waiting
from dyncp.dataloader.local_tokens import divisor
from dyncp.dataloader.metrics import LoaderMetrics
from dyncp.dataloader.peers import Place
from dyncp.dataloader.plan_process import PlanProcess
from dyncp.dataloader.plan_store import Store
from dyncp.dataloader.planning import Planning
from dyncp.dataloader.prepare import Prepared, Preparing
from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

END_SECONDS = 1.0  # that a plan in the making gets when an iteration is closed
JOIN_SECONDS = 10.0
DEEPEST = 4  # times `look_ahead`, where the queue runs low
HELPED_TOKENS = 16_384  # a smaller batch is planned sooner than a second process starts


@dataclass(frozen=True, eq=False)
class Background:
    """What an iteration needs of its loader."""

    config: LoaderConfig
    ranks: LoaderRanks
    source: Source
    masking: Masking
    planning: Planning
    processes: tuple[PlanProcess, ...]
    metrics: LoaderMetrics
    places: Sequence[Place] = ()  # where the ranks' processes run, once that is known


class LookAhead:
    """One iteration. `take` gives the next batch, or raises what went wrong; `close` ends it."""

    def __init__(
        self, background: Background, steps: Iterator[SelectedStep], store: Store, first: int
    ) -> None:
        self._background, self._steps, self._store = background, steps, store
        config, ranks = background.config, background.ranks
        waiting = Waiting(
            lambda: self._closing,
            self._stalled,
            config.plan_timeout,
            config.store_timeout,
            lambda: self._asked,
        )
        self._changed = threading.Condition()
        self._closing = self._at_exit = False
        self._failure: BaseException | None = None
        self._first = first  # number of the first batch
        self._asked = first  # batches before the one that training asks for next
        self._asked_at: float | None = None
        self._depth = config.look_ahead
        self._exchange = Exchange(store, ranks, waiting, background.places)
        self._preparing = Preparing(config, ranks, background.planning, self._exchange)
        self._selected: deque[tuple[SelectedStep, list[BatchData]] | BaseException] = deque()
        self._unplanned: deque[BatchData] = deque()
        self._unpublished = 0  # batches that are not planned yet, or just being planned
        self._ready: deque[Prepared | BaseException] = deque()
        self._selecting = self._thread(self._select, "dyncp-select")
        self._planning = {
            process: self._thread(partial(self._plan, process), "dyncp-plan")
            for process in background.processes
        }
        self._delivering = self._thread(self._deliver, "dyncp-deliver")
        self._threads = [self._selecting, *self._planning.values(), self._delivering]
        self._exchange.start()
        for thread in self._threads:
            thread.start()

    def _thread(self, loop: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(loop, name), name=name, daemon=True)

    def take(self) -> Prepared | None:
        """The next batch; None at the end of the epoch."""
        with self._changed:
            depth = len(self._ready)
            self._deepen(depth)
            self._asked += 1
            start = self._asked_at = perf_counter()
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closing or self._ready)
                while self._at_exit:
                    self._changed.wait()  # in a daemon thread, which ends with the interpreter
                if self._closing:
                    raise RuntimeError(
                        "this iteration of the loader was closed: by close(), load_state_dict, "
                        "set_epoch or a later iter(loader)"
                    )
            finally:
                self._asked_at = None
            item = self._ready.popleft()
        if isinstance(item, StopIteration):
            return None
        if isinstance(item, BaseException):
            raise item
        stall = perf_counter() - start
        return replace(item, record=item.record.taken(stall, depth))

    def _deepen(self, ready: int) -> None:
        """Looks further ahead where the queue ran low: it then lasts for longer."""
        usual = self._background.config.look_ahead
        if ready <= usual // 4 and self._asked >= self._first + usual:  # it has been filled once
            self._depth = min(self._depth + 1, DEEPEST * usual)

    def close(self, *, at_exit: bool = False) -> None:
        """Ends threads, and deletes keys when all ranks have closed. A plan in the making gets a
        second, then its process is ended. `at_exit` nobody needs an error any more."""
        self._at_exit = self._at_exit or at_exit
        if threading.current_thread() in self._threads:  # collected as garbage there
            threading.Thread(target=self.close, daemon=True).start()
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._end_planning()
        for thread in (self._selecting, self._delivering):
            thread.join(JOIN_SECONDS)
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("a thread of the loader is stuck in the dataset or the mask function")
            return
        self._store.hurry()
        self._exchange.close()
        self._store.close()

    def _end_planning(self) -> None:
        end = monotonic() + END_SECONDS
        for process, thread in self._planning.items():
            thread.join(max(0.0, end - monotonic()))
            if thread.is_alive():
                process.interrupt()
                thread.join(JOIN_SECONDS)
                process.close()

    def _guard(self, loop: Callable[[], None], name: str) -> None:
        """Whatever stops a thread reaches the training loop, behind the batches before it."""
        try:
            loop()
        except Closed:
            return
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            elif isinstance(error, PeerError):  # this rank's own failure, as the others see it
                error = self._failure
            self._tell_failure(error)
            queue = self._ready if name == "dyncp-deliver" else self._selected
            with self._changed:
                queue.append(error)
                self._changed.notify_all()

    def _tell_failure(self, error: BaseException) -> None:
        try:
            self._exchange.tell_failure(error)
        except Exception as second:  # the store is what failed
            logger.debug("telling other ranks: %s", second)

    # The selecting thread

    def _select(self) -> None:
        try:
            number = self._select_batches()
        finally:  # also an error comes after the batches before it
            self._wait_until(lambda: not self._unpublished)
        self._exchange.finish(number)
        with self._changed:
            self._selected.append(StopIteration())
            self._changed.notify_all()

    def _select_batches(self) -> int:
        """To the end of the epoch; returns how many batches there are."""
        background, number = self._background, self._first
        while True:
            self._wait_until(partial(self._may_select, number))
            step = next(self._steps, None)
            if step is None:
                return number
            batches = [
                BatchData(selection, background.source, background.masking, background.config)
                for selection in step.selections
            ]
            with self._changed:
                self._selected.append((step, batches))
                self._changed.notify_all()
            for batch in batches:
                self._select_batch(batch)
            number = step.selections[-1].number + 1

    def _may_select(self, first: int) -> bool:
        """Whether the step that begins with batch `first` is within the look-ahead."""
        return first < self._asked + self._depth

    def _select_batch(self, batch: BatchData) -> None:
        if self._closing:
            raise Closed
        background, selection = self._background, batch.selection
        background.planning.check_tokens(selection.num_tokens, selection.number)
        if not background.ranks.plans(selection.number):
            return
        batch.batch()
        with self._changed:
            self._unplanned.append(batch)
            self._unpublished += 1
            self._changed.notify_all()

    # The planning threads

    def _plan(self, process: PlanProcess) -> None:
        """The first one starts its process before there is a batch; the others help with batches
        that take long."""
        first = process is self._background.processes[0]
        if first:
            process.start()
        least = 0 if first else HELPED_TOKENS
        while True:
            batch = self._next_unplanned(least)
            try:
                self._plan_batch(process, batch)
            finally:
                with self._changed:
                    self._unpublished -= 1
                    self._changed.notify_all()

    def _next_unplanned(self, least: int) -> BatchData:
        """Waits for a batch of at least so many tokens."""
        queue = self._unplanned
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (queue and queue[0].selection.num_tokens >= least)
            )
            if self._closing:
                raise Closed
            return queue.popleft()

    def _plan_batch(self, process: PlanProcess, batch: BatchData) -> None:
        background, selection = self._background, batch.selection
        before = process.restarts
        try:
            reply = background.planning.plan(process, batch.batch())
        except PlanFailed as failure:
            self._exchange.decide_static(selection, str(failure))
        else:
            samples = list(batch.marks().values())
            self._exchange.publish(selection, reply, samples)
        finally:
            background.metrics.count_restarts(process.restarts - before)

    # The delivering thread

    def _deliver(self) -> None:
        while True:
            self._wait_until(lambda: bool(self._selected))
            item = self._selected.popleft()
            if isinstance(item, StopIteration):
                self._exchange.wait_for_all_ends()
            if isinstance(item, BaseException):
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                return
            self._deliver_step(*item)

    def _deliver_step(self, step: SelectedStep, batches: list[BatchData]) -> None:
        prepared = []
        for batch in batches:
            item = self._preparing.prepare(step.number, batch)
            self._exchange.add_targets(step, item.targets)
            prepared.append(item)
        counted = self._exchange.total_targets(step)
        items = counted if step.known_items is None else step.known_items
        finished = [self._finish(item, items) for item in prepared]
        with self._changed:
            self._ready.extend(finished)
            self._changed.notify_all()

    def _finish(self, item: Prepared, items: int) -> Prepared:
        data = item.data | {"num_items_in_batch": divisor(items)}
        return replace(item, data=data, end=replace(item.end, items=items))

    # Between the threads

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or condition())
            if self._closing:
                raise Closed

    def _stalled(self) -> float:
        """For how many seconds training has been waiting."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else perf_counter() - asked_at

"""Reader: reads samples by index, here or in worker processes that read ahead.

Workers only call `dataset[index]`. Their random generators (Python's, numpy's and torch's) are
seeded for every sample by the loader's seed, the epoch and the index, so that what a dataset draws
depends neither on the workers nor on the rank that reads.
"""

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import numpy as np
import torch

from dyncp.dataloader.errors import SampleError
from dyncp.dataloader.generators import Drawing, seed_of

AHEAD = 4  # samples per worker that are asked for before they are needed
ALIVE_SECONDS = 1.0  # between two looks of a worker at its parent
END_SECONDS = 5.0  # that workers get to finish what they are reading

Key = tuple[int, int]  # epoch, index
Read = Callable[[], Any]


class Reader:
    """Without workers samples are read when they are asked for."""

    def __init__(self, dataset: Any, workers: int, seed: int) -> None:
        self._dataset, self._workers, self._seed = dataset, workers, seed
        self._pool: ProcessPoolExecutor | None = None
        self._asked: dict[Key, Future[tuple[bool, bytes]]] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # datasets need not be safe in several threads

    def start(self) -> None:
        """Starts the workers, if there are to be any: in the thread that calls it, since threads
        of the loader do not outlive an iteration."""
        if not self._workers or self._pool is not None:
            return
        self._pool = ProcessPoolExecutor(
            self._workers,
            multiprocessing.get_context(),  # the start method of multiprocessing
            _begin,
            (self._dataset,),
        )
        self._pool.submit(os.getpid)  # starts them

    def in_order(
        self, order: Iterable[tuple[int, Any]], epoch: int
    ) -> Iterator[tuple[int, Any, Read]]:
        """Every index and what comes with it, with a function that gives the sample."""
        if self._pool is None:
            for index, state in order:
                yield int(index), state, partial(self.read_here, (epoch, int(index)))
            return
        asked: deque[tuple[int, Any, Future[tuple[bool, bytes]]]] = deque()
        try:
            for index, state in order:
                asked.append((int(index), state, self._ask((epoch, int(index)))))
                if len(asked) > AHEAD * self._workers:
                    first, its_state, future = asked.popleft()
                    yield first, its_state, partial(self._answer, first, future)
            while asked:
                first, its_state, future = asked.popleft()
                yield first, its_state, partial(self._answer, first, future)
        finally:
            for *_, future in asked:
                future.cancel()

    def ahead(self, keys: Iterable[Key]) -> None:
        """Samples that `read` will be asked for."""
        if self._pool is None:
            return
        with self._lock:
            for key in keys:
                if key not in self._asked:
                    self._asked[key] = self._ask(key)

    def read(self, key: Key) -> Any:
        if self._pool is None:
            return self.read_here(key)
        with self._lock:
            future = self._asked.pop(key, None)
        return self._answer(key[1], future or self._ask(key))

    def close(self) -> None:
        """Ends the workers; `start` starts others."""
        pool, self._pool = self._pool, None
        self._asked.clear()
        if pool is None:
            return
        # The pool's own thread waits for its workers; a second one that did would confuse both.
        workers = list((pool._processes or {}).values())
        thread: Any = pool._executor_manager_thread  # type: ignore[attr-defined,unused-ignore]
        pool.shutdown(wait=False, cancel_futures=True)
        if thread is None:
            return
        thread.join(END_SECONDS)
        if thread.is_alive():
            for worker in workers:
                worker.kill()
            thread.join()

    def read_here(self, key: Key) -> Any:
        """Without a worker."""
        epoch, index = key
        try:
            with self._reading, Drawing(self._seed, epoch, index):
                return self._dataset[index]
        except Exception as error:
            raise SampleError(index, "reading", error) from error

    def _ask(self, key: Key) -> Future[tuple[bool, bytes]]:
        pool = self._pool
        if pool is None:
            raise RuntimeError("the loader was closed while samples were read")
        try:
            return pool.submit(_read, self._seed, *key)
        except BrokenProcessPool as error:
            raise self._died(key[1]) from error

    def _answer(self, index: int, future: Future[tuple[bool, bytes]]) -> Any:
        try:
            found, answer = future.result()
        except BrokenProcessPool as error:
            raise self._died(index) from error
        result = pickle.loads(answer)
        if not found:
            raise SampleError(index, "reading", result) from result
        return result

    def _died(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"a reading worker (num_workers={self._workers}) ended when sample {index} was to be "
            "read; it may have run out of memory, or the dataset ended its process"
        )


# In the workers

_dataset: Any = None


def _begin(dataset: Any) -> None:
    global _dataset  # noqa: PLW0603 (a process has one)
    _dataset = dataset
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    """A parent that was killed cannot end its workers."""
    while os.getppid() == parent:
        time.sleep(ALIVE_SECONDS)
    os._exit(1)


def _read(loader_seed: int, epoch: int, index: int) -> tuple[bool, bytes]:
    """Whether there is a sample, and it or the error, pickled: tensors by value, not by files that
    both processes would have to keep open."""
    seed = seed_of(loader_seed, epoch, index)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        with Drawing(loader_seed, epoch, index):  # as without workers
            return True, pickle.dumps(_dataset[index], protocol=5)
    except Exception as error:
        return False, _pickled(error)


def _pickled(error: Exception) -> bytes:
    """The error itself where it survives pickling, else one with its text."""
    try:
        answer = pickle.dumps(error)
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return answer

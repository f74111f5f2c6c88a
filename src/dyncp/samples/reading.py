"""Reads samples by index, in this process or in workers that read ahead.

Datasets, samplers and mask functions run in background threads, which share torch's global
generator with the training loop: the numbers that either draws would depend on the timing of the
other. So they run in a `SeededRandom` context, which is local to its thread. There, torch's random
functions use a generator that is seeded by the loader's seed, the epoch and the sample's index. All
ranks draw the same numbers for a sample, whichever other samples they read. Workers also seed the
generators of Python and numpy for every sample."""

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from dyncp.planner.process import exit_with_parent
from dyncp.samples.fields import SampleError

AHEAD = 4  # samples per worker that are requested before they are needed
RANDOM_FUNCTIONS = (
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm",
)  # fmt: skip
RANDOM_METHODS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
    "multinomial", "normal_", "random_", "uniform_",
)  # fmt: skip
RANDOM = {getattr(torch.Tensor, name) for name in RANDOM_METHODS} | {
    getattr(torch, name)
    for name in RANDOM_FUNCTIONS
    if not name.endswith("_like") or "generator" in getattr(torch.ops.aten, name).overloads()
}
SampleKey = tuple[int, int]  # epoch, index
Answer = Future[tuple[bool, bytes]]
WORKER_END = 5.0  # seconds for workers to finish the samples that they are reading


class SeededRandom(TorchFunctionMode):
    """In this context, torch draws from a generator of its own, seeded by `what`."""

    def __init__(self, *what: object) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(_seed_of(*what))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM and kwargs.get("generator") is None and _on_cpu(args, kwargs):
            kwargs = kwargs | {"generator": self._generator}
        return func(*args, **kwargs)


def _seed_of(*what: object) -> int:
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    return all(torch.device(d).type == "cpu" for d in [*devices, kwargs.get("device") or "cpu"])


class Reader:
    """Reads `dataset[index]`, in worker processes if there are any."""

    def __init__(self, dataset: Any, workers: int, seed: int) -> None:
        self._dataset, self._workers, self._seed = dataset, workers, seed
        self._pool: ProcessPoolExecutor | None = None
        self._requested: dict[SampleKey, Answer] = {}
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # datasets need not be thread-safe

    def start(self) -> None:
        """Starts the workers, if there are any, and forgets requests of an earlier iteration.
        Called by the training thread, not by the loader's own threads, which end with an iteration.
        """
        self._requested.clear()
        if not self._workers or self._pool is not None:
            return
        self._pool = ProcessPoolExecutor(
            self._workers,
            multiprocessing.get_context(),  # the start method of multiprocessing
            _begin,
            (self._dataset,),
        )
        self._pool.submit(os.getpid)  # the first call starts the workers

    def in_order(self, order: Iterable[tuple[int, Any]], epoch: int) -> Iterator[tuple[int, Any]]:
        """Yields the (index, state) pairs, after requesting the next few samples from workers."""
        announced: deque[tuple[int, Any]] = deque()
        for item in order:
            announced.append(item)
            self.ahead([(epoch, int(item[0]))])
            if len(announced) > AHEAD * self._workers:
                yield announced.popleft()
        yield from announced

    def ahead(self, keys: Iterable[SampleKey]) -> None:
        """Requests samples from the workers that `read` will be called for."""
        pool = self._pool
        if pool is None:
            return
        with self._lock:
            for key in keys:
                if key not in self._requested:
                    with self._naming_death(key[1]):
                        self._requested[key] = pool.submit(_read, self._seed, *key)

    def read(self, key: SampleKey) -> Any:
        if self._pool is None:
            return self.read_here(key)
        self.ahead([key])
        with self._lock:
            future = self._requested.pop(key, None)
        if future is None:
            raise RuntimeError("the loader was closed while samples were being read")
        with self._naming_death(key[1]):
            found, answer = future.result()
        result = pickle.loads(answer)
        if not found:
            raise SampleError(key[1], "reading", result) from result
        return result

    def read_here(self, key: SampleKey) -> Any:
        """Reads a sample in this thread."""
        epoch, index = key
        try:
            with self._reading, SeededRandom(self._seed, epoch, index):
                return self._dataset[index]
        except Exception as error:
            raise SampleError(index, "reading", error) from error

    def close(self) -> None:
        """Ends the workers; `start` may start new ones."""
        pool, self._pool = self._pool, None
        self._requested.clear()
        if pool is None:
            return
        # Only the pool's own thread may wait for its workers, so this waits for that thread.
        workers = list((pool._processes or {}).values())
        thread: Any = pool._executor_manager_thread  # type: ignore[attr-defined,unused-ignore]
        pool.shutdown(wait=False, cancel_futures=True)
        if thread is None:
            return
        thread.join(WORKER_END)
        if thread.is_alive():
            for worker in workers:
                worker.kill()
            thread.join()

    @contextmanager
    def _naming_death(self, index: int) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"a reading worker (num_workers={self._workers}) died before it could read sample "
                f"{index}; it may have run out of memory, or the dataset ended its process"
            ) from error


# In the workers

_dataset: Any = None  # set once per worker, so that it is not pickled with every request


def _begin(dataset: Any) -> None:
    global _dataset  # noqa: PLW0603
    _dataset = dataset
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process
    torch.set_num_threads(1)
    exit_with_parent()


def _read(loader_seed: int, epoch: int, index: int) -> tuple[bool, bytes]:
    """Whether the sample could be read, and the pickled sample or error. Plain pickle sends tensors
    by value, not as shared files that both processes would have to keep open."""
    seed = _seed_of(loader_seed, epoch, index)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        with SeededRandom(loader_seed, epoch, index):  # as without workers
            return True, pickle.dumps(_dataset[index], protocol=5)
    except Exception as error:
        return False, _pickled(error)


def _pickled(error: Exception) -> bytes:
    """The pickled error, or a RuntimeError with its text if the error cannot be unpickled."""
    try:
        answer = pickle.dumps(error)
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return answer

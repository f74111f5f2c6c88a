"""Reads samples by index, in this process or in workers that read ahead; removes padding and checks
the fields of samples.

Datasets, samplers and mask functions run in background threads, which share torch's global
generator with the training loop: the numbers that either draws would depend on the timing of the
other. So they run in a `SeededRandom` context, which is local to its thread. There, torch's random
functions use a generator that is seeded by the loader's seed, the epoch and the sample's index. All
ranks draw the same numbers for a sample, whichever other samples they read. Workers also seed the
generators of Python and numpy for every sample.

A sample is a dict with at least `input_ids`, a 1-D tensor, array or list of token ids. The option
`bad_samples` decides whether a faulty sample is an error or is dropped."""

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dyncp.dataloader import patience
from dyncp.dataloader.options import LoaderConfig
from dyncp.planner.process import exit_with_parent

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
NO_TARGET = -100
TOKEN_NAMES = ("input_ids", "labels", "position_ids")
REFUSED = ("padding_mask", "key_padding_mask")


class SampleError(RuntimeError):
    """The dataset or the mask function raised an error for a sample; `__cause__` is that error."""

    def __init__(self, index: int, doing: str, error: BaseException | str) -> None:
        raised = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        super().__init__(index, doing, raised)  # pickled without the cause
        self.index = index

    def __str__(self) -> str:
        index, doing, raised = self.args
        return f"{doing} of sample {index} raised {raised}"


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
        thread.join(patience.WORKER_END)
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


class EmptySample(ValueError):  # noqa: N818 (a kind of sample, which may be dropped)
    """A sample has no tokens."""


def read_sample(
    read: Callable[[], Any], index: int, config: LoaderConfig
) -> tuple[int, Any | Exception]:
    """The number of tokens and the sample without its padding; or 0 and the reason, if the sample
    is dropped."""
    try:
        sample = without_padding(read(), index, config.token_fields)
        length = len(input_ids_of(sample, index))
        if config.bad_samples == "drop":
            _check_fields(sample, index, config.token_fields)
    except EmptySample as error:
        if config.bad_samples != "error":
            return 0, error
        raise
    except (SampleError, ValueError) as error:
        if config.bad_samples == "drop":
            return 0, error
        raise
    return length, sample


def skip_reason(dropped: Exception | None) -> str:
    """Why a sample is dropped, given the error of `read_sample`; None: `lengths=` says 0 tokens."""
    return "empty" if dropped is None or isinstance(dropped, EmptySample) else "bad"


def _check_fields(sample: Mapping[str, Any], index: int, token_fields: Mapping[str, int]) -> None:
    """Raises ValueError for fields that are only used when local data is made, which would be too
    late to drop the sample."""
    ids = input_ids_of(sample, index)
    labels_of(sample, ids, index)
    for name, dim in token_fields.items():
        token_field(sample, name, len(ids), dim, index)


# Fields


def input_ids_of(sample: Any, index: int) -> Tensor:
    """The sample's token ids as int64[tokens]; `index` is used in errors."""
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        given = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise ValueError(f"sample {index} is {given}; expected a dict with at least 'input_ids'")
    ids = _tensor(sample["input_ids"], "input_ids", index)
    if ids.ndim != 1 or not len(ids):
        raise (EmptySample if ids.shape == (0,) else ValueError)(
            f"input_ids of sample {index} has shape {tuple(ids.shape)}; expected [tokens], "
            "at least one token"
        )
    return _integers(ids, "input_ids", index)


def labels_of(sample: Mapping[str, Any], ids: Tensor, index: int) -> Tensor:
    """The sample's own labels, or its token ids if it has none."""
    if "labels" not in sample:
        return ids
    return _integers(token_field(sample, "labels", len(ids), 0, index), "labels", index)


def token_field(sample: Mapping[str, Any], name: str, length: int, dim: int, index: int) -> Tensor:
    """A field with one entry per token along `dim`."""
    if name not in sample:
        raise ValueError(f"sample {index} has no field {name!r}, which token_fields declares")
    value = _tensor(sample[name], name, index)
    if not -value.ndim <= dim < value.ndim or value.shape[dim] != length:
        raise ValueError(
            f"field {name!r} of sample {index} has shape {tuple(value.shape)}; expected "
            f"{length} tokens along dimension {dim}"
        )
    return value


def sample_bytes(sample: Any, index: int, token_fields: Mapping[str, int]) -> bytes:
    """All bytes that the loader uses of a sample: ids, labels, positions and token fields."""
    parts = [input_ids_of(sample, index).numpy().tobytes()]
    for name in dict.fromkeys([*TOKEN_NAMES[1:], *token_fields]):
        if name in sample:
            value = _tensor(sample[name], name, index).detach().cpu().contiguous()
            parts.append(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            parts.append(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def cut_sample(
    sample: Mapping[str, Any], start: int, length: int, index: int, token_fields: Mapping[str, int]
) -> dict[str, Any]:
    """The sample with all per-token fields cut to the `length` tokens from `start` on."""
    cut = dict(sample)
    names = (*TOKEN_NAMES, "attention_mask")
    for name, dim in (dict.fromkeys(names, 0) | dict(token_fields)).items():
        if sample.get(name) is not None:
            value = _tensor(sample[name], name, index)
            first = min(start, value.shape[dim])
            cut[name] = value.narrow(dim, first, min(length, value.shape[dim] - first))
    return cut


def _tensor(value: Any, name: str, index: int) -> Tensor:
    try:
        return torch.as_tensor(value)
    except Exception as error:
        raise ValueError(
            f"{name} of sample {index} is {type(value).__name__}, which cannot be converted to a "
            f"tensor: {error}; expected numbers"
        ) from error


def _integers(value: Tensor, name: str, index: int) -> Tensor:
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise ValueError(f"{name} of sample {index} is {value.dtype}; expected integers")
    return value.long()


# Padding


def without_padding(sample: Any, index: int, token_fields: Mapping[str, int]) -> Any:
    """The sample without the tokens at both ends where `attention_mask` is 0. A field that is
    listed in `token_fields` is treated as data, whatever its name."""
    if not isinstance(sample, Mapping):
        return sample  # `input_ids_of` raises for it
    refused = [name for name in REFUSED if name in sample and name not in token_fields]
    if refused:
        raise ValueError(
            f"sample {index} has a field {refused[0]!r}, which marks padding tokens; pass it as "
            "'attention_mask' (1: token, 0: padding), remove the padding, or declare the field in "
            "token_fields"
        )
    if sample.get("attention_mask") is None or "attention_mask" in token_fields:
        return sample
    if torch.as_tensor(sample.get("input_ids", 0)).ndim != 1:
        return sample
    first, last = _unpadded_range(sample, index)
    if (first, last) == (0, len(sample["input_ids"])):
        return sample
    return cut_sample(sample, first, last - first, index, token_fields)


def _unpadded_range(sample: Mapping[str, Any], index: int) -> tuple[int, int]:
    """The first token that is not padding, and the end of the last one."""
    mask = torch.as_tensor(sample["attention_mask"])
    if mask.shape != (len(sample["input_ids"]),) or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"attention_mask of sample {index} has shape {tuple(mask.shape)}; expected a 1 (token) "
            f"or 0 (padding) for each of its {len(sample['input_ids'])} tokens; the mask function "
            "says what tokens attend to"
        )
    kept = mask.nonzero().flatten().tolist()
    if not kept:
        return 0, 0
    first, end = kept[0], kept[-1] + 1
    holes = (mask[first:end] == 0).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask of sample {index} is 0 at token {first + int(holes[0])}, between "
            "tokens that are not padding; remove these tokens, or exclude them in the mask function"
        )
    return first, end

"""Gathers samples of different lengths into batches by a token budget."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dyncp.dataloader.samples import input_ids_of

IndexedSample = tuple[int, Any]


def iterate_samples(
    dataset: Any, *, shuffle: bool, seed: int, epoch: int
) -> Iterator[IndexedSample]:
    """Samples with their indices: in a permutation of (seed, epoch), or as they come."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        if shuffle:
            raise ValueError("shuffle=True needs a dataset with __len__ and __getitem__")
        yield from enumerate(dataset)
        return
    order = np.arange(len(dataset))
    if shuffle:
        order = np.random.default_rng((seed, epoch)).permutation(len(dataset))
    for index in order.tolist():
        yield index, dataset[index]


def gather_batches(
    samples: Iterable[IndexedSample], tokens_per_batch: int
) -> Iterator[list[IndexedSample]]:
    """Consecutive samples of at most `tokens_per_batch` tokens together."""
    batch: list[IndexedSample] = []
    used = 0
    for index, sample in samples:
        length = len(input_ids_of(sample, index))
        if length > tokens_per_batch:
            raise ValueError(
                f"sample {index} has {length} tokens, more than tokens_per_batch="
                f"{tokens_per_batch}; raise the budget or shorten the sample"
            )
        if used + length > tokens_per_batch:
            yield batch
            batch, used = [], 0
        batch.append((index, sample))
        used += length
    if batch:
        yield batch

"""What Trainer's `predict` returns: results per token, of whole samples in the dataset's order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.executor import Step

PADDING = -100  # as Trainer pads samples of different lengths


class Predictions:
    """Collects results of a dataset. `reduce(logits, labels)` makes what is collected of the
    logits, for instance their argmax; whole logits take `tokens × vocabulary` numbers."""

    def __init__(self, reduce: Callable[[Tensor, Tensor | None], Any] | None) -> None:
        self._reduce = reduce
        self._found: list[tuple[int, np.ndarray, np.ndarray]] = []  # by sample: results and labels

    def add(self, step: Step, logits: Tensor, labels: Tensor, sample_ids: Tensor) -> None:
        """Results of a batch, `[1, rows, ...]`. All ranks call it together."""
        results = logits if self._reduce is None else self._reduce(logits, labels)
        if not isinstance(results, Tensor) or results.shape[:2] != labels.shape:
            raise ValueError(
                "preprocess_logits_for_metrics must return a tensor [1, rows, ...], with a result "
                "for each row of the logits: a rank has parts of several samples"
            )
        own = [step.gather(of_rows[0].detach()) for of_rows in (sample_ids, results, labels)]
        if not step.plan.filler:
            for ids, of_sample, wanted in zip(*own, strict=True):
                self._found.append((int(ids[0]), _array(of_sample), _array(wanted)))

    def arrays(self, group: Any) -> tuple[np.ndarray, np.ndarray]:
        """Results and labels `[samples, longest, ...]` of all replicas, padded with -100."""
        found = self._found
        if getattr(group, "ndim", 1) > 1:
            of_ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, (group.get_local_rank("cp"), found))
            found = [one for rank, own in of_ranks if rank == 0 for one in own]
        found = sorted(found, key=lambda one: one[0])
        return _padded([one[1] for one in found]), _padded([one[2] for one in found])


def _array(values: Tensor) -> np.ndarray:
    values = values.float() if values.dtype == torch.bfloat16 else values
    return values.cpu().numpy()


def _padded(samples: list[np.ndarray]) -> np.ndarray:
    if not samples:
        return np.zeros((0, 0))
    longest = max(len(sample) for sample in samples)
    shape = (len(samples), longest, *samples[0].shape[1:])
    padded = np.full(shape, PADDING, samples[0].dtype)
    for row, sample in zip(padded, samples, strict=True):
        row[: len(sample)] = sample
    return padded

"""What a rank gets besides its tokens: ids of samples, fields of whole samples, a user's own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dyncp.arrays import starts_of
from dyncp.dataloader.batch_data import BatchData
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.local_tokens import batch_rows, local_sequences
from dyncp.plan import Plan, RankPlan

NO_SAMPLE = -1


def add_sample_data(
    data: dict[str, Any], batch: BatchData, plan: RankPlan | Plan, config: LoaderConfig
) -> dict[str, Any]:
    """The local data with what the config asks for. Samples are those that this rank has tokens of,
    in the batch's order; a filler has none."""
    if not (config.sample_ids or config.sample_fields or config.collate):
        return data
    rows, lengths = batch_rows(plan), (plan.parts[0] if isinstance(plan, Plan) else plan).lengths
    entries, filler = batch.selection.entries, batch.selection.filler
    if config.sample_ids:
        indices = np.array([entry.index for entry in entries], np.int64)
        sequence = np.searchsorted(starts_of(lengths), rows.clip(0), side="right") - 1
        ids = np.where((rows < 0) | filler, NO_SAMPLE, indices[sequence.clip(0, len(indices) - 1)])
        data["sample_ids"] = torch.from_numpy(ids)[None]
    numbers = [] if filler else local_sequences(plan)
    samples = [batch.sample(number) for number in numbers]
    for name in config.sample_fields:
        data[name] = [
            _field(sample, name, entries[number].index)
            for number, sample in zip(numbers, samples, strict=True)
        ]
    return _collated(data, samples, config) if config.collate else data


def _field(sample: Mapping[str, Any], name: str, index: int) -> Any:
    if name not in sample:
        raise ValueError(f"sample {index} has no field {name!r}, which sample_fields declares")
    return sample[name]


def _collated(data: dict[str, Any], samples: list[Any], config: LoaderConfig) -> dict[str, Any]:
    assert config.collate is not None
    try:
        found = config.collate(dict(data), samples)
    except Exception as error:
        raise RuntimeError(f"collate raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"collate gave {type(found).__name__}; expected the local data, with further fields"
        )
    return dict(found)

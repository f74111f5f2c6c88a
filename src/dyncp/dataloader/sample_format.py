"""What a sample is: a dict with at least `input_ids`, a 1-D tensor, array or list of token ids.

`read_sample` reads one, removes its padding and checks it; `bad_samples` and `empty_samples` say
whether a faulty one is an error or dropped.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dyncp.dataloader.options import LoaderConfig
from dyncp.dataloader.reading import SampleError

NO_TARGET = -100
TOKEN_NAMES = ("input_ids", "labels", "position_ids")
REFUSED = ("padding_mask", "key_padding_mask")


class EmptySample(ValueError):  # noqa: N818 (a kind of sample, which may be dropped)
    """A sample has no tokens."""


def read_sample(
    read: Callable[[], Any], index: int, config: LoaderConfig
) -> tuple[int, Any | Exception]:
    """Number of tokens and the sample without its padding; 0 and the reason for a sample that is
    dropped."""
    try:
        sample = without_padding(read(), index, config.token_fields)
        length = len(input_ids_of(sample, index))
        if config.bad_samples == "drop":
            _check_fields(sample, index, config.token_fields)
    except EmptySample as error:
        if config.empty_samples == "drop":
            return 0, error
        raise
    except (SampleError, ValueError) as error:
        if config.bad_samples == "drop":
            return 0, error
        raise
    return length, sample


def skip_reason(dropped: Exception | None) -> str:
    """The kind of a sample that `read_sample` dropped; None: its given length is 0."""
    return "empty" if dropped is None or isinstance(dropped, EmptySample) else "bad"


def _check_fields(sample: Mapping[str, Any], index: int, token_fields: Mapping[str, int]) -> None:
    """Finds early what would else be found when tokens are dealt to ranks, too late to drop it."""
    ids = input_ids_of(sample, index)
    labels_of(sample, ids, index)
    for name, dim in token_fields.items():
        token_field(sample, name, len(ids), dim, index)


# Fields


def input_ids_of(sample: Any, index: int) -> Tensor:
    """The sample's token ids, int64[tokens]; `index` names the sample in errors."""
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
    """The sample's own labels, or its token ids."""
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
    """Everything that is read from a sample: ids, labels, positions and token fields."""
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
    """`length` tokens of the sample from `start` on, in all fields with one entry per token."""
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
    """The sample without the tokens at both ends that `attention_mask` marks 0. Fields in
    `token_fields` are the user's own, whatever their name."""
    if not isinstance(sample, Mapping):
        return sample  # refused when its tokens are read
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
    """First token that is not padding, and the end of the last."""
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
    if len(kept) != kept[-1] + 1 - kept[0]:
        hole = next(a + 1 for a, b in pairwise(kept) if b != a + 1)
        raise ValueError(
            f"attention_mask of sample {index} is 0 at token {hole}, between tokens that are not "
            "padding; remove these tokens, or let the mask function say what tokens attend to"
        )
    return kept[0], kept[-1] + 1

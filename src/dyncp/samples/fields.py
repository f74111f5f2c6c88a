"""What a sample contains: a dict with at least `input_ids`, a 1-D tensor, array or list of tokens.
Removes padding, checks the fields and cuts them. The option `bad_samples` decides whether a faulty
sample is an error or is dropped."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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


class EmptySample(ValueError):  # noqa: N818 (a kind of sample, which may be dropped)
    """A sample has no tokens."""


def read_sample(
    read: Callable[[], Any],
    index: int,
    bad_samples: str,
    token_fields: Mapping[str, int],
    checks: Any,
) -> tuple[int, Any | Exception]:
    """The number of tokens and the sample without its padding; or 0 and the reason, if the sample
    is dropped. `checks` are the loader's SampleChecks."""
    try:
        sample = without_padding(read(), index, token_fields)
        input_ids_of(sample, index)
        length = checks.check(sample, index, token_fields)
        if bad_samples == "drop":
            _check_fields(sample, index, token_fields)
    except EmptySample as error:
        if bad_samples != "error":
            return 0, error
        raise
    except (SampleError, ValueError) as error:
        if bad_samples == "drop":
            return 0, error
        raise
    checks.compare_labels(sample, index)
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


def digest_of(what: object, size: int = 8) -> str:
    """Hexadecimal digest of bytes, or of an object's repr."""
    data = what if isinstance(what, bytes) else repr(what).encode()
    return hashlib.blake2b(data, digest_size=size).hexdigest()

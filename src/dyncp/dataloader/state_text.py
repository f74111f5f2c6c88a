"""Values of any dataset's state as text, so that a loader's state always has the same keys.

torch.distributed.checkpoint loads into the keys of a state that is there already, and a loader that
has not begun has no dataset state. JSON keeps numbers, texts, lists and dicts with text keys; what
it would change is written as {"!": kind, "value": ...}. Nothing is pickled.
"""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

TAG = "!"
DEEPEST = 100


def to_text(value: Any) -> str:
    """JSON; raises ValueError for a value that cannot be written."""
    return json.dumps(_plain(value, "the state"))


def from_text(text: str) -> Any:
    try:
        return _restore(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a text in the loader state cannot be read: {error}") from error


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested more than {DEEPEST} levels deep")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict) and TAG not in value and all(type(k) is str for k in value):
        return {k: _plain(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    kind, inner = _opened(value, where)
    return {TAG: kind, "value": _plain(inner, where, depth + 1)}


def _opened(value: Any, where: str) -> tuple[str, Any]:
    """The kind of a value that JSON does not have, and what it is made of."""
    match value:
        case dict():
            return "dict", [list(pair) for pair in value.items()]
        case tuple():
            return "tuple", list(value)
        case bytes() | bytearray():
            return "bytes", base64.b64encode(value).decode()
        case np.ndarray() if value.dtype.kind in "biuf":
            return "array", [value.dtype.str, list(value.shape), value.tobytes()]
        case torch.Tensor() if value.dtype != torch.bfloat16:
            return "tensor", value.detach().cpu().numpy()
    raise ValueError(
        f"the dataset's state cannot be saved: {where} is {type(value).__name__}; allowed are "
        "numbers, texts, bytes, lists, tuples, dicts, arrays and tensors"
    )


def _restore(value: Any) -> Any:
    if isinstance(value, list):
        return [_restore(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _restore(entry) for key, entry in value.items()}
    return CLOSED[value[TAG]](_restore(value["value"]))


def _array(parts: list[Any]) -> Any:
    dtype, shape, data = parts
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()


CLOSED: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "array": _array,
    "tensor": torch.from_numpy,
}

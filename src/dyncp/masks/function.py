"""Mask functions, which return the mask of a length or a sample: `masks.causal` and others, several
masks by name, and masks from FlexAttention's functions `mask_mod(b, h, q, k)`."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.checks import check_memory, instance_of, whole_number
from dyncp.masks.mask import Mask, normal_mask, positions_and_targets

Sample = Mapping[str, Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]
# Pairs evaluated at a time: an int64 tensor of all of them takes 32 MiB.
CHUNK_PAIRS = 1 << 22


class MaskFunction(ABC):
    """Returns the mask of a sequence. It can be called in several ways:

        masks.sliding_window(4096, window=512)   length and parameters: a Mask
        masks.sliding_window(sample)             sample with "input_ids": a Mask of the same length
        masks.sliding_window(window=512)         parameters only: a mask function with them bound
        masks.causal & masks.sliding_window      a mask function that combines two

    A parameter may be a function of the sample: `masks.prefix_lm(prefix=lambda sample:
    sample["question_length"])`. Mask functions can be pickled if their parameters can.
    """

    @overload
    def __call__(self, subject: int | Sample, /, **parameters: Any) -> Mask: ...

    @overload
    def __call__(self, subject: None = None, /, **parameters: Any) -> MaskFunction: ...

    def __call__(
        self, subject: int | Sample | None = None, /, **parameters: Any
    ) -> Mask | MaskFunction:
        function = self.with_parameters(parameters) if parameters else self
        if subject is None:
            return function
        sample, length = subject if isinstance(subject, Mapping) else None, sequence_length(subject)
        check_mask_memory(function, length)
        return function.build(length, sample)

    @abstractmethod
    def build(self, length: int, sample: Sample | None) -> Mask:
        """The mask of a sequence of `length` tokens; `sample` is None if only a length is known."""

    def with_parameters(self, parameters: Mapping[str, Any]) -> MaskFunction:
        """A copy with these parameters bound."""
        raise ValueError(f"{self!r} takes no parameters, but {', '.join(parameters)} was given")

    def __and__(self, other: MaskFunction) -> MaskFunction:
        if not isinstance(other, MaskFunction):
            return NotImplemented
        return DerivedMask(operator.and_, (self, other), f"({self!r} & {other!r})")

    def __or__(self, other: MaskFunction) -> MaskFunction:
        if not isinstance(other, MaskFunction):
            return NotImplemented
        return DerivedMask(operator.or_, (self, other), f"({self!r} | {other!r})")


# Masks of this many tokens are checked for their memory first; their number of ranges is that of a
# mask of SMALL tokens. While a mask is made, there are about 3 copies of its ranges.
LARGE, SMALL = 2**24, 2**14
RANGE_BYTES, COPIES = 8, 3


def check_mask_memory(function: MaskFunction, length: int) -> None:
    """Raises MemoryError if masks of `length` tokens in all need more memory than is available."""
    if length < LARGE:
        return
    try:
        count = function.build(SMALL, None).ranges.shape[1]
    except Exception:  # it needs a sample, or this length
        count = 1
    check_memory(
        f"mask {function!r} of {length:,} tokens",
        COPIES * RANGE_BYTES * count * length,
        "use shorter sequences",
    )


@dataclass(frozen=True, eq=False, repr=False)
class DerivedMask(MaskFunction):
    """Applies `operation` to the masks of other mask functions; `text` is its repr."""

    operation: Callable[..., Mask]
    sources: tuple[MaskFunction, ...]
    text: str

    def build(self, length: int, sample: Sample | None) -> Mask:
        return self.operation(*(source.build(length, sample) for source in self.sources))

    def __repr__(self) -> str:
        return self.text


class ParametricMask(MaskFunction):
    """A mask function that calls `builder(length, **parameters)`. `defaults` holds the default of
    every parameter, and `parameters` the values bound so far."""

    def __init__(self, builder: Callable[..., Mask], parameters: Sample | None = None) -> None:
        functools.update_wrapper(self, builder)
        self.builder, self.parameters = builder, dict(parameters or {})
        accepted = list(inspect.signature(builder).parameters.values())[1:]
        self.defaults = {parameter.name: parameter.default for parameter in accepted}

    def with_parameters(self, parameters: Mapping[str, Any]) -> ParametricMask:
        unknown = [name for name in parameters if name not in self.defaults]
        if unknown:
            allowed = ", ".join(self.defaults) or "none"
            raise ValueError(
                f"{self._name} has no parameter {', '.join(unknown)}; allowed: {allowed}"
            )
        return ParametricMask(self.builder, {**self.parameters, **parameters})

    def build(self, length: int, sample: Sample | None) -> Mask:
        values = {**self.defaults, **self.parameters}
        return self.builder(length, **{k: self._resolve(k, v, sample) for k, v in values.items()})

    def _resolve(self, parameter: str, value: Any, sample: Sample | None) -> Any:
        if value is inspect.Parameter.empty:
            raise ValueError(f"{self._name} needs {parameter}=")
        if not callable(value):
            return value
        if sample is None:
            raise ValueError(
                f"{self._name}: {parameter} comes from a sample ({_text(value)}), but only a "
                f"length was given; call it with a sample, or pass {parameter}="
            )
        return value(sample)

    @property
    def _name(self) -> str:
        package = "masks." if self.builder.__module__.startswith(f"{__package__}.") else ""
        return f"{package}{self.builder.__name__}"

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={_text(value)}" for name, value in self.parameters.items())
        return f"{self._name}({given})" if given else self._name

    def __reduce__(self) -> str | tuple[object, ...]:
        name = self.builder.__qualname__  # in its module, this name refers to the mask function
        if not self.parameters:
            return name
        plain = operator.attrgetter(name)(sys.modules[self.builder.__module__])
        return ParametricMask.with_parameters, (plain, self.parameters)


def mask_function(builder: Callable[..., Mask]) -> ParametricMask:
    """Decorator that turns a function `(length, **parameters) -> Mask` into a mask function.

    @mask_function
    def first_keys(length: int, keys: int = 4) -> Mask:
        return Mask(...)
    """
    return ParametricMask(builder)


@dataclass(frozen=True)
class SampleField:
    """A parameter value that is read from the sample: `SampleField("prefix_length")`."""

    key: str

    def __call__(self, sample: Sample) -> Any:
        if self.key not in sample:
            raise ValueError(f"sample has no {self.key!r}; it has: {', '.join(map(str, sample))}")
        return sample[self.key]

    def __repr__(self) -> str:
        return f"sample[{self.key!r}]"


def from_sample(key: str) -> Any:
    """`SampleField(key)`, typed as Any so that it can be the default of any parameter."""
    return SampleField(key)


def integer(mask: str, parameter: str, value: object, least: int, most: int = 2**63 - 1) -> int:
    """A mask's parameter as an int; ValueError unless it is one from `least` to `most`."""
    return whole_number(f"masks.{mask}: {parameter}", value, least, most)


def lengths_of(mask: str, parameter: str, value: object) -> Int64:
    """A mask's parameter as an array of lengths; ValueError if one is negative."""
    lengths = np.asarray(value)
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"masks.{mask}: {parameter} is {value!r}; it must be a list of integers")
    if lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        raise ValueError(
            f"masks.{mask}: {parameter}[{index}] is {lengths[index]}; lengths must be at least 0"
        )
    return lengths.astype(np.int64)


def sequence_length(subject: int | Sample) -> int:
    """The number of tokens of a sequence, given as a length or a sample."""
    if isinstance(subject, Mapping):
        ids = SampleField("input_ids")(subject)
        shape = getattr(ids, "shape", None)
        if shape is not None and len(shape) != 1:
            raise ValueError(
                f"input_ids have shape {tuple(shape)}; they must have one axis, the tokens"
            )
        return whole_number("the number of input_ids", len(ids), 1)
    if isinstance(subject, bool) or not hasattr(subject, "__index__"):
        raise ValueError(
            f"a mask function was called with {type(subject).__name__}; give it a length (int) or "
            'a sample (a mapping with "input_ids")'
        )
    return whole_number("the length of a sequence", subject, 1)


def _text(value: object) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return repr(value)


AnyMaskFunction = Callable[[Any], Mask]


@dataclass(frozen=True, repr=False)
class NamedMasks:
    """A function of a sample or a length that returns a dict of masks by name."""

    functions: dict[str, AnyMaskFunction]

    def __call__(self, subject: int | Sample) -> dict[str, Mask]:
        result = {name: function(subject) for name, function in self.functions.items()}
        lengths = {name: mask.length for name, mask in result.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"masks of one sample have different lengths: {lengths}")
        positions_and_targets(result.values())
        return result

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={function!r}" for name, function in self.functions.items())
        return f"masks.named({given})"


def named(**functions: AnyMaskFunction) -> NamedMasks:
    """One mask per name: `named(default=masks.causal, local=masks.sliding_window(window=1024))`.

    Layers select their mask by name; a layer that names none uses "default". Positions and targets
    belong to the sample, so all masks that set them must agree.
    """
    if not functions:
        raise ValueError("masks.named needs at least one mask, such as default=masks.causal")
    for name, function in functions.items():
        instance_of(f"masks.named: {name}", function, Callable, "a mask function")
    return NamedMasks(functions)


@overload
def from_mask_mod(mask_mod: MaskMod, length: int, *, name: str | None = None) -> Mask: ...


@overload
def from_mask_mod(
    mask_mod: MaskMod, length: None = None, *, name: str | None = None
) -> MaskFunction: ...


def from_mask_mod(
    mask_mod: MaskMod, length: int | None = None, *, name: str | None = None
) -> Mask | MaskFunction:
    """The mask of `mask_mod(b, h, q, k)`, or a mask function if no length is given.

    from_mask_mod(lambda b, h, q, k: q >= k, 4096) == masks.causal(4096)

    `mask_mod` gets index arrays q `[rows, 1]` and k `[1, length]` and returns a boolean for every
    pair. The arrays are CPU tensors if torch is already imported, and numpy arrays otherwise. b is
    0. Masks are the same for all heads, so any use of h raises a ValueError. All length² pairs are
    evaluated, a few million at a time; named masks are much faster to build.
    """
    function = MaskModFunction(mask_mod, name or str(getattr(mask_mod, "__name__", "mask_mod")))
    return function(length)


@dataclass(frozen=True, eq=False, repr=False)
class MaskModFunction(MaskFunction):
    """The mask function of a `mask_mod`."""

    mask_mod: MaskMod
    name: str

    def build(self, length: int, sample: Sample | None) -> Mask:
        del sample
        rows = max(1, CHUNK_PAIRS // length)
        changes = [
            _changes(first, _evaluate(self.mask_mod, first, min(first + rows, length), length))
            for first in range(0, length, rows)
        ]
        return normal_mask(_ranges_between(np.concatenate(changes, axis=1), length), name=self.name)

    def __repr__(self) -> str:
        return f"masks.from_mask_mod({self.name})"


def _changes(first: int, allowed: Bool) -> Int64:
    """The row and key of every change between allowed and not allowed, `[2, changes]`. The dense
    rows `allowed` begin at row `first`."""
    row, key = np.nonzero(np.diff(np.pad(allowed, ((0, 0), (1, 1))).view(np.int8), axis=1))
    return np.stack([row + first, key])


def _ranges_between(changes: Int64, length: int) -> Int32:
    """The normal ranges whose starts and ends are the given changes.

    . 1 1 . 1  ->  changes at 1 3 4 5  ->  [1, 3) [4, 5)
    """
    row, key = changes
    counts = np.bincount(row, minlength=length)
    ranges = np.full((length, max(1, int(counts.max()) // 2), 2), length, np.int32)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    ranges.reshape(length, -1)[row, column] = key
    return ranges


def _evaluate(mask_mod: MaskMod, first: int, last: int, length: int) -> Bool:
    """Dense rows [first, last) of the mask."""
    zero, queries, keys = np.array(0), np.arange(first, last)[:, None], np.arange(length)[None, :]
    torch = sys.modules.get("torch")
    if torch is None:
        result = mask_mod(zero, _AllHeads(), queries, keys)
    else:
        b, q, k = map(torch.from_numpy, (zero, queries, keys))
        result = mask_mod(b, _AllHeads(), q, k)
        result = result.cpu().numpy() if isinstance(result, torch.Tensor) else result
    found = np.asarray(result)
    if found.dtype != np.bool_:
        raise ValueError(
            f"mask_mod returned {found.dtype}; it must return a boolean for every pair"
        )
    try:
        return np.broadcast_to(found, (last - first, length))
    except ValueError:
        raise ValueError(
            f"mask_mod returned shape {found.shape} for q {queries.shape} and k {keys.shape}; it "
            f"must return shape {(last - first, length)}, or one that broadcasts to it"
        ) from None


def _refuse_heads(*_: object, **__: object) -> Any:
    raise ValueError(
        "this mask_mod uses its head index h; dyncp masks are the same for all heads, so only "
        "functions of q and k (and b, which is 0) can be turned into a mask"
    )


class _AllHeads:
    """Passed as the head index; raises ValueError on every use."""

    __slots__ = ()
    __torch_function__: Any = classmethod(_refuse_heads)

    def __getattr__(self, name: str) -> Any:
        return _refuse_heads(name)


_USES = (
    "eq ne lt le gt ge hash bool int float index len iter contains getitem call array "
    "array_ufunc array_function neg pos abs invert "
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift "
    "radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor rlshift rrshift"
)

for _use in _USES.split():
    setattr(_AllHeads, f"__{_use}__", _refuse_heads)

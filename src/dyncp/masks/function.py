"""`MaskFunction`: what `masks.causal` is. Takes a length or a sample and gives a mask."""

from __future__ import annotations

import functools
import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from dyncp.checks import MOST_TOKENS
from dyncp.masks.mask import Mask

Sample = Mapping[str, Any]


class MaskFunction(ABC):
    """Gives the mask of a sequence. All of these work:

        masks.sliding_window(4096, window=512)      a length, with parameters: a Mask
        masks.sliding_window(window=512)            parameters only: a mask function that has them
        masks.sliding_window(sample)                a sample with "input_ids": a Mask of its length
        masks.causal & masks.sliding_window         a mask function that combines two

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
        return function.build(sequence_length(subject), sample_of(subject))

    @abstractmethod
    def build(self, length: int, sample: Sample | None) -> Mask:
        """The mask of a sequence of `length` tokens, which comes from `sample` if there is one."""

    def with_parameters(self, parameters: Mapping[str, Any]) -> MaskFunction:
        """The same function with these parameters."""
        raise ValueError(f"{self!r} takes no parameters, but {', '.join(parameters)} was given")

    def __and__(self, other: MaskFunction) -> MaskFunction:
        return CombinedMask(self, "&", other) if isinstance(other, MaskFunction) else NotImplemented

    def __or__(self, other: MaskFunction) -> MaskFunction:
        return CombinedMask(self, "|", other) if isinstance(other, MaskFunction) else NotImplemented


@dataclass(frozen=True, eq=False, repr=False)
class CombinedMask(MaskFunction):
    """Two mask functions joined by `&` or `|`."""

    left: MaskFunction
    symbol: str
    right: MaskFunction

    def build(self, length: int, sample: Sample | None) -> Mask:
        left, right = self.left.build(length, sample), self.right.build(length, sample)
        return left & right if self.symbol == "&" else left | right

    def __repr__(self) -> str:
        return f"({self.left!r} {self.symbol} {self.right!r})"


class ParametricMask(MaskFunction):
    """A mask function made of a Python function `(length, **parameters) -> Mask`."""

    def __init__(self, builder: Callable[..., Mask]) -> None:
        functools.update_wrapper(self, builder)
        self.__name__ = builder.__name__
        self.builder = builder
        self.defaults = _defaults(builder)
        self.origin = self  # the function without parameters, found again by its name
        self.parameters: dict[str, Any] = {}

    def with_parameters(self, parameters: Mapping[str, Any]) -> ParametricMask:
        unknown = [name for name in parameters if name not in self.defaults]
        if unknown:
            allowed = ", ".join(self.defaults) or "none"
            raise ValueError(
                f"{self.origin!r} has no parameter {', '.join(unknown)}; allowed: {allowed}"
            )
        function = ParametricMask(self.builder)
        function.origin = self.origin
        function.parameters = {**self.parameters, **parameters}
        return function

    def build(self, length: int, sample: Sample | None) -> Mask:
        values = {**self.defaults, **self.parameters}
        return self.builder(length, **{k: self._resolve(k, v, sample) for k, v in values.items()})

    def _resolve(self, parameter: str, value: Any, sample: Sample | None) -> Any:
        if value is inspect.Parameter.empty:
            raise ValueError(f"{self.origin!r} needs {parameter}=")
        if not callable(value):
            return value
        if sample is None:
            raise ValueError(
                f"{self.origin!r}: {parameter} comes from a sample ({_text(value)}), but only a "
                f"length was given; call it with a sample, or give {parameter}="
            )
        return value(sample)

    def __repr__(self) -> str:
        builder = self.builder
        package = "masks." if builder.__module__.startswith(f"{__package__}.") else ""
        given = ", ".join(f"{name}={_text(value)}" for name, value in self.parameters.items())
        return f"{package}{builder.__name__}" + (f"({given})" if given else "")

    def __reduce__(self) -> str | tuple[object, ...]:
        if self.origin is self:
            return self.builder.__qualname__  # a global of its module, like a function
        return _with_parameters, (self.origin, self.parameters)


def mask_function(builder: Callable[..., Mask]) -> ParametricMask:
    """Decorator: makes a function `(length, **parameters) -> Mask` a mask function.

    @mask_function
    def first_keys(length: int, keys: int = 4) -> Mask:
        return Mask(...)
    """
    return ParametricMask(builder)


@dataclass(frozen=True)
class SampleField:
    """A parameter that is read from the sample: `SampleField("prefix_length")`."""

    key: str

    def __call__(self, sample: Sample) -> Any:
        if self.key not in sample:
            raise ValueError(f"sample has no {self.key!r}; it has: {', '.join(map(str, sample))}")
        return sample[self.key]

    def __repr__(self) -> str:
        return f"sample[{self.key!r}]"


def from_sample(key: str) -> Any:
    """`SampleField(key)`, typed so that it can be the default of any parameter."""
    return SampleField(key)


def sequence_length(subject: int | Sample) -> int:
    """Number of tokens of a length or a sample, from 1 to 2³¹ - 1."""
    length = _sample_length(subject) if isinstance(subject, Mapping) else _plain_length(subject)
    if length < 1:
        raise ValueError(f"a sequence of {length} tokens was given; allowed is at least 1")
    if length > MOST_TOKENS:
        raise ValueError(
            f"a sequence of {length} tokens was given; allowed are at most {MOST_TOKENS:,}"
        )
    return length


def sample_of(subject: int | Sample) -> Sample | None:
    """The sample itself; None for a length."""
    return subject if isinstance(subject, Mapping) else None


def _sample_length(sample: Sample) -> int:
    ids = SampleField("input_ids")(sample)
    shape = getattr(ids, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(f"input_ids have shape {tuple(shape)}; allowed is one axis, the tokens")
    return len(ids)


def _plain_length(length: object) -> int:
    try:
        if isinstance(length, bool):
            raise TypeError
        return operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            f"a mask function was called with {type(length).__name__}; allowed are a length (int) "
            'or a sample (mapping with "input_ids")'
        ) from None


@functools.cache
def _defaults(builder: Callable[..., Mask]) -> dict[str, Any]:
    """Every parameter's default; `inspect.Parameter.empty` where it has none."""
    parameters = list(inspect.signature(builder).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters[1:]}


def _text(value: object) -> str:
    if inspect.isfunction(value):
        return value.__name__
    return repr(value)


def _with_parameters(function: ParametricMask, parameters: Mapping[str, Any]) -> ParametricMask:
    return function.with_parameters(parameters)

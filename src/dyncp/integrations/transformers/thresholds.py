"""Numbers that a model's code may depend on only in long documents: those of its config, of its
modules and their classes, and the constants and global names in its source files.

The comparison of untested models lowers them, so that small documents exceed them.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from dyncp.integrations.transformers.layers import text_modules

LOWERED = 13  # what large numbers become: one document of the comparison is shorter
LARGEST = 1 << 24  # no length or position; such numbers stand for infinity


@dataclass
class Threshold:
    """One number, which may be in several places. Each change is a function that sets it, and the
    values to set: the usual and the lowered one."""

    name: str
    changes: list[tuple[Callable[[Any], None], Any, Any]] = field(default_factory=list)

    @contextmanager
    def lowered(self) -> Iterator[None]:
        try:
            for change, _, low in self.changes:
                change(low)
            yield
        finally:
            for change, usual, _ in self.changes:
                change(usual)


@contextmanager
def lowered(thresholds: Iterable[Threshold]) -> Iterator[None]:
    """Lowers several numbers at once."""
    with ExitStack() as stack:
        for threshold in thresholds:
            stack.enter_context(threshold.lowered())
        yield


def find_thresholds(model: Any, config: Any, longest: int) -> list[Threshold]:
    """All numbers that are at least `longest`."""
    found: dict[str, Threshold] = {}

    def add(label: str, change: Callable[[Any], None], usual: Any, low: Any) -> None:
        found.setdefault(label, Threshold(label)).changes.append((change, usual, low))

    for owner, name, value in _attributes(model, config):
        low = _lower(value, longest)
        if low is not value:
            is_class = isinstance(owner, type)
            change = partial(setattr if is_class else operator.setitem, owner, name)
            add(f"{name}={value}", change, value, low)
    for function in _functions(model):
        code = _lower(function.__code__, longest)
        if code is not function.__code__:
            where = f"the constants in {function.__qualname__}"
            add(where, partial(setattr, function, "__code__"), function.__code__, code)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            low = _lower(value, longest)
            if low is not value and f"{name}={value}" not in found:
                change = partial(operator.setitem, function.__globals__, name)
                add(f"{name}={value}", change, value, low)
    return list(found.values())


def _lower(value: Any, longest: int) -> Any:
    """The number lowered; also within tuples, lists and code. The same object if none is large."""
    if type(value) in (int, float):
        return type(value)(LOWERED) if longest <= value < LARGEST else value
    if type(value) in (tuple, list):
        lower = type(value)(_lower(x, longest) for x in value)
        changed = any(low is not x for low, x in zip(lower, value, strict=True))
        return lower if changed else value
    if isinstance(value, CodeType):
        constants = _lower(value.co_consts, longest)
        return value if constants is value.co_consts else value.replace(co_consts=constants)
    return value


def _attributes(model: Any, config: Any) -> Iterator[tuple[Any, str, Any]]:
    """Attributes and entries by name, and what has them: a dict, or a class."""
    from transformers import PreTrainedConfig

    modules = [module for _, module in text_modules(model) if not _is_of_torch(type(module))]
    waiting = [vars(owner) for owner in (config, model.config, *modules)]
    seen = set()
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for name, value in owner.items():
            if isinstance(value, PreTrainedConfig):
                waiting.append(vars(value))
            elif type(value) is dict and not str(name).startswith("_"):
                waiting.append(value)
            else:
                yield owner, name, value
    for owner in _classes(model):
        for name, value in vars(owner).items():
            if not name.startswith("__"):
                yield owner, name, value


def _classes(model: Any) -> list[type]:
    """The classes of the text decoder's modules, with their bases."""
    modules = [module for _, module in text_modules(model)]
    found = {base: None for module in modules for base in type(module).__mro__}
    return [x for x in found if x is not object and not _is_of_torch(x) and _is_of_models(x)]


def _functions(model: Any) -> list[FunctionType]:
    """The methods of these classes, and the functions of their source files that they name; without
    decorators."""
    found: dict[FunctionType, None] = {}
    waiting: list[Any] = [value for owner in _classes(model) for value in vars(owner).values()]
    while waiting:
        value = waiting.pop()
        value = getattr(value, "__func__", value)  # a static method's
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, FunctionType) and function not in found:
            found[function] = None
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            here = function.__module__
            waiting += [x for x in named if getattr(x, "__module__", None) == here]
    return list(found)


def _is_of_models(owner: type) -> bool:
    """Whether the class belongs to a model, not to what all models of Transformers share."""
    return owner.__module__.startswith("transformers.models.") or not owner.__module__.startswith(
        "transformers."
    )


def _is_of_torch(owner: type) -> bool:
    return owner.__module__.split(".")[0] == "torch"

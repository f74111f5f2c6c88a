"""How large tests are: small in `make test`, full in `make test-all` (`pytest --full`)."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SHARE = 7  # `make test` draws one in seven examples ...
LEAST = 10  # ... but at least these

_full: list[bool] = []  # not empty in a full run


def choose(is_full: bool) -> None:
    """Chooses the size of this run, before test modules are imported."""
    if is_full:
        _full.append(True)
    # A first example may compile, which takes seconds on a busy machine.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    settings.register_profile("dyncp", deadline=None, suppress_health_check=slow)
    settings.load_profile("dyncp")
    settings.register_profile("sized", draws(100))
    settings.load_profile("sized")


def pick(small: Any, full: Any) -> Any:
    """The size of this run."""
    return full if _full else small


def draws(number: int, **options: Any) -> settings:
    """Hypothesis draws `number` examples in a full run."""
    few = min(number, max(LEAST, number // SHARE))
    return settings(max_examples=pick(few, number), **options)


def full(*values: Any, **options: Any) -> Any:
    """A parameter of a test that only a full run tries."""
    return pytest.param(*values, marks=pytest.mark.full, **options)

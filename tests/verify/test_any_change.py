"""Changes anywhere in a plan: verify never raises, and plans that pass give right results."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verify_plans import dense, equal, inputs_of, rich_batch, rich_plan, run

from dyncp import Plan
from dyncp.verify import PlanError, check_plan, verify_plan
from sizes import draws

PLAN, BATCH = rich_plan(), rich_batch()
X = inputs_of(PLAN)
EXPECTED = {name: dense(BATCH, name, X) for name in BATCH.masks}


def array_paths(item: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of field names and mask names to all arrays of a part."""
    if isinstance(item, np.ndarray):
        return [path] if item.size else []
    if isinstance(item, dict):
        return [p for key, value in item.items() for p in array_paths(value, (*path, key))]
    if is_dataclass(item):
        names = [f.name for f in fields(item)]
        return [p for name in names for p in array_paths(getattr(item, name), (*path, name))]
    return []


def changed(item: Any, path: tuple[str, ...], change: Any) -> Any:
    """The same part with `change` applied to the array at `path`."""
    if not path:
        return change(item)
    head, *rest = path
    if isinstance(item, dict):
        return {**item, head: changed(item[head], tuple(rest), change)}
    return replace(item, **{head: changed(getattr(item, head), tuple(rest), change)})


@st.composite
def broken_plans(draw: Any) -> Plan:
    """The plan with one number changed, in one array of one part."""
    rank = draw(st.integers(0, PLAN.num_ranks - 1))
    path = draw(st.sampled_from(array_paths(PLAN.parts[rank])))
    step = draw(st.sampled_from([-1, 1, 2, -5, 10**6, -(2**31), 2**31 - 1]))
    place = draw(st.integers(0, 10**6))

    def change(array: np.ndarray) -> np.ndarray:
        values = array.copy()
        index = place % values.size
        old = int(values.flat[index])
        values.flat[index] = old + step if abs(step) < 2**30 else step
        return values

    parts = list(PLAN.parts)
    parts[rank] = changed(parts[rank], path, change)
    return Plan.of(parts)


@draws(200)
@given(broken_plans())
def test_a_changed_number_is_reported_or_does_no_harm(plan: Plan) -> None:
    if verify_plan(plan, BATCH):
        return
    for name, expected in EXPECTED.items():
        right = equal(run(plan, name, X), expected)
        assert right


@draws(100)
@given(broken_plans())
def test_the_interpreter_raises_plan_errors_only(plan: Plan) -> None:
    for name in BATCH.masks:
        try:
            run(plan, name, X)
        except PlanError:
            continue


@draws(60)
@given(st.data())
def test_arrays_of_another_shape_or_type_are_reported(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, PLAN.num_ranks - 1))
    path = data.draw(st.sampled_from(array_paths(PLAN.parts[rank])))
    misshape = data.draw(
        st.sampled_from(
            [
                lambda a: a[:-1],
                lambda a: a[None],
                lambda a: a.ravel()[:0],
                lambda a: a.astype(np.float64),
                lambda _: None,
            ]
        )
    )
    parts = list(PLAN.parts)
    parts[rank] = changed(parts[rank], path, misshape)
    assert verify_plan(Plan(tuple(parts)), BATCH)


@pytest.mark.parametrize(
    "changes",
    [
        {"declared_bytes": {}},
        {"masks": {}},
        {"shape": None},
        {"balance": None},
        {"head_groups": ()},
        {"slot_alignment": 0},
        {"local_multiple": 0},
        {"rank": 7},
        {"num_ranks": 9},
        {"digest": "no digest"},
        {"blocks": None},
        {"lengths": np.zeros(0, np.int32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_malformed_parts_are_reported_not_raised(changes: dict[str, Any]) -> None:
    parts = list(PLAN.parts)
    parts[1] = replace(parts[1], **changes)
    violations = verify_plan(Plan(tuple(parts)), BATCH)
    assert violations
    assert all(1 <= v.invariant <= 8 and v.sentence for v in violations)


def test_a_plan_without_parts_is_reported() -> None:
    with pytest.raises(PlanError, match="no parts"):
        check_plan(Plan(()), BATCH)

"""Structure: every part can be followed, and all parts belong together."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from dyncp.plan import PartError, Plan, RankPlan, check_structure
from dyncp.verify.violation import Violation


def check_parts(plan: Plan) -> list[Violation]:
    """The first structural fault of each part; while there is one, nothing else is looked at."""
    if not plan.parts:
        return [Violation(8, "the plan has no parts")]
    found = [v for index, part in enumerate(plan.parts) for v in _faults(plan, index, part)]
    return found or [Violation(1, sentence) for sentence in _differences(plan)]


def _faults(plan: Plan, index: int, part: RankPlan) -> list[Violation]:
    try:
        if part.rank != index:
            raise PartError(8, f"the part in this place is of rank {part.rank}")
        if part.num_ranks != len(plan.parts):
            raise PartError(
                8, f"the part is of {part.num_ranks} ranks, the plan of {len(plan.parts)}"
            )
        _check_dtypes(part, "part")
        check_structure(part)
    except PartError as fault:
        return [Violation(fault.invariant, f"rank {index}: {fault}")]
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        return [Violation(1, f"rank {index}: the part is malformed: {error!r}")]
    return []


def _check_dtypes(item: Any, name: str) -> None:
    """Parts that were never encoded may hold anything."""
    if isinstance(item, np.ndarray):
        if item.dtype not in (np.int32, np.int64):
            raise PartError(1, f"{name} holds {item.dtype}")
    elif is_dataclass(item):
        for entry in fields(item):
            _check_dtypes(getattr(item, entry.name), f"{name}.{entry.name}")
    elif isinstance(item, dict):
        for key, value in item.items():
            _check_dtypes(value, f"{name}[{key!r}]")


def _differences(plan: Plan) -> Iterator[str]:
    """What all parts must say alike, and do not."""
    first = plan.parts[0]
    for part in plan.parts[1:]:
        alike = {
            "shape": part.shape == first.shape,
            "head groups": part.head_groups == first.head_groups,
            "local multiple": part.local_multiple == first.local_multiple,
            "sequence lengths": np.array_equal(part.lengths, first.lengths),
            "masks": part.masks.keys() == first.masks.keys(),
        }
        for column in ("sequence", "start", "end", "owner"):
            same = np.array_equal(getattr(part.blocks, column), getattr(first.blocks, column))
            alike[f"block table (column {column})"] = same
        for name in part.masks.keys() & first.masks.keys():
            same = (part.masks[name].backward is None) == (first.masks[name].backward is None)
            alike[f"backward program of mask {name!r}"] = same
        for what, same in alike.items():
            if not same:
                yield f"rank {part.rank}: its {what} differs from that of rank 0"

"""Structure: every index in a plan points at something that exists, so that it can be followed.

This is the verifier's own reading of the plan format, apart from the one that guards decoding.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from dyncp.blocks import AttentionShape, Direction, HeadGroup, Payload
from dyncp.placement import Balance, Limits
from dyncp.plan import MaskPlan, Messages, Op, OwnedBlocks, Plan, Program, RankPlan, RowRuns, Space
from dyncp.verify.violation import Violation

KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.KV, Payload.OUT),
    Direction.BACKWARD: (Payload.KV, Payload.Q_DOUT, Payload.DQ, Payload.DKV),
}


class _MalformedError(Exception):
    """Carries the violation out of the nested checks."""

    def __init__(self, invariant: int, sentence: str) -> None:
        super().__init__(sentence)
        self.invariant, self.sentence = invariant, sentence


def check_structure(plan: Plan) -> list[Violation]:
    """The first structural fault of each part; while there is one, nothing else is looked at."""
    if not plan.parts:
        return [Violation(8, "the plan has no parts")]
    found = [v for index, part in enumerate(plan.parts) for v in _part_faults(plan, index, part)]
    return found or [Violation(1, sentence) for sentence in _differences(plan)]


def programs_of(mask: MaskPlan) -> Iterator[tuple[Direction, Program]]:
    """The directions a mask is planned for, with their programs."""
    yield Direction.FORWARD, mask.forward
    if mask.backward is not None:
        yield Direction.BACKWARD, mask.backward


def _part_faults(plan: Plan, index: int, part: RankPlan) -> list[Violation]:
    try:
        _check_part(plan, index, part)
    except _MalformedError as fault:
        return [Violation(fault.invariant, f"rank {index}: {fault.sentence}")]
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        return [Violation(1, f"rank {index}: the part is malformed: {error!r}")]
    return []


def _check_part(plan: Plan, index: int, part: RankPlan) -> None:
    _require(part.rank == index, 8, f"the part in this place is of rank {part.rank}")
    sizes = (part.num_ranks, len(plan.parts))
    _require(sizes[0] == sizes[1], 8, f"the part is of {sizes[0]} ranks, the plan of {sizes[1]}")
    _require(part.slot_alignment > 0, 2, f"slot alignment is {part.slot_alignment}")
    _require(part.local_multiple > 0, 2, f"local multiple is {part.local_multiple}")
    _check_types(part)
    _check_blocks(part)
    for name, mask in part.masks.items():
        declared = part.declared_bytes.get(name, ())
        fine = len(declared) == 2 and all(isinstance(count, int) for count in declared)
        _require(fine, 7, f"mask {name!r} does not declare its two byte counts")
        try:
            _check_mask(part, mask)
        except _MalformedError as fault:
            raise _MalformedError(fault.invariant, f"mask {name!r}: {fault.sentence}") from None


def _check_types(part: RankPlan) -> None:
    for item, cls in ((part.shape, AttentionShape), (part.balance, Balance)):
        _require(isinstance(item, cls), 1, f"{item!r} is no {cls.__name__}")
    _check_balance(part.balance)
    fine = all(isinstance(group, HeadGroup) for group in part.head_groups)
    _require(fine and part.head_groups, 1, f"head groups are {part.head_groups!r}")
    first = 0
    for group in part.head_groups:
        fine = group.first_kv_head == first and group.num_kv_heads > 0
        _require(fine, 1, f"head groups {part.head_groups} do not follow one another")
        first += group.num_kv_heads
    _require(first == part.shape.kv_heads, 1, f"head groups hold {first} kv heads")
    _check_dtypes(part, "part")


def _check_balance(balance: Balance) -> None:
    for field in ("compute_max_over_mean", "tokens_max_over_mean"):
        value = getattr(balance, field)
        _require(isinstance(value, int | float), 5, f"{field} is {value!r}")
    _require(isinstance(balance.limits, Limits), 5, f"limits are {balance.limits!r}")
    _require(isinstance(balance.reason, str), 5, f"the reason is {balance.reason!r}")


def _check_dtypes(item: Any, name: str) -> None:
    if isinstance(item, np.ndarray):
        _require(item.dtype in (np.int32, np.int64), 1, f"{name} holds {item.dtype}")
    elif is_dataclass(item):
        for entry in fields(item):
            _check_dtypes(getattr(item, entry.name), f"{name}.{entry.name}")
    elif isinstance(item, dict):
        for key, value in item.items():
            _check_dtypes(value, f"{name}[{key!r}]")


def _check_blocks(part: RankPlan) -> None:
    blocks, lengths = part.blocks, part.lengths
    _columns(blocks, 1, "block table")
    _require(
        lengths.ndim == 1 and len(lengths) and lengths.min() > 0, 1, "lengths are not positive"
    )
    _bounded(blocks.owner, part.num_ranks, 1, "a block's owner")
    _bounded(blocks.sequence, len(lengths), 1, "a block's sequence")
    for sequence, length in enumerate(lengths.tolist()):
        own = blocks.sequence == sequence
        borders = np.append(blocks.start[own], length)
        fine = own.any() and borders[0] == 0 and (borders[1:] == blocks.end[own]).all()
        fine = fine and (borders[1:] > borders[:-1]).all()
        _require(fine, 1, f"the block table does not partition sequence {sequence}")
    _require((np.diff(blocks.sequence) >= 0).all(), 1, "the block table is not in batch order")


def _check_mask(part: RankPlan, mask: MaskPlan) -> None:
    tiles, num_blocks, num_groups = mask.tiles, len(part.blocks), len(part.head_groups)
    _columns(tiles, 1, "tiles")
    _bounded(tiles.q_block, num_blocks, 1, "a tile's query block")
    _bounded(tiles.k_block, num_blocks, 1, "a tile's key block")
    _bounded(tiles.head_group, num_groups, 1, "a tile's head group")
    _check_rows(part.blocks, mask.rows)
    bare = np.setdiff1d(tiles.q_block, mask.rows.block)
    _require(not len(bare), 1, f"query blocks {bare.tolist()} have tiles but no row ranges")
    for direction, program in programs_of(mask):
        try:
            _check_program(part, mask, program, direction)
        except _MalformedError as fault:
            where = direction.name.lower()
            raise _MalformedError(fault.invariant, f"{where}: {fault.sentence}") from None


def _check_rows(blocks: OwnedBlocks, rows: RowRuns) -> None:
    runs = len(rows.block)
    fine = rows.block.shape == rows.start.shape == (runs,) and rows.base.shape == rows.slope.shape
    fine = fine and rows.base.ndim == 3 and rows.base.shape[::2] == (runs, 2)
    _require(fine, 1, "the row ranges' arrays have shapes that do not fit together")
    _bounded(rows.block, len(blocks), 1, "a row range's block")
    same = rows.block[1:] == rows.block[:-1]
    first = np.append(True, ~same)[:runs]
    for ordered in (
        rows.block[1:] >= rows.block[:-1],
        (rows.start[1:] > rows.start[:-1])[same],
        rows.start[first] == blocks.start[rows.block[first]],
        rows.start < blocks.end[rows.block],
    ):
        _require(ordered.all(), 1, "row ranges do not run through their blocks row by row")


def _check_program(part: RankPlan, mask: MaskPlan, program: Program, direction: Direction) -> None:
    num_blocks, num_groups = len(part.blocks), len(part.head_groups)
    fine = program.tile_division.shape == mask.tiles.q_block.shape
    _require(fine, 1, "tiles and their divisions differ in number")
    instructions = program.instructions
    _require(instructions.ndim == 2 and instructions.shape[1] == 2, 3, "instructions are no pairs")
    _bounded(instructions[:, 0], len(Op), 3, "an instruction")
    for messages, side in ((program.sends, "send"), (program.receives, "receive")):
        _check_messages(part, messages, direction, side)
    slots, rows = program.slots, program.workspace_rows
    _columns(slots, 2, "slots")
    _bounded(slots.space, len(Space), 2, "a slot's space")
    _bounded(slots.head_group, num_groups, 2, "a slot's head group")
    _bounded(slots.block, num_blocks, 2, "a slot's block")
    _require(rows.shape == (len(Space), num_groups), 2, f"workspace rows have shape {rows.shape}")


def _check_messages(part: RankPlan, messages: Messages, direction: Direction, side: str) -> None:
    _columns(messages, 3, f"{side}s")
    _bounded(messages.peer, part.num_ranks, 3, f"a {side}'s peer")
    _bounded(messages.head_group, len(part.head_groups), 3, f"a {side}'s head group")
    _bounded(messages.block, len(part.blocks), 3, f"a {side}'s block")
    fine = np.isin(messages.kind, KINDS[direction]).all()
    _require(fine, 3, f"a {side} is of a kind that does not travel in this direction")
    _require((messages.peer != part.rank).all(), 3, f"a {side} is between the rank and itself")


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


def _require(condition: Any, invariant: int, sentence: str) -> None:
    if not condition:
        raise _MalformedError(invariant, sentence)


def _columns(table: Any, invariant: int, what: str) -> None:
    shapes = [getattr(table, entry.name).shape for entry in fields(table)]
    fine = len(shapes[0]) == 1 and len(set(shapes)) == 1
    _require(fine, invariant, f"{what}: the columns have shapes {shapes}")


def _bounded(values: Any, bound: int, invariant: int, what: str) -> None:
    fine = ((values >= 0) & (values < bound)).all()
    _require(fine, invariant, f"{what} is outside [0, {bound})")

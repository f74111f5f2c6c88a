"""Checks that a part is well-formed: every index in it points at something that exists.

It says nothing about whether the plan is right (that is `verify`), only that running it can not
read or write outside its arrays. Raises ValueError with the first fault found.
"""

from typing import Any

import numpy as np

from dyncp.arrays import Int64, starts_of
from dyncp.blocks import Direction, Payload
from dyncp.placement import Balance
from dyncp.plan.rank_plan import (
    INPUT_SPACE,
    RESULT_SPACE,
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    Slots,
    Space,
)
from dyncp.plan.rows import RowRuns

# Of ranks, and of rows that others are padded to; nobody has more, and they become memory.
MOST_MULTIPLE = 2**16
_KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.KV, Payload.OUT),
    Direction.BACKWARD: (Payload.KV, Payload.Q_DOUT, Payload.DQ, Payload.DKV),
}


def check_part(part: RankPlan) -> None:
    _check_scalars(part)
    _check_blocks(part.lengths, part.blocks, part.num_ranks)
    for name, mask in part.masks.items():
        declared = part.declared_bytes[name]
        counts = len(declared) == 2 and all(type(count) is int for count in declared)
        _require(counts, f"mask {name!r} declares no two byte counts")
        _check_tiles(part, mask)
        _check_rows(part, mask.rows, mask.tiles.q_block)
        for direction, program in zip(Direction, (mask.forward, mask.backward), strict=True):
            if program is not None:
                _check_program(part, mask, program, direction)


def _require(condition: Any, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_scalars(part: RankPlan) -> None:
    for field in ("rank", "num_ranks", "slot_alignment", "local_multiple"):
        value = getattr(part, field)
        _require(type(value) is int and 0 <= value <= MOST_MULTIPLE, f"{field} is {value!r}")
    for field in ("fingerprint", "digest", "solver"):
        _require(isinstance(getattr(part, field), str), f"{field} is no text")
    _require(part.rank < part.num_ranks, f"rank {part.rank} is not below {part.num_ranks}")
    _require(part.slot_alignment and part.local_multiple, "slot alignment or local multiple is 0")
    _check_balance(part.balance)
    _require(part.masks, "the part has no mask")
    heads = 0
    for group in part.head_groups:
        _require(group.first_kv_head == heads and group.num_kv_heads > 0, "head groups leave gaps")
        heads += group.num_kv_heads
    _require(heads == part.shape.kv_heads, f"head groups hold {heads} kv heads")


def _check_balance(balance: Balance) -> None:
    for field in ("compute_max_over_mean", "tokens_max_over_mean"):
        value = getattr(balance, field)
        _require(type(value) in (int, float), f"{field} is {value!r}")
    _require(isinstance(balance.reason, str), "the reason of the balance is no text")


def _check_blocks(lengths: np.ndarray, blocks: OwnedBlocks, num_ranks: int) -> None:
    _require(lengths.ndim == 1 and len(lengths) and lengths.min() > 0, "lengths are not positive")
    _columns(blocks, "blocks")
    _inside(blocks.owner, num_ranks, "block owner")
    _inside(blocks.sequence, len(lengths), "block sequence")
    _require((blocks.end > blocks.start).all(), "a block is empty")
    offset = starts_of(lengths)
    start, end = offset[blocks.sequence] + blocks.start, offset[blocks.sequence] + blocks.end
    _require(
        len(start) and start[0] == 0 and end[-1] == offset[-1] and (start[1:] == end[:-1]).all(),
        "blocks do not cover the sequences one after the other",
    )
    _require((blocks.end <= lengths[blocks.sequence]).all(), "a block leaves its sequence")


def _check_tiles(part: RankPlan, mask: MaskPlan) -> None:
    _columns(mask.tiles, "tiles")
    _inside(mask.tiles.q_block, len(part.blocks), "tile query block")
    _inside(mask.tiles.k_block, len(part.blocks), "tile key block")
    _inside(mask.tiles.head_group, len(part.head_groups), "tile head group")
    same = part.blocks.sequence[mask.tiles.q_block] == part.blocks.sequence[mask.tiles.k_block]
    _require(same.all(), "a tile joins blocks of two sequences")
    _require((mask.tiles.pairs > 0).all(), "a tile has no pairs")


def _check_rows(part: RankPlan, rows: RowRuns, q_blocks: np.ndarray) -> None:
    count = len(rows.block)
    _require(rows.block.ndim == 1 and rows.start.shape == (count,), "row runs differ in number")
    shape_fits = rows.base.ndim == 3 and rows.base.shape[0] == count and rows.base.shape[2] == 2
    _require(shape_fits and rows.base.shape[1] > 0, f"row ranges have shape {rows.base.shape}")
    _require(rows.slope.shape == rows.base.shape, "row slopes and ranges differ in shape")
    _inside(rows.block, len(part.blocks), "row run block")
    _require(np.isin(q_blocks, rows.block).all(), "a tile's query block has no key ranges")
    if not count:
        return
    start, end = part.blocks.start[rows.block], part.blocks.end[rows.block]
    head = np.append(True, rows.block[1:] != rows.block[:-1])
    _require((np.diff(rows.block) >= 0).all(), "row runs are not ordered by block")
    _require((rows.start[head] == start[head]).all(), "a block's row runs start late")
    in_order = rows.start[1:] > rows.start[:-1]
    _require(in_order[~head[1:]].all(), "a block's row runs are not in order")
    _require((rows.start < end).all(), "a row run starts behind its block")
    next_start = np.where(np.append(head[1:], True), end, np.append(rows.start[1:], 0))
    steps = (next_start.astype(np.int64) - rows.start - 1)[:, None, None]
    length = part.lengths[part.blocks.sequence[rows.block]][:, None, None]
    for ranges in (rows.base.astype(np.int64), rows.base + rows.slope.astype(np.int64) * steps):
        _require(((ranges >= 0) & (ranges <= length)).all(), "a row's ranges leave its sequence")


def _check_program(part: RankPlan, mask: MaskPlan, program: Program, direction: Direction) -> None:
    _require(program.tile_division.shape == mask.tiles.q_block.shape, "tiles without division")
    instructions = program.instructions
    _require(instructions.ndim == 2 and instructions.shape[1] == 2, "instructions are no pairs")
    _inside(instructions[:, 0], len(Op), "instruction")
    _require((instructions >= 0).all(), "an instruction has a negative argument")
    _require(
        len(np.unique(instructions, axis=0)) == len(instructions), "an instruction comes twice"
    )
    _check_messages(part, program.sends, direction)
    _check_messages(part, program.receives, direction)
    _check_covered(program, Op.COMPUTE, program.tile_division, "division is never computed")
    _check_covered(program, Op.LAUNCH, program.sends.phase, "phase is never launched")
    _check_covered(program, Op.LAUNCH, program.receives.phase, "phase is never launched")
    _check_covered(program, Op.WAIT, program.receives.phase, "phase is never waited for")
    _check_slots(part, program)
    _check_held(part, mask, program)


def _check_messages(part: RankPlan, messages: Messages, direction: Direction) -> None:
    _columns(messages, "messages")
    _inside(messages.peer, part.num_ranks, "peer")
    _inside(messages.head_group, len(part.head_groups), "message head group")
    _inside(messages.block, len(part.blocks), "message block")
    _require((messages.phase >= 0).all(), "a message has a negative phase")
    _require((messages.peer != part.rank).all(), "a rank sends to itself")
    _require(np.isin(messages.kind, _KINDS[direction]).all(), "a payload is of no allowed kind")


def _check_covered(program: Program, op: Op, used: np.ndarray, sentence: str) -> None:
    named = program.instructions[program.instructions[:, 0] == op, 1]
    _require(np.isin(used, named).all(), f"a {sentence}")


def _check_slots(part: RankPlan, program: Program) -> None:
    slots: Slots = program.slots
    _columns(slots, "slots")
    _inside(slots.space, len(Space), "slot space")
    _inside(slots.head_group, len(part.head_groups), "slot head group")
    _inside(slots.block, len(part.blocks), "slot block")
    _inside(slots.first, len(program.instructions), "slot's first instruction")
    _inside(slots.last, len(program.instructions), "slot's last instruction")
    rows = program.workspace_rows
    _require(rows.shape == (len(Space), len(part.head_groups)), "workspace rows have a wrong shape")
    tokens = part.blocks.tokens[slots.block].astype(np.int64)
    fits = slots.row.astype(np.int64) + tokens <= rows[slots.space, slots.head_group]
    _require((slots.row >= part.local_rows).all() and fits.all(), "a slot is outside its workspace")
    room = part.local_rows + (tokens + part.slot_alignment).sum() + part.slot_alignment
    _require((rows >= part.local_rows).all() and (rows <= room).all(), "a workspace is oversized")


def _check_held(part: RankPlan, mask: MaskPlan, program: Program) -> None:
    """Every block that a tile or a message names is local or has a slot."""
    tiles = mask.tiles
    q_kinds = [kind for kind, space in (INPUT_SPACE | RESULT_SPACE).items() if space is Space.Q]
    for space, blocks in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        held = np.zeros((len(part.head_groups), len(part.blocks)), np.bool_)
        held[:, part.local_blocks] = True
        slots = program.slots
        chosen = slots.space == space
        held[slots.head_group[chosen], slots.block[chosen]] = True
        _require(
            held[tiles.head_group, blocks].all(), "a tile's block is neither local nor in a slot"
        )
        for messages in (program.sends, program.receives):
            of_space = np.isin(messages.kind, q_kinds) == (space is Space.Q)
            group, block = messages.head_group[of_space], messages.block[of_space]
            _require(held[group, block].all(), "a message's block is neither local nor in a slot")


def _columns(table: Any, name: str) -> None:
    shapes = {field: getattr(table, field).shape for field in table.__dataclass_fields__}
    first = next(iter(shapes.values()))
    _require(len(first) == 1 and set(shapes.values()) == {first}, f"{name} has columns {shapes}")


def _inside(values: np.ndarray | Int64, bound: int, what: str) -> None:
    _require(((values >= 0) & (values < bound)).all(), f"a {what} is not in [0, {bound})")

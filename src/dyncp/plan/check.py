"""`check_part`: raises the first fault of a part, with the invariant (docs/verify.md) it breaks.

A part that passes is safe to run: every index is in bounds, nothing is read or written outside the
part's buffers, and no wait is for a message that never arrives. Whether it computes the right
results is checked by `dyncp.verify`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dyncp.arrays import starts_of
from dyncp.blocks import K_KINDS, OF_KEYS, Q_KINDS, Direction, TokenBlocks
from dyncp.checks import MOST_RANKS
from dyncp.masks.positions import UNCLEAR
from dyncp.placement import Limits
from dyncp.plan.format import (
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    RowRuns,
    Space,
    Stretches,
)

COVERAGE, INPUTS, MESSAGES, BALANCE, BYTES, IDENTITY = 1, 2, 3, 5, 7, 8
# Largest number of a phase or a division: executors make tables of that size.
MOST_STEPS = 2**20


class PartError(ValueError):
    """A part is malformed; `invariant` is the number of the invariant that it breaks."""

    def __init__(self, invariant: int, sentence: str) -> None:
        super().__init__(sentence)
        self.invariant = invariant


def check_part(part: RankPlan) -> None:
    """Raises PartError unless the part is safe to run."""
    _check_scalars(part)
    _check_head_groups(part)
    _check_blocks(part.lengths, part.blocks, part.num_ranks)
    _check_stretches(part.lengths, part.stretches)
    for name, mask in part.masks.items():
        declared = part.declared_bytes.get(name, ())
        counts = len(declared) == 2 and all(type(count) is int for count in declared)
        _require(counts, BYTES, f"mask {name!r} does not declare its two byte counts")
        with _inside(f"mask {name!r}"):
            _check_tiles(part, mask)
            _check_rows(part, mask)
            for direction, program in mask.programs():
                with _inside(direction.name.lower()):
                    for messages, side in ((program.sends, "send"), (program.receives, "receive")):
                        _check_messages(part, messages, direction, side)
                    _check_instructions(mask, program)
                    _check_slots(part, program)
                    _check_present(part, mask, program)


@contextmanager
def _inside(where: str) -> Iterator[None]:
    try:
        yield
    except PartError as error:
        raise PartError(error.invariant, f"{where}: {error}") from None


def _require(condition: Any, invariant: int, sentence: str) -> None:
    if not condition:
        raise PartError(invariant, sentence)


def _bounded(values: np.ndarray, bound: int, invariant: int, what: str) -> None:
    _require(((values >= 0) & (values < bound)).all(), invariant, f"{what} is not in [0, {bound})")


def _check_table(table: Any, invariant: int, one: str, **bounds: int) -> None:
    """All columns have the same length, and columns with a bound are in [0, bound)."""
    shapes = {field: getattr(table, field).shape for field in table.__dataclass_fields__}
    first = next(iter(shapes.values()))
    alike = len(first) == 1 and set(shapes.values()) == {first}
    _require(alike, invariant, f"the columns of its {one} table have shapes {shapes}")
    for field, bound in bounds.items():
        what = f"a {one}'s {field.replace('_', ' ')}"
        _bounded(getattr(table, field), bound, invariant, what)


def _check_scalars(part: RankPlan) -> None:
    for field, invariant, least in (
        ("rank", IDENTITY, 0),
        ("num_ranks", IDENTITY, 1),
        ("slot_alignment", INPUTS, 1),
        ("local_multiple", INPUTS, 1),
    ):
        value = getattr(part, field)
        fits = type(value) is int and least <= value <= MOST_RANKS
        _require(fits, invariant, f"{field} is {value!r}; {least} to {MOST_RANKS} is allowed")
    for item, field, kinds, invariant in (
        (part, "fingerprint", str, IDENTITY),
        (part, "digest", str, IDENTITY),
        (part, "solver", str, IDENTITY),
        (part.balance, "compute_max_over_mean", (int, float), BALANCE),
        (part.balance, "tokens_max_over_mean", (int, float), BALANCE),
        (part.balance, "limits", Limits, BALANCE),
        (part.balance, "reason", str, BALANCE),
    ):
        value = getattr(item, field)
        _require(isinstance(value, kinds), invariant, f"{field} is {value!r}: wrong type")
    _require(part.rank < part.num_ranks, IDENTITY, f"rank is {part.rank} of {part.num_ranks} ranks")
    _require(part.masks, COVERAGE, "the part has no mask")


def _check_head_groups(part: RankPlan) -> None:
    heads = 0
    for group in part.head_groups:
        follows = group.first_kv_head == heads and group.num_kv_heads > 0
        _require(follows, COVERAGE, f"head groups {part.head_groups} are not consecutive")
        heads += group.num_kv_heads
    fits = heads == part.shape.kv_heads
    _require(fits, COVERAGE, f"head groups hold {heads} of {part.shape.kv_heads} kv heads")


def _check_blocks(lengths: np.ndarray, blocks: OwnedBlocks, num_ranks: int) -> None:
    positive = lengths.ndim == 1 and len(lengths) and lengths.min() > 0
    _require(positive, COVERAGE, "sequence lengths are not positive")
    _check_table(blocks, COVERAGE, "block", owner=num_ranks, sequence=len(lengths))
    _require((np.diff(blocks.sequence) >= 0).all(), COVERAGE, "blocks are not in batch order")
    head = np.append(True, blocks.sequence[1:] != blocks.sequence[:-1])[: len(blocks)]
    last = np.append(head[1:], True)[: len(blocks)]
    right = blocks.end > blocks.start
    right &= blocks.start == np.where(head, 0, np.roll(blocks.end, 1))
    right &= ~last | (blocks.end == lengths[blocks.sequence])
    missing = np.setdiff1d(np.arange(len(lengths)), blocks.sequence[right & head])
    broken = np.append(blocks.sequence[~right], missing)
    _require(not len(broken), COVERAGE, f"blocks do not partition sequence {broken[:1]}")


def _check_stretches(lengths: np.ndarray, stretches: Stretches) -> None:
    _check_table(stretches, IDENTITY, "stretch")
    start, before, bounds = stretches.start, stretches.before, starts_of(lengths)
    ordered = (np.diff(start) > 0).all() and not len(np.setdiff1d(bounds[:-1], start))
    _require(ordered, IDENTITY, "stretches are not in order, or a sequence begins inside one")
    inside = len(start) and start[-1] < bounds[-1] and (before >= UNCLEAR).all()
    _require(inside and (before < start).all(), IDENTITY, "a stretch is not inside the batch")
    sequence = np.searchsorted(bounds, np.stack([start, before.clip(0)]), side="right")
    same = (before < 0) | (sequence[0] == sequence[1])
    _require(same.all(), IDENTITY, "a stretch follows a token of another sequence")


def _check_tiles(part: RankPlan, mask: MaskPlan) -> None:
    tiles, blocks, groups = mask.tiles, len(part.blocks), len(part.head_groups)
    _check_table(tiles, COVERAGE, "tile", q_block=blocks, k_block=blocks, head_group=groups)
    _require((tiles.pairs > 0).all(), COVERAGE, "a tile has no pairs")
    sequence = part.blocks.sequence
    same = sequence[tiles.q_block] == sequence[tiles.k_block]
    _require(same.all(), COVERAGE, "a tile joins blocks of two sequences")


def check_runs(rows: RowRuns, blocks: TokenBlocks, needed: np.ndarray) -> None:
    """Raises PartError unless the runs cover their blocks in order, and every `needed` block."""
    count = len(rows.block)
    fits = rows.block.shape == rows.start.shape == (count,) and rows.base.shape == rows.slope.shape
    fits = fits and rows.base.ndim == 3 and rows.base.shape[::2] == (count, 2)
    _require(fits and rows.base.shape[1] > 0, COVERAGE, "arrays of row ranges do not fit together")
    _bounded(rows.block, len(blocks), COVERAGE, "the block of a row range")
    bare = np.setdiff1d(needed, rows.block)
    _require(not len(bare), COVERAGE, f"query blocks {bare[:8]} have no row ranges")
    same = rows.block[1:] == rows.block[:-1]
    head = np.append(True, ~same)[: len(rows)]
    for ordered in (
        rows.block[1:] >= rows.block[:-1],
        (rows.start[1:] > rows.start[:-1])[same],
        rows.start[head] == blocks.start[rows.block[head]],
        rows.start < blocks.end[rows.block],
    ):
        _require(ordered.all(), COVERAGE, "row ranges do not cover their blocks in order")


def _check_rows(part: RankPlan, mask: MaskPlan) -> None:
    rows = mask.rows
    check_runs(rows, part.blocks, mask.tiles.q_block)
    steps = (rows.ends(part.blocks.end) - rows.start - 1)[:, None, None]
    length = part.lengths[part.blocks.sequence[rows.block]][:, None, None]
    for ranges in (rows.base.astype(np.int64), rows.base + rows.slope.astype(np.int64) * steps):
        inside = ((ranges >= 0) & (ranges <= length)).all()
        _require(inside, COVERAGE, "a row's key ranges leave its sequence")


def _check_messages(part: RankPlan, messages: Messages, direction: Direction, side: str) -> None:
    groups, blocks = len(part.head_groups), len(part.blocks)
    bounds = {"peer": part.num_ranks, "head_group": groups, "block": blocks}
    _check_table(messages, MESSAGES, side, **bounds)
    kinds = Q_KINDS[direction] + K_KINDS[direction]
    travels = np.isin(messages.kind, kinds).all()
    _require(travels, MESSAGES, f"a {side} has a payload of the other direction")
    _require((messages.peer != part.rank).all(), MESSAGES, f"a {side} is between a rank and itself")


def _check_instructions(mask: MaskPlan, program: Program) -> None:
    """No instruction is repeated, every division and phase has its instructions, and every
    instruction has tiles or messages."""
    alike = program.tile_division.shape == mask.tiles.q_block.shape
    _require(alike, COVERAGE, "the numbers of tiles and of their divisions differ")
    instructions = program.instructions
    pairs = instructions.ndim == 2 and instructions.shape[1] == 2
    _require(pairs, MESSAGES, f"instructions have shape {instructions.shape}")
    _bounded(instructions[:, 0], len(Op), MESSAGES, "an instruction")
    _bounded(instructions[:, 1], MOST_STEPS, MESSAGES, "an instruction's argument")
    distinct = len(np.unique(instructions, axis=0)) == len(instructions)
    _require(distinct, MESSAGES, "an instruction comes twice")
    for op, used, sentence in (
        (Op.COMPUTE, program.tile_division, "a division is never computed"),
        (Op.LAUNCH, program.sends.phase, "a phase with sends is never launched"),
        (Op.LAUNCH, program.receives.phase, "a phase with receives is never launched"),
        (Op.WAIT, program.receives.phase, "a phase with receives is never waited for"),
    ):
        named = instructions[instructions[:, 0] == op, 1]
        _require(np.isin(used, named).all(), MESSAGES, sentence)
    divisions, received = set(program.tile_division.tolist()), set(program.receives.phase.tolist())
    launched: set[int] = set()
    for op, argument in instructions.tolist():
        if op == Op.COMPUTE:
            computes = f"division {argument} is computed, but has no tiles"
            _require(argument in divisions, COVERAGE, computes)
        elif op == Op.LAUNCH:
            launched.add(argument)
        else:
            waits = f"waits for phase {argument}"
            _require(argument in received, MESSAGES, f"{waits}, in which it receives nothing")
            _require(argument in launched, MESSAGES, f"{waits} before launching it")


def _check_slots(part: RankPlan, program: Program) -> None:
    slots, rows, steps = program.slots, program.workspace_rows, len(program.instructions)
    bounds = {"space": len(Space), "head_group": len(part.head_groups), "block": len(part.blocks)}
    _check_table(slots, INPUTS, "slot", **bounds)
    _bounded(slots.first, steps, INPUTS, "a slot's first instruction")
    _bounded(slots.last, steps, INPUTS, "a slot's last instruction")
    shaped = rows.shape == (len(Space), len(part.head_groups))
    _require(shaped, INPUTS, f"workspace rows have shape {rows.shape}")
    tokens = part.blocks.tokens[slots.block].astype(np.int64)
    fits = slots.row.astype(np.int64) + tokens <= rows[slots.space, slots.head_group]
    inside = (slots.row >= part.local_rows).all() and fits.all()
    _require(inside, INPUTS, "a slot is outside its workspace")
    most = part.local_rows + (tokens + part.slot_alignment).sum() + part.slot_alignment
    sized = (rows >= part.local_rows).all() and (rows <= most).all()
    _require(sized, INPUTS, "a workspace is smaller than its local rows or larger than its slots")


def _check_present(part: RankPlan, mask: MaskPlan, program: Program) -> None:
    """Every block of a tile or a message is local or has a slot."""
    tiles, slots = mask.tiles, program.slots
    for space, blocks in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        present = np.zeros((len(part.head_groups), len(part.blocks)), np.bool_)
        present[:, part.local_blocks] = True
        chosen = slots.space == space
        present[slots.head_group[chosen], slots.block[chosen]] = True
        there = present[tiles.head_group, blocks].all()
        _require(there, INPUTS, "a tile's block is neither local nor in a slot")
        for messages in (program.sends, program.receives):
            mine = OF_KEYS[messages.kind] == (space is Space.KV)
            there = present[messages.head_group[mine], messages.block[mine]].all()
            _require(there, INPUTS, "a message's block is neither local nor in a slot")

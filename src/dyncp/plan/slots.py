"""Gives received blocks their slots: places in the workspaces that are reused when free again."""

import heapq
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64, frozen
from dyncp.blocks import Payload
from dyncp.plan.rank_plan import INPUT_SPACE, RESULT_SPACE, Messages, Op, RankTiles, Slots, Space


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """Received blocks of one workspace space, ordered by block and head group, and the first and
    last instruction between which each must stay."""

    block: Int64
    head_group: Int64
    first: Int64
    last: Int64


def find_lifetimes(
    tiles: RankTiles, tile_division: Int32, instructions: Int32, sends: Messages, receives: Messages
) -> dict[Space, Lifetimes]:
    """A block stays from the WAIT that brings it to the last COMPUTE that reads it, or to the
    LAUNCH that sends its result, or relays it."""
    at = _instruction_index(instructions)
    computed, launched = at[Op.COMPUTE, tile_division], at[Op.LAUNCH, sends.phase]
    waited = at[Op.WAIT, receives.phase]
    lifetimes = {}
    for space in Space:
        block = tiles.q_block if space is Space.Q else tiles.k_block
        inputs, sent = _IS_INPUT[space, receives.kind], _IS_OF[space, sends.kind]
        used = np.concatenate([_key(tiles.head_group, block), _key_of(sends, sent)])
        used_at = np.concatenate([computed, launched[sent]])
        key = _key_of(receives, inputs)
        order = np.argsort(key)
        first = waited[inputs][order]
        last = _last_use(key[order], first, used, used_at)
        lifetimes[space] = Lifetimes(key[order] >> 16, key[order] & 0xFFFF, first, last)
    return lifetimes


def _instruction_index(instructions: Int32) -> Int64:
    """Index of the instruction with each (operation, argument)."""
    most = int(instructions[:, 1].max(initial=0))
    at = np.full((len(Op), most + 1), -1, np.int64)
    at[instructions[:, 0], instructions[:, 1]] = np.arange(len(instructions))
    return at


def _kind_table(spaces: dict[Payload, Space]) -> Bool:
    """Whether a payload of each kind belongs to each space, [spaces, kinds]."""
    table = np.zeros((len(Space), len(Payload)), np.bool_)
    for kind, space in spaces.items():
        table[space, kind] = True
    return table


_IS_INPUT, _IS_OF = _kind_table(INPUT_SPACE), _kind_table(INPUT_SPACE | RESULT_SPACE)


def _key(head_group: Int32, block: Int32) -> Int64:
    """Block and head group in one number; head groups are few."""
    return (block.astype(np.int64) << 16) | head_group


def _key_of(messages: Messages, chosen: Bool) -> Int64:
    return _key(messages.head_group[chosen], messages.block[chosen])


def _last_use(keys: Int64, first: Int64, used: Int64, used_at: Int64) -> Int64:
    """Latest use of each of the sorted `keys`; own blocks have no slot and do not count."""
    last = first.copy()
    if len(keys):
        position = np.minimum(np.searchsorted(keys, used), len(keys) - 1)
        found = keys[position] == used
        np.maximum.at(last, position[found], used_at[found])
    return last


def place_slots(
    lifetimes: dict[Space, Lifetimes],
    tokens: Int32,
    num_groups: int,
    local_rows: int,
    alignment: int,
) -> tuple[Slots, Int32]:
    """Slots of all received inputs, and the rows of every workspace [spaces, head groups]."""
    workspace_rows = np.full((len(Space), num_groups), local_rows, np.int64)
    first_row = -(-local_rows // alignment) * alignment
    columns = []
    for space, spans in lifetimes.items():
        row = np.zeros(len(spans.block), np.int64)
        size = -(-tokens[spans.block].astype(np.int64) // alignment) * alignment
        for group in np.unique(spans.head_group):
            mine = spans.head_group == group
            row[mine], workspace_rows[space, group] = assign_slot_rows(
                spans.first[mine], spans.last[mine], size[mine], first_row
            )
        which = (np.full(len(row), space), spans.head_group, spans.block)
        columns.append(np.stack([*which, row, spans.first, spans.last]))
    return Slots(*map(frozen, np.concatenate(columns, axis=1))), frozen(workspace_rows)


def assign_slot_rows(first: Int64, last: Int64, size: Int64, first_row: int) -> tuple[Int64, int]:
    """First row of each slot, and the rows of the workspace, by first fit.

    Slot i is in use from instruction first[i] to last[i] inclusive. `size` and `first_row` are
    multiples of the slot alignment, so every slot starts on a border of it.
    """
    rows = np.zeros(len(first), np.int64)
    end = first_row
    busy: list[tuple[int, int, int]] = []  # (last, row, size)
    free: list[tuple[int, int]] = []  # (row, size), ordered by row, never touching
    for slot in np.lexsort((-size, first)):
        while busy and busy[0][0] < first[slot]:
            _, row, freed = heapq.heappop(busy)
            free = _give_back(free, row, freed)
        rows[slot], free, end = _take(free, int(size[slot]), end)
        heapq.heappush(busy, (int(last[slot]), int(rows[slot]), int(size[slot])))
    return rows, end


def _take(
    free: list[tuple[int, int]], size: int, end: int
) -> tuple[int, list[tuple[int, int]], int]:
    """The first free row with room for `size` rows; grows the workspace where there is none."""
    for i, (row, room) in enumerate(free):
        if room >= size:
            rest = [(row + size, room - size)] if room > size else []
            return row, free[:i] + rest + free[i + 1 :], end
    if free and sum(free[-1]) == end:  # the last gap touches the end: grow only by what is missing
        row = free[-1][0]
        return row, free[:-1], row + size
    return end, free, end + size


def _give_back(free: list[tuple[int, int]], row: int, size: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for gap in sorted([*free, (row, size)]):
        if merged and sum(merged[-1]) == gap[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + gap[1])
        else:
            merged.append(gap)
    return merged

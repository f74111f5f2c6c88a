"""Contributions: what is added to each block's output or gradient on a rank, in order.

A block's rows collect contributions: kernel calls that touch them, and results received for them.
The sum is rounded to the final dtype when the last one is added; until then it is wide. With one
contribution there is nothing to add up.
"""

from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Bool, Int32, Int64
from dyncp.blocks import Payload
from dyncp.plan.rank_plan import RESULT_SPACE, MaskPlan, Op, Program, RankPlan, Space

RESULTS = np.asarray([kind in RESULT_SPACE for kind in Payload])
SPACE_OF_RESULT = np.asarray([RESULT_SPACE.get(kind, -1) for kind in Payload])


@dataclass(frozen=True, slots=True)
class KernelStyle:
    """What memory and order of additions depend on in a kernel.

    `rounds_partials`: its partial outputs come rounded, so the first one of a row need not be wide.
    `settles`: gradients collect in accumulators of its own, with rows padded to `row_multiple` and
    head dims to `dim_multiple`, and are handed over by settling rather than by every call.
    """

    rounds_partials: bool = False
    settles: bool = False
    row_multiple: int = 1
    dim_multiple: int = 1


@dataclass(frozen=True, eq=False)
class Contributions:
    """Ordered by space, head group, block and time. Instruction i has time 2 i; settling happens
    between instructions, at odd times. Calls and settling have `received` -1."""

    time: Int64
    space: Int64
    head_group: Int64
    block: Int64
    received: Int64  # index into the program's receives
    first: Bool
    wide: Bool  # whether the sum is left in the accumulator dtype

    def __len__(self) -> int:
        return len(self.time)

    def select(self, chosen: Bool) -> "Contributions":
        return Contributions(
            self.time[chosen],
            self.space[chosen],
            self.head_group[chosen],
            self.block[chosen],
            self.received[chosen],
            self.first[chosen],
            self.wide[chosen],
        )


def sends_wide(part: RankPlan) -> bool:
    """Whether partial results travel in another dtype than q's, and so from the wide sums."""
    return part.shape.partial_dtype not in (None, part.shape.dtype)


def find_contributions(
    part: RankPlan, mask: MaskPlan, program: Program, style: KernelStyle
) -> Contributions:
    backward = program is mask.backward
    settles = style.settles and backward
    columns = np.concatenate(
        [
            *(_settled(part, mask, program) if settles else _computed(mask, program, backward)),
            _received(program),
        ],
        axis=1,
    )
    time, space, group, block, received = columns[:, np.lexsort(columns[[4, 0, 3, 2, 1]])]
    changes = (np.diff(space) != 0) | (np.diff(group) != 0) | (np.diff(block) != 0)
    first = np.concatenate([np.ones(min(1, len(time)), np.bool_), changes])
    last = np.concatenate([changes, np.ones(min(1, len(time)), np.bool_)])
    wide = ~last
    if sends_wide(part):
        keys, _ = _sent_results(program, len(part.blocks))
        wide |= last & np.isin(_key(space, group, block, len(part.blocks)), keys)
    elif style.rounds_partials and not backward:
        wide &= ~first
    return Contributions(time, space, group, block, received, first, wide)


def _computed(mask: MaskPlan, program: Program, backward: bool) -> list[Int64]:
    """One contribution of every call to every block that it touches."""
    at, tiles = times_of(program, Op.COMPUTE)[program.tile_division], mask.tiles
    sides = [(Space.Q, tiles.q_block)] + [(Space.KV, tiles.k_block)] * backward
    return [_touched(at, space, tiles.head_group, block) for space, block in sides]


def _touched(at: Int64, space: int, group: Int32, block: Int32) -> Int64:
    blocks, groups = int(block.max(initial=0)) + 1, int(group.max(initial=0)) + 1
    key, block64 = np.divmod(np.unique((at * groups + group) * blocks + block), blocks)
    at, group64 = np.divmod(key, groups)
    return np.stack([at, np.full_like(at, space), group64, block64, np.full_like(at, -1)])


def _settled(part: RankPlan, mask: MaskPlan, program: Program) -> list[Int64]:
    """Own rows settle together after the last call, slots before they are sent."""
    launch, end = times_of(program, Op.LAUNCH), times_of(program, Op.COMPUTE).max(initial=-1) + 1
    keys, phase = _sent_results(program, len(part.blocks))
    tiles, parts = mask.tiles, []
    for space, side in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        touched = _touched(np.zeros(len(side), np.int64), space, tiles.head_group, side)
        own = part.blocks.owner[touched[3]] == part.rank
        slots = touched[:, ~own]
        sent = np.searchsorted(keys, _key(slots[1], slots[2], slots[3], len(part.blocks)))
        slots[0] = launch[phase[sent]] - 1
        parts.append(slots)
        for group in np.unique(touched[2, own]):
            block = part.local_blocks
            columns = (end, int(space), group, block, -1)
            parts.append(np.stack(np.broadcast_arrays(*columns)).astype(np.int64))
    return parts


def _received(program: Program) -> Int64:
    got = program.receives
    chosen = np.flatnonzero(RESULTS[got.kind])
    at = times_of(program, Op.WAIT)[got.phase[chosen]] if len(chosen) else chosen
    columns = (at, SPACE_OF_RESULT[got.kind[chosen]], got.head_group[chosen], got.block[chosen])
    return np.stack([*(c.astype(np.int64) for c in columns), chosen.astype(np.int64)])


def times_of(program: Program, op: Op) -> Int64:
    """Time of each instruction of a kind by its argument; -1 where there is none."""
    ops, arguments = program.instructions[:, 0], program.instructions[:, 1]
    at = np.flatnonzero(ops == op)
    times = np.full(int(arguments.max(initial=-1)) + 1, -1, np.int64)
    times[arguments[at]] = 2 * at
    return times


def _sent_results(program: Program, num_blocks: int) -> tuple[Int64, Int32]:
    """Keys of the blocks whose results leave, sorted, and the phases in which they do."""
    sends = program.sends
    sent = np.flatnonzero(RESULTS[sends.kind])
    space = SPACE_OF_RESULT[sends.kind[sent]]
    keys = _key(space, sends.head_group[sent], sends.block[sent], num_blocks)
    order = np.argsort(keys)
    return keys[order], sends.phase[sent][order]


def _key(space: Int64, group: Int64 | Int32, block: Int64 | Int32, num_blocks: int) -> Int64:
    return (group.astype(np.int64) * len(Space) + space) * num_blocks + block

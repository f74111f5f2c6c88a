"""Faults of tiles, ranges and blocks (invariant 1)."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from verify_edits import (
    FORWARD,
    doubled_step,
    fault,
    mask_of,
    owner,
    ranks_of,
    rows_of,
    steps_of,
    table_of,
    with_column,
    with_mask,
    with_part,
    with_steps,
)

from dyncp.arrays import frozen
from dyncp.plan import Direction, Op, Plan, RowRuns


def _without_tile(plan: Plan, rank: int, index: int) -> Plan:
    mask = mask_of(plan, rank)
    tiles = table_of(type(mask.tiles), np.delete(rows_of(mask.tiles), index, axis=0).tolist())
    programs = {
        d.name.lower(): replace(
            mask.program(d), tile_division=frozen(np.delete(mask.program(d).tile_division, index))
        )
        for d in Direction
    }
    return with_mask(plan, rank, tiles=tiles, **programs)


def _with_tile(plan: Plan, rank: int, row: tuple, divisions: dict[Direction, int]) -> Plan:
    mask = mask_of(plan, rank)
    tiles = table_of(type(mask.tiles), [*rows_of(mask.tiles), row])
    programs = {
        d.name.lower(): replace(
            mask.program(d),
            tile_division=frozen(np.append(mask.program(d).tile_division, divisions[d])),
        )
        for d in Direction
    }
    return with_mask(plan, rank, tiles=tiles, **programs)


def _shared_division_tiles(plan: Plan) -> Iterator[tuple[int, int]]:
    """Rank and index of tiles that are not alone in their divisions, in both directions."""
    for rank in ranks_of(plan):
        mask = mask_of(plan, rank)
        for index in range(len(mask.tiles)):
            columns = [mask.program(d).tile_division for d in Direction]
            if all((column == column[index]).sum() > 1 for column in columns):
                yield rank, index


@fault(1, "is on no rank", numerical=True)
def tile_dropped(plan: Plan) -> Plan:
    return _without_tile(plan, *next(_shared_division_tiles(plan)))


@fault(1, "twice", numerical=True)
def tile_doubled_on_another_rank(plan: Plan) -> Plan:
    """The other rank has both inputs for tiles of its own."""
    for source, target in np.ndindex(plan.num_ranks, plan.num_ranks):
        other = mask_of(plan, target)
        for row in rows_of(mask_of(plan, source).tiles):
            reads_q = (other.tiles.q_block == row[0]) & (other.tiles.head_group == row[2])
            reads_k = (other.tiles.k_block == row[1]) & (other.tiles.head_group == row[2])
            if source != target and reads_q.any() and reads_k.any():
                divisions = {
                    d: max(
                        other.program(d).tile_division[reads_q].max(),
                        other.program(d).tile_division[reads_k].max(),
                    )
                    for d in Direction
                }
                return _with_tile(plan, target, row, divisions)
    raise LookupError


@fault(2, "neither local nor in a slot", numerical=True)
def tile_moved_to_a_rank_without_its_inputs(plan: Plan) -> Plan:
    """The other rank knows the query block's ranges, but has never seen the key block."""
    for source, index in _shared_division_tiles(plan):
        row = rows_of(mask_of(plan, source).tiles)[index]
        for target in set(ranks_of(plan)) - {source, owner(plan, row[1])}:
            other = mask_of(plan, target)
            held = (other.tiles.k_block == row[1]) & (other.tiles.head_group == row[2])
            if row[0] in other.tiles.q_block and not held.any():
                divisions = {d: int(other.program(d).tile_division.max()) for d in Direction}
                return _with_tile(_without_tile(plan, source, index), target, row, divisions)
    raise LookupError


@fault(1, "is on no rank", numerical=True)
def tile_with_another_head_group(plan: Plan) -> Plan:
    """Its blocks are the rank's own, so both head groups are there."""
    for rank, index in _shared_division_tiles(plan):
        tiles = mask_of(plan, rank).tiles
        if owner(plan, tiles.q_block[index]) == owner(plan, tiles.k_block[index]) == rank:
            changed = with_column(tiles, "head_group", index, 1 - tiles.head_group[index])
            return with_mask(plan, rank, tiles=changed)
    raise LookupError


@fault(1, "declares", numerical=False)
def pair_count_changed(plan: Plan) -> Plan:
    tiles = mask_of(plan, 1).tiles
    return with_mask(plan, 1, tiles=with_column(tiles, "pairs", 0, tiles.pairs[0] + 1))


def _telling_run(plan: Plan) -> tuple[int, int]:
    """Rank and run whose first row has its last key in a tile of the rank, and has a next row."""
    for rank in ranks_of(plan):
        mask, blocks = mask_of(plan, rank), plan.parts[rank].blocks
        for run, block in enumerate(mask.rows.block.tolist()):
            key = int(mask.rows.base[run, 0, 1]) - 1
            k_blocks = mask.tiles.k_block[mask.tiles.q_block == block]
            inside = (blocks.start[k_blocks] <= key) & (key < blocks.end[k_blocks])
            if inside.any() and mask.rows.start[run] + 1 < blocks.end[block]:
                return rank, run
    raise LookupError


@fault(1, "key ranges", numerical=True)
def range_shifted_by_one(plan: Plan) -> Plan:
    rank, run = _telling_run(plan)
    rows = mask_of(plan, rank).rows
    changed = with_column(rows, "base", (run, 0, 1), rows.base[run, 0, 1] - 1)
    return with_mask(plan, rank, rows=changed)


@fault(1, "key ranges", numerical=True)
def range_slope_changed(plan: Plan) -> Plan:
    rank, run = _telling_run(plan)
    rows = mask_of(plan, rank).rows
    changed = with_column(rows, "slope", (run, 0, 1), rows.slope[run, 0, 1] - 1)
    return with_mask(plan, rank, rows=changed)


@fault(1, "have no row ranges", numerical=True)
def row_ranges_of_a_block_missing(plan: Plan) -> Plan:
    rows = mask_of(plan, 2).rows
    kept = rows.block != rows.block[0]
    columns = (rows.block, rows.start, rows.base, rows.slope)
    return with_mask(plan, 2, rows=RowRuns(*(frozen(column[kept]) for column in columns)))


@fault(3, "never computed", numerical=True)
def division_never_computed(plan: Plan) -> Plan:
    steps = steps_of(plan, 0, FORWARD)
    return with_steps(plan, 0, FORWARD, [s for s in steps if s != (Op.COMPUTE, 0)])


@fault(3, "an instruction comes twice", numerical=True)
def division_computed_twice(plan: Plan) -> Plan:
    steps = steps_of(plan, 0, FORWARD)
    return with_steps(plan, 0, FORWARD, [steps[i] for i in doubled_step(steps, (Op.COMPUTE, 0))])


@fault(1, "owner) differs", numerical=True)
def owner_changed_on_one_rank(plan: Plan) -> Plan:
    blocks = plan.parts[2].blocks
    changed = with_column(blocks, "owner", 0, (blocks.owner[0] + 1) % plan.num_ranks)
    return with_part(plan, 2, blocks=changed)


@fault(1, "partition", numerical=True)
def block_table_leaves_a_gap(plan: Plan) -> Plan:
    for rank in ranks_of(plan):
        blocks = with_column(plan.parts[rank].blocks, "end", 0, 3)
        plan = with_part(plan, rank, blocks=blocks)
    return plan


@fault(1, "partition", numerical=True)
def block_table_reordered(plan: Plan) -> Plan:
    for rank in ranks_of(plan):
        blocks = plan.parts[rank].blocks
        columns = {c: getattr(blocks, c).copy() for c in ("start", "end")}
        for column in columns.values():
            column[[0, 1]] = column[[1, 0]]
        plan = with_part(plan, rank, blocks=replace(blocks, **columns))
    return plan


@fault(1, "backward program", numerical=True)
def backward_missing_on_one_rank(plan: Plan) -> Plan:
    return with_mask(plan, 1, backward=None)

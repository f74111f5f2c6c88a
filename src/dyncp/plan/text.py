"""What a plan does, as text: `explain` in a few lines, `draw` as a map."""

from collections.abc import Iterator, Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import Direction, bytes_per_token
from dyncp.placement import Balance
from dyncp.plan.buffers import MemoryUse, measure_memory
from dyncp.plan.format import Messages, Program, RankPlan


def explain_parts(parts: Sequence[RankPlan], reasons: str = "") -> str:
    """Solver, sizes, traffic, balance and workspaces of a plan; `reasons` come last.

    Bytes and tiles are those of one attention call, by mask where a plan has several."""
    first = parts[0]
    lines = [
        f"solver {first.solver} on {len(parts)} ranks: {int(first.lengths.sum()):,} tokens of "
        f"{len(first.lengths):,} sequences in {len(first.blocks):,} blocks, "
        f"{len(first.head_groups)} head group{'s' if len(first.head_groups) > 1 else ''}"
    ]
    for name in first.masks:
        tiles = sum(len(part.masks[name].tiles) for part in parts)
        lines.append(f"mask {name!r}: {tiles:,} tiles")
        lines += _traffic_lines(parts, name)
    lines += _balance_lines(first.balance)
    lines.append(_memory_line(measure_memory(parts), first))
    if reasons:
        lines += ["chosen because:", *(f"  {line}" for line in reasons.splitlines())]
    return "\n".join(lines)


def _traffic_lines(parts: Sequence[RankPlan], name: str) -> Iterator[str]:
    for direction in Direction:
        mask = parts[0].masks[name]
        if direction is Direction.BACKWARD and mask.backward is None:
            yield "  backward: none, planned for evaluation"
            continue
        programs = [part.masks[name].program(direction) for part in parts]
        sent, received = (
            np.asarray([_bytes(part, getattr(p, side)) for part, p in _pairs(parts, programs)])
            for side in ("sends", "receives")
        )
        divisions = max(int(p.tile_division.max(initial=-1)) + 1 for p in programs)
        yield (
            f"  {direction.name.lower()}: {divisions} divisions, {_phases(programs)} phases, "
            f"{_megabytes(sent.sum())} moved; a rank sends up to {_megabytes(sent.max())} "
            f"(rank {sent.argmax()}) and receives up to {_megabytes(received.max())} "
            f"(rank {received.argmax()})"
        )


def _pairs(
    parts: Sequence[RankPlan], programs: Sequence[Program]
) -> Iterator[tuple[RankPlan, Program]]:
    return zip(parts, programs, strict=True)


def _bytes(part: RankPlan, messages: Messages) -> int:
    size = bytes_per_token(part.shape, part.head_groups)[messages.kind, messages.head_group]
    return int((size * part.blocks.tokens[messages.block]).sum())


def _phases(programs: Sequence[Program]) -> int:
    used: Int64 = np.unique(np.concatenate([program.sends.phase for program in programs]))
    return len(used)


def _balance_lines(balance: Balance) -> Iterator[str]:
    measured = (
        ("compute", balance.compute_max_over_mean, balance.limits.compute_tolerance),
        ("tokens", balance.tokens_max_over_mean, balance.limits.token_tolerance),
    )
    limits = (
        f"{what} max/mean {value:.3f} "
        + ("(no limit)" if tolerance is None else f"(limit {1 + tolerance:.3f})")
        for what, value, tolerance in measured
    )
    yield f"balance: {', '.join(limits)}"
    if balance.reason:
        yield f"  {balance.reason}"


def _memory_line(memory: MemoryUse, part: RankPlan) -> str:
    assumed = "" if part.shape.exact else ", for the head counts that the plan assumes"
    sides = []
    for name, per_rank in (("forward", memory.forward), ("backward", memory.backward)):
        sides.append(f"{_megabytes(per_rank.max())} {name} (rank {per_rank.argmax()})")
    return f"workspace: up to {' and '.join(sides)}{assumed}"


def _megabytes(num_bytes: int | np.integer) -> str:
    return f"{int(num_bytes) / 1e6:,.1f} MB"


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def draw_parts(parts: Sequence[RankPlan], name: str, width: int, height: int) -> str:
    """A map of the batch's tokens × tokens, at most `width` × `height` cells.

    The letter of a cell is the rank that computes the tile at its middle (of head group 0); `·` is
    a pair of blocks that is not computed. The first column is the rank that owns the rows.

        A|A···       two causal sequences of two blocks; rank B owns the second block of the
        B|AB··       first one, but its tile with the first block is computed on rank A
        B|··B·
        B|··BB
    """
    q_block, k_block = (_middle_blocks(parts[0], cells) for cells in (height, width))
    computes = _tile_ranks(parts, name)[np.ix_(q_block, k_block)]
    owners = parts[0].blocks.owner[q_block]
    rows = [
        f"{_letter(int(owner))}|" + "".join(_letter(int(rank)) for rank in row)
        for owner, row in zip(owners, computes, strict=True)
    ]
    return "\n".join(rows)


def _middle_blocks(part: RankPlan, cells: int) -> Int64:
    """The block at the middle of each of `cells` equal pieces of the batch."""
    tokens = int(part.lengths.sum())
    cells = min(cells, tokens)
    middle = (np.arange(cells) * 2 + 1) * tokens // (2 * cells)
    return np.searchsorted(part.block_coordinate, middle, side="right") - 1


def _tile_ranks(parts: Sequence[RankPlan], name: str) -> Int64:
    """Rank of each (query block, key block) of head group 0; -1 where there is no tile."""
    num_blocks = len(parts[0].blocks)
    ranks = np.full((num_blocks, num_blocks), -1, np.int64)
    for part in parts:
        tiles = part.mask_plan(name).tiles
        chosen = tiles.head_group == 0
        ranks[tiles.q_block[chosen], tiles.k_block[chosen]] = part.rank
    return ranks


def _letter(rank: int) -> str:
    return "·" if rank < 0 else _LETTERS[rank % len(_LETTERS)]

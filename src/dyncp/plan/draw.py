"""Draws a plan as text: who owns the rows, and who computes what."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.plan.rank_plan import RankPlan

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

"""Text drawings of masks, from exact pair counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dyncp.masks.pairs import count_tile_pairs

if TYPE_CHECKING:
    from dyncp.masks.mask import Mask

SHADES = "·░▒█"  # no pair, some, half of them or more, all


def draw_mask(mask: Mask, width: int = 64) -> str:
    """A line of numbers, then one line per query block: queries go down, keys to the right.

    A cell is █ if all its pairs are allowed, ▒ from half of them on, ░ below, · if none is.

        sliding_window: 4 tokens, 7 pairs, density 43.8 %
        █···
        ██··
        ·██·
        ··██
    """
    if width < 1:
        raise ValueError(f"width is {width}; allowed is at least 1 cell")
    block_size = -(-mask.length // width)
    pairs = count_tile_pairs(mask, block_size)
    edges = np.minimum(np.arange(len(pairs) + 1) * block_size, mask.length)
    possible = np.diff(edges)[:, None] * np.diff(edges)
    shades = (pairs > 0) * 1 + (2 * pairs >= possible) + (pairs == possible)
    rows = ["".join(SHADES[shade] for shade in row) for row in shades]
    return "\n".join([_caption(mask), *rows])


def _caption(mask: Mask) -> str:
    density = 100 * mask.num_pairs / mask.length**2
    numbers = f"{mask.length:,} tokens, {mask.num_pairs:,} pairs, density {density:.3g} %"
    return f"{mask.name}: {numbers}"

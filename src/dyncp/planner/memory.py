"""How much memory planning needs, estimated before anything is allocated."""

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks import Batch
from dyncp.checks import check_memory

# Peaks of whole plans were 140 to 280 bytes per tile (few transfers), and 450 to 570 per transfer.
TILE_BYTES, TRANSFER_BYTES = 250, 450
# Smaller plans are not estimated: at most 2 GB.
LARGE = 2**22


def check_plan_memory(batch: Batch, block_sizes: Int64, head_groups: int, ranks: int) -> None:
    """Raises MemoryError if a plan with these blocks would need more memory than is available."""
    lengths = np.asarray(batch.lengths, np.int64)
    blocks = -(-lengths // np.minimum(block_sizes, lengths))
    masks = len(batch.masks)
    most = float((blocks.astype(np.float64) ** 2).sum()) * head_groups * masks
    if most <= LARGE and float(blocks.sum()) * ranks * masks <= LARGE:
        return
    tiles = count_tiles(batch, block_sizes, blocks) * head_groups
    check_memory(
        f"a plan of {batch.num_tokens:,} tokens in {int(blocks.sum()):,} blocks with about "
        f"{tiles:,.0f} tiles for {ranks:,} ranks",
        plan_bytes(tiles, int(blocks.sum()) * head_groups * masks, ranks),
        "use larger blocks (block_size), fewer or shorter sequences, fewer head groups or fewer "
        "ranks",
    )


def plan_bytes(tiles: float, blocks: int, ranks: int) -> float:
    """About the peak memory of planning. A block is sent to other ranks, at most to those that have
    a tile with it."""
    transfers = min(tiles, float(blocks) * (ranks - 1))
    return TILE_BYTES * tiles + TRANSFER_BYTES * transfers


def count_tiles(batch: Batch, block_sizes: Int64, blocks: Int64) -> float:
    """About how many tiles all masks together have: as many as their pairs fill, and those that the
    borders of ranges cross, in every row of blocks."""
    tiles = 0.0
    for masks in batch.masks.values():
        for mask, size, count in zip(masks, block_sizes.tolist(), blocks.tolist(), strict=True):
            crossed = count * (mask.ranges.shape[1] + 0.5)
            tiles += min(mask.num_pairs / size**2 + crossed, float(count) ** 2)
    return tiles

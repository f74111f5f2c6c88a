"""Second stage: a batch becomes token blocks and tiles, joined in a hypergraph."""

from dyncp.blocks.batch import DEFAULT_MASK, Batch
from dyncp.blocks.graph import (
    BLOCK_MULTIPLE,
    BlockGraph,
    Tiles,
    TokenBlock,
    TokenBlocks,
    build_blocks,
    build_graph,
    choose_block_sizes,
    choose_sizes_by_work,
)
from dyncp.blocks.shape import (
    DTYPE_NAMES,
    ITEM_BYTES,
    Q_INPUT,
    Q_RESULT,
    AttentionShape,
    Direction,
    HeadGroup,
    Payload,
    bytes_per_token,
    dtype_name,
)

__all__ = [
    "BLOCK_MULTIPLE",
    "DEFAULT_MASK",
    "DTYPE_NAMES",
    "ITEM_BYTES",
    "Q_INPUT",
    "Q_RESULT",
    "AttentionShape",
    "Batch",
    "BlockGraph",
    "Direction",
    "HeadGroup",
    "Payload",
    "Tiles",
    "TokenBlock",
    "TokenBlocks",
    "build_blocks",
    "build_graph",
    "bytes_per_token",
    "choose_block_sizes",
    "choose_sizes_by_work",
    "dtype_name",
]

"""Second stage: cuts a batch into token blocks and tiles, which form a hypergraph."""

from dyncp.blocks.batch import DEFAULT_MASK, Batch
from dyncp.blocks.graph import (
    BLOCK_MULTIPLE,
    DTYPE_NAMES,
    IS_INPUT,
    ITEM_BYTES,
    K_KINDS,
    OF_KEYS,
    Q_KINDS,
    AttentionShape,
    BlockGraph,
    Direction,
    HeadGroup,
    Payload,
    Tiles,
    TokenBlocks,
    build_blocks,
    build_graph,
    bytes_per_token,
    checked_dtype,
    choose_block_sizes,
    choose_sizes_by_work,
    dtype_name,
)

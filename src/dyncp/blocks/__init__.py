"""Second stage: a batch becomes token blocks and tiles, joined in a hypergraph."""

from dyncp.blocks.batch import DEFAULT_MASK as DEFAULT_MASK
from dyncp.blocks.batch import Batch as Batch
from dyncp.blocks.graph import BLOCK_MULTIPLE as BLOCK_MULTIPLE
from dyncp.blocks.graph import DTYPE_NAMES as DTYPE_NAMES
from dyncp.blocks.graph import IS_INPUT as IS_INPUT
from dyncp.blocks.graph import ITEM_BYTES as ITEM_BYTES
from dyncp.blocks.graph import K_KINDS as K_KINDS
from dyncp.blocks.graph import OF_KEYS as OF_KEYS
from dyncp.blocks.graph import Q_KINDS as Q_KINDS
from dyncp.blocks.graph import AttentionShape as AttentionShape
from dyncp.blocks.graph import BlockGraph as BlockGraph
from dyncp.blocks.graph import Direction as Direction
from dyncp.blocks.graph import HeadGroup as HeadGroup
from dyncp.blocks.graph import Payload as Payload
from dyncp.blocks.graph import Tiles as Tiles
from dyncp.blocks.graph import TokenBlocks as TokenBlocks
from dyncp.blocks.graph import build_blocks as build_blocks
from dyncp.blocks.graph import build_graph as build_graph
from dyncp.blocks.graph import bytes_per_token as bytes_per_token
from dyncp.blocks.graph import choose_block_sizes as choose_block_sizes
from dyncp.blocks.graph import choose_sizes_by_work as choose_sizes_by_work
from dyncp.blocks.graph import dtype_name as dtype_name

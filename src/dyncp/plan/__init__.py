"""Fifth stage: per-rank plans, their binary form, and the way back from ranks to samples."""

from dyncp.blocks import (
    DEFAULT_MASK,
    DTYPE_NAMES,
    ITEM_BYTES,
    AttentionShape,
    Direction,
    HeadGroup,
    Payload,
)
from dyncp.masks import Mask
from dyncp.plan.codec import PlanDecodeError, decode_part, encode_part
from dyncp.plan.contributions import Contributions, KernelStyle, find_contributions, sends_wide
from dyncp.plan.layout import Layout
from dyncp.plan.lower import lower
from dyncp.plan.memory import Memory, measure_memory
from dyncp.plan.places import call_rows, places_of
from dyncp.plan.plan import Plan, batch_order, gather_samples
from dyncp.plan.plan_file import PlanFileError, load_plan, save_plan
from dyncp.plan.rank_plan import (
    INPUT_SPACE,
    RESULT_SPACE,
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    RankTiles,
    Slots,
    Space,
)
from dyncp.plan.rooms import Residence, Room, has_messages, list_rooms
from dyncp.plan.rows import RowRuns
from dyncp.plan.sample import causal_rows, sample_plan, sample_ring

__all__ = [
    "DEFAULT_MASK",
    "DTYPE_NAMES",
    "INPUT_SPACE",
    "ITEM_BYTES",
    "RESULT_SPACE",
    "AttentionShape",
    "Contributions",
    "Direction",
    "HeadGroup",
    "KernelStyle",
    "Layout",
    "Mask",
    "MaskPlan",
    "Memory",
    "Messages",
    "Op",
    "OwnedBlocks",
    "Payload",
    "Plan",
    "PlanDecodeError",
    "PlanFileError",
    "Program",
    "RankPlan",
    "RankTiles",
    "Residence",
    "Room",
    "RowRuns",
    "Slots",
    "Space",
    "batch_order",
    "call_rows",
    "causal_rows",
    "decode_part",
    "encode_part",
    "find_contributions",
    "gather_samples",
    "has_messages",
    "list_rooms",
    "load_plan",
    "lower",
    "measure_memory",
    "places_of",
    "sample_plan",
    "sample_ring",
    "save_plan",
    "sends_wide",
]

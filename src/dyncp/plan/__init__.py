"""Fifth stage: per-rank plans, their binary form, and the way back from ranks to samples."""

from dyncp.blocks import (
    DEFAULT_MASK,
    DTYPE_NAMES,
    IS_INPUT,
    ITEM_BYTES,
    AttentionShape,
    Direction,
    HeadGroup,
    Payload,
)
from dyncp.masks import Mask
from dyncp.plan.assemble import assemble_plan, stretches_of
from dyncp.plan.buffers import (
    Buffer,
    MemoryUse,
    Staging,
    has_messages,
    list_buffers,
    measure_memory,
)
from dyncp.plan.check import PartError, check_structure
from dyncp.plan.codec import PlanDecodeError, decode_part, encode_part
from dyncp.plan.contiguous import ContiguousOrder, whole_documents, with_halo
from dyncp.plan.format import (
    INPUT_SPACE,
    RESULT_SPACE,
    Layout,
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    RankTiles,
    Slots,
    Space,
    Stretches,
)
from dyncp.plan.plan import Plan, batch_order, gather_samples
from dyncp.plan.plan_file import PlanFileError, load_plan, save_plan
from dyncp.plan.row_ranges import RowRuns
from dyncp.plan.sample_plans import causal_rows, sample_plan, sample_ring
from dyncp.plan.workspace import (
    Contributions,
    KernelStyle,
    call_rows,
    find_contributions,
    places_of,
    sends_wide,
)

__all__ = [
    "DEFAULT_MASK",
    "DTYPE_NAMES",
    "INPUT_SPACE",
    "IS_INPUT",
    "ITEM_BYTES",
    "RESULT_SPACE",
    "AttentionShape",
    "Buffer",
    "ContiguousOrder",
    "Contributions",
    "Direction",
    "HeadGroup",
    "KernelStyle",
    "Layout",
    "Mask",
    "MaskPlan",
    "MemoryUse",
    "Messages",
    "Op",
    "OwnedBlocks",
    "PartError",
    "Payload",
    "Plan",
    "PlanDecodeError",
    "PlanFileError",
    "Program",
    "RankPlan",
    "RankTiles",
    "RowRuns",
    "Slots",
    "Space",
    "Staging",
    "Stretches",
    "assemble_plan",
    "batch_order",
    "call_rows",
    "causal_rows",
    "check_structure",
    "decode_part",
    "encode_part",
    "find_contributions",
    "gather_samples",
    "has_messages",
    "list_buffers",
    "load_plan",
    "measure_memory",
    "places_of",
    "sample_plan",
    "sample_ring",
    "save_plan",
    "sends_wide",
    "stretches_of",
    "whole_documents",
    "with_halo",
]

"""Fifth stage: per-rank plans, their binary form, and gathering rows of ranks into samples.

It also exports names of earlier stages (`AttentionShape`, `Direction`, ...) for kernels and
executor, which import no stage before this one.
"""

from dyncp.blocks import DEFAULT_MASK, DTYPE_NAMES, IS_INPUT, AttentionShape, Direction, Payload
from dyncp.masks import Mask, causal
from dyncp.plan.assemble import assemble_plan, sample_plan, sample_ring, stretches_of
from dyncp.plan.buffers import Buffer, KernelStyle, MemoryUse, StyledProgram, measure_memory
from dyncp.plan.check import PartError
from dyncp.plan.codec import PlanDecodeError, decode_part, encode_part
from dyncp.plan.contiguous import ContiguousOrder, whole_documents, with_halo
from dyncp.plan.format import (
    AgreedPlan,
    Layout,
    MaskPlan,
    Messages,
    Op,
    OwnedBlocks,
    Program,
    RankPlan,
    RowRuns,
    Slots,
    Space,
    Stretches,
)
from dyncp.plan.plan import Plan, batch_order, gather_samples, load_plan, save_plan

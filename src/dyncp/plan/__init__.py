"""Fifth stage: per-rank plans, their binary form, and the way back from ranks to samples.

Later stages that know plans and nothing before them (kernels, executor) find the words of batches
and shapes here, too.
"""

from dyncp.blocks import DEFAULT_MASK as DEFAULT_MASK
from dyncp.blocks import DTYPE_NAMES as DTYPE_NAMES
from dyncp.blocks import IS_INPUT as IS_INPUT
from dyncp.blocks import AttentionShape as AttentionShape
from dyncp.blocks import Direction as Direction
from dyncp.blocks import Payload as Payload
from dyncp.masks import Mask as Mask
from dyncp.masks import causal as causal
from dyncp.plan.assemble import assemble_plan as assemble_plan
from dyncp.plan.assemble import sample_plan as sample_plan
from dyncp.plan.assemble import sample_ring as sample_ring
from dyncp.plan.assemble import stretches_of as stretches_of
from dyncp.plan.buffers import Buffer as Buffer
from dyncp.plan.buffers import Contributions as Contributions
from dyncp.plan.buffers import KernelStyle as KernelStyle
from dyncp.plan.buffers import MemoryUse as MemoryUse
from dyncp.plan.buffers import Staging as Staging
from dyncp.plan.buffers import call_rows as call_rows
from dyncp.plan.buffers import find_contributions as find_contributions
from dyncp.plan.buffers import has_messages as has_messages
from dyncp.plan.buffers import list_buffers as list_buffers
from dyncp.plan.buffers import measure_memory as measure_memory
from dyncp.plan.buffers import places_of as places_of
from dyncp.plan.check import PartError as PartError
from dyncp.plan.codec import PlanDecodeError as PlanDecodeError
from dyncp.plan.codec import PlanFileError as PlanFileError
from dyncp.plan.codec import decode_part as decode_part
from dyncp.plan.codec import encode_part as encode_part
from dyncp.plan.contiguous import ContiguousOrder as ContiguousOrder
from dyncp.plan.contiguous import whole_documents as whole_documents
from dyncp.plan.contiguous import with_halo as with_halo
from dyncp.plan.format import Layout as Layout
from dyncp.plan.format import MaskPlan as MaskPlan
from dyncp.plan.format import Messages as Messages
from dyncp.plan.format import Op as Op
from dyncp.plan.format import OwnedBlocks as OwnedBlocks
from dyncp.plan.format import Program as Program
from dyncp.plan.format import RankPlan as RankPlan
from dyncp.plan.format import RowRuns as RowRuns
from dyncp.plan.format import Slots as Slots
from dyncp.plan.format import Space as Space
from dyncp.plan.format import Stretches as Stretches
from dyncp.plan.plan import Plan as Plan
from dyncp.plan.plan import batch_order as batch_order
from dyncp.plan.plan import gather_samples as gather_samples
from dyncp.plan.plan import load_plan as load_plan
from dyncp.plan.plan import save_plan as save_plan

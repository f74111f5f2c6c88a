"""Memory: the bytes that a plan's attention calls take, known before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dyncp.arrays import Int64, frozen
from dyncp.blocks import AttentionShape, Direction
from dyncp.plan.contributions import KernelStyle
from dyncp.plan.rank_plan import Op, RankPlan
from dyncp.plan.rooms import has_messages, list_rooms

GRAPH_BYTES = 120_000  # 113 kB each on one H200: python -m benchmarks.gpu_memory graphs


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of every rank in one attention call, int64[ranks] per direction.

    Copies of inputs that get room for received blocks, sums in a wider dtype, row sums, partial
    results and message buffers count; q, kv, out, log-sum-exps and gradients, which the caller
    gives and gets, do not. With several masks, each rank's largest call counts. `backward` is 0 in
    plans for evaluation. `graphs` is what the driver takes, at most, for the CUDA graphs of a
    prepared plan while it is alive, where they are used: one for every communication point.
    """

    forward: Int64
    backward: Int64
    graphs: Int64

    @property
    def per_rank(self) -> Int64:
        """The larger direction of every rank, with its graphs."""
        return np.maximum(self.forward, self.backward) + self.graphs

    @property
    def peak(self) -> int:
        """Most bytes on any rank in either direction."""
        return int(self.per_rank.max())


def measure_memory(
    parts: Sequence[RankPlan],
    shape: AttentionShape | None = None,
    style: KernelStyle | None = None,
) -> Memory:
    """Memory of these ranks' parts; `shape` is that of the call (default: the plan's own), `style`
    what the kernel needs (default: one that merges inside)."""
    style = KernelStyle() if style is None else style
    both = [
        [_rank_bytes(part, direction, shape or part.shape, style) for part in parts]
        for direction in Direction
    ]
    graphs = [_graph_bytes(part, style) for part in parts]
    return Memory(*(frozen(column, np.int64) for column in (*both, graphs)))


def _graph_bytes(part: RankPlan, style: KernelStyle) -> int:
    if not style.fixed:
        return 0
    programs = [
        program
        for mask in part.masks.values()
        for program in (mask.forward, mask.backward)
        if program is not None and has_messages(program)
    ]
    points = [int((program.instructions[:, 0] != Op.COMPUTE).sum()) for program in programs]
    return GRAPH_BYTES * (sum(points) + len(points))


def _rank_bytes(
    part: RankPlan, direction: Direction, shape: AttentionShape, style: KernelStyle
) -> int:
    needed = [
        sum(room.num_bytes for room in list_rooms(part, mask, direction, shape, style))
        for mask in part.masks.values()
        if direction is Direction.FORWARD or mask.backward is not None
    ]
    return max(needed, default=0)

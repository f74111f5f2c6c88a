"""CostModel: seconds of tiles, kernel calls and copies, as pure functions of arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Float64, Int64
from dyncp.blocks import AttentionShape, BlockGraph, Direction, HeadGroup
from dyncp.cost.implementation import Implementation
from dyncp.cost.profile import Profile

# Forward computes q·kᵀ and p·v. Backward computes q·kᵀ again, dO·vᵀ, pᵀ·dO, dS·k and dSᵀ·q.
FORWARD_PRODUCTS = 2
BACKWARD_FLOPS = 2.5
Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Prices the attention of `shape` with the rates of `profile`. `graphs` says whether plans are
    replayed as CUDA graphs, which removes most of the host time, and `deterministic` whether the
    executor's kernels are. With `implementation`, plans of static methods are priced as their own
    code runs, not as dyncp's executor."""

    profile: Profile
    shape: AttentionShape
    graphs: bool = True
    deterministic: bool = False
    implementation: Implementation | None = None

    def kernel_area(self, pairs: Numbers, rows: Numbers, keys: Numbers) -> Float64:
        """Pairs that the kernel computes, including masked pairs in partial kernel tiles.

        Keys are padded to whole kernel tiles of side t; the last rows of a block share their kernel
        tiles with the next block. Unless all pairs are allowed, every row ends inside a kernel
        tile, which wastes half a tile on average:

            area = min(rows × K, pairs × K / keys + rows × t / 2),  K = keys rounded up to t

        A causal 1024 × 1024 block with t = 128 has 524,800 pairs and an area of 590,336; the kernel
        touches 36 of its 64 tiles, 589,824.
        """
        side = self.profile.kernel_tile
        keys = np.asarray(keys, np.float64)
        whole = np.ceil(keys / side) * side
        area: Float64 = np.minimum(rows * whole, pairs * (whole / keys) + rows * (side / 2))
        return area

    def edge_area(self, pairs: Numbers, rows: Numbers, keys: Numbers) -> Float64:
        """The part of `kernel_area` in partial kernel tiles.

        An edge of the mask makes one kernel tile per row of kernel tiles partial, and so do keys
        whose number is not a multiple of t. If the number of rows is not a multiple of t, all
        kernel tiles of the last row are partial. A causal 1024 × 1024 block with t = 128 has 8
        partial kernel tiles, an area of 131,072.
        """
        side = self.profile.kernel_tile
        area = self.kernel_area(pairs, rows, keys)
        whole = np.ceil(np.asarray(keys, np.float64) / side) * side
        across = np.where(pairs < rows * whole, rows, 0)
        along = np.where(rows % side > 0, area / np.maximum(rows, 1), 0)
        edge: Float64 = np.minimum(area, side * (across + along))
        return edge

    def flops(self, area: Numbers, heads: Numbers | int, direction: Direction) -> Float64:
        """4 × area × head_dim per q head forward, 2.5 times that backward."""
        forward = (
            2.0 * FORWARD_PRODUCTS * self.shape.head_dim * np.asarray(area, np.float64) * heads
        )
        return forward * BACKWARD_FLOPS if direction is Direction.BACKWARD else forward

    def tile_seconds(
        self,
        pairs: Numbers,
        rows: Numbers,
        keys: Numbers,
        heads: Numbers | int,
        direction: Direction,
    ) -> Float64:
        """Seconds of tiles with `pairs` allowed pairs out of rows × keys, for `heads` q heads."""
        area = self.kernel_area(pairs, rows, keys)
        more = self.edge_factor(direction) - 1
        if more:
            area = area + more * self.edge_area(pairs, rows, keys)
        return self.flops(area, heads, direction) / self.attention_rate(direction)

    def work_seconds(
        self, area: Numbers, edge: Numbers, rows: Numbers, longest: Numbers, direction: Direction
    ) -> Float64:
        """Seconds of kernel calls without call overhead; `CallWork` describes the arguments.

        `lanes` rows of kernel tiles run at once, and each has a fixed cost, given in keys. At the
        end of a call, lanes are idle for half a row on average. No call is shorter than its longest
        row."""
        lanes, side, row = self.profile.lanes, self.profile.kernel_tile, self.row_keys(direction)
        work = area + (self.edge_factor(direction) - 1) * edge + row * side * rows
        spread = work * (1 + lanes / (2 * np.maximum(rows, 1)))
        alone = lanes * side * (longest + row)
        return self.flops(np.maximum(spread, alone), 1, direction) / self.attention_rate(direction)

    def row_seconds(self, rows: float, heads: int, direction: Direction) -> float:
        """Extra seconds of a call for `rows` query rows (backward: key rows)."""
        area = np.asarray(self.row_keys(direction) * rows, np.float64)
        return float(self.flops(area, heads, direction) / self.attention_rate(direction))

    def division_seconds(self, rows: float, direction: Direction) -> float:
        """Approximate seconds that one more division costs a rank with `rows` rows: a kernel call
        that touches the rows again, a launch that unpacks, the gap before the call and, forward,
        one more contribution to merge."""
        profile, moved = self.profile, 0.0
        if self.knows_launches:
            width = RowBytes.of(self.shape, self.shape.head_groups(1))
            forward = direction is Direction.FORWARD
            read = float((width.q + width.per_head).sum()) if forward else 0.0
            moved = 2 * profile.launch_seconds + rows * read / (2 * profile.copy)
        again = self.row_seconds(rows, self.shape.q_heads, direction)
        return profile.call_seconds + again + moved

    def least_row_seconds(self, direction: Direction) -> float:
        """Lower bound on the seconds of row work per local row, without launches. Backward reads
        out and dout for row sums, clears accumulators, and rounds them to dq, dk and dv. Forward is
        0, since kernels may write outputs directly."""
        if direction is Direction.FORWARD or not self.knows_launches:
            return 0.0
        width = RowBytes.of(self.shape, self.shape.head_groups(1))
        moved = 3 * width.q + width.kv + width.per_head + 2 * (width.q_wide + width.kv_wide)
        return float(moved.sum()) / (2 * self.profile.copy)

    @property
    def knows_launches(self) -> bool:
        """Whether the profile prices row work and launches."""
        return self.profile.launch_seconds > 0

    @property
    def host_seconds(self) -> float:
        """Seconds that the host takes to issue one instruction."""
        return self.profile.host_seconds if self.graphs else self.profile.host_seconds_eager

    def knows_rows(self, direction: Direction) -> bool:
        """Whether the profile prices rows of kernel tiles."""
        return self.profile.lanes > 0 or self.row_keys(direction) > 0

    def row_keys(self, direction: Direction) -> float:
        """Fixed cost of a row of kernel tiles, as a number of keys."""
        profile = self.profile
        if direction is Direction.FORWARD:
            return profile.row_forward
        return profile.deterministic_row if self._own_backward else profile.row_backward

    def edge_factor(self, direction: Direction) -> float:
        """Seconds of a partial kernel tile over seconds of a full one."""
        profile = self.profile
        if direction is Direction.FORWARD:
            return profile.edge_forward
        return profile.deterministic_edge if self._own_backward else profile.edge_backward

    def attention_rate(self, direction: Direction) -> float:
        profile = self.profile
        if direction is Direction.FORWARD:
            return profile.attention_forward
        return profile.deterministic_backward if self._own_backward else profile.attention_backward

    @property
    def _own_backward(self) -> bool:
        """Whether backward is another kernel's, since it must be deterministic."""
        return self.deterministic and self.profile.deterministic_backward > 0

    def heads_of(self, groups: Sequence[HeadGroup]) -> Int64:
        """Query heads of each head group."""
        per_kv = self.shape.q_heads_per_kv_head
        return np.asarray([group.num_kv_heads * per_kv for group in groups], np.int64)

    def graph_tile_seconds(self, graph: BlockGraph, name: str, direction: Direction) -> Float64:
        """Seconds of every tile of mask `name`; computed once per graph."""

        def find() -> Float64:
            tiles, tokens = graph.tiles[name], graph.blocks.tokens
            heads = self.heads_of(self.groups_for(graph.shape, graph.head_groups))
            sides = tokens[tiles.q_block], tokens[tiles.k_block]
            return self.tile_seconds(tiles.pairs, *sides, heads[tiles.head_group], direction)

        return graph.remember(("tile seconds", self, name, direction), find)

    def groups_for(
        self, planned: AttentionShape, groups: tuple[HeadGroup, ...]
    ) -> tuple[HeadGroup, ...]:
        """Head groups of a plan for shape `planned`, if it runs with this cost model's shape."""
        if not planned.exact:
            return self.shape.head_groups(1)
        if self.shape.kv_heads != planned.kv_heads:
            raise ValueError(
                f"the cost model has kv_heads={self.shape.kv_heads}, but the plan was made for "
                f"kv_heads={planned.kv_heads}; give CostModel the shape of the plan"
            )
        return groups


class RowBytes(NamedTuple):
    """Bytes of one token's row, int64[head groups] each: queries, keys and values, their
    accumulators (`wide`), and log-sum-exps or row sums (`per_head`)."""

    q: Int64
    kv: Int64
    q_wide: Int64
    kv_wide: Int64
    per_head: Int64

    @staticmethod
    def of(shape: AttentionShape, groups: Sequence[HeadGroup]) -> "RowBytes":
        kv_heads = np.asarray([group.num_kv_heads for group in groups], np.int64)
        heads = kv_heads * shape.q_heads_per_kv_head
        q, kv = heads * shape.head_dim, 2 * kv_heads * shape.head_dim
        item, wide = shape.item_bytes, shape.accumulator_bytes
        return RowBytes(q * item, kv * item, q * wide, kv * wide, heads * wide)

"""Replaces flash-attn-4's own mask and tile order in kernels over tile lists.

**Mask.** Flash-attn-4 calls a function for every pair of a partial tile, which makes a partial tile
cost as much as several full ones. Here, every row of a thread's accumulator gets one word, computed
from the row's ranges, whose bits say which of the thread's columns are allowed. Forward, rows are
query rows and ranges are of key rows. Backward, flash-attn-4 computes K · Qᵀ, so rows are key rows
and ranges are of query rows.

**Order.** Flash-attn-4 runs all tiles of the first head, then those of the next. A long tile that
starts last then runs alone at the end. Here, all heads of a tile start together, and the tiles that
have the most work under most masks start first: forward the last query tiles, backward the first
key tiles.
"""

from typing import Any

import cutlass
from cutlass import Int32, Uint32, const_expr, cute
from flash_attn.cute.mask import (
    AttentionMask,
    mask_r2p_lambda,
    r2p_bitmask_above,
    r2p_bitmask_below,
    sm90_col_to_r2p_idx,
)
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo
from flash_attn.cute.utils import AuxData
from quack import layout_utils


class RangeMask(AttentionMask):  # type: ignore[misc]
    """Replaces flash-attn-4's mask in kernels over tile lists. Full tiles need no mask, not even
    for the last rows: they never extend past them."""

    @cute.jit
    def apply_mask(
        self,
        acc_S,
        batch_idx,
        head_idx,
        m_block,
        n_block,
        thr_mma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr[Any] = None,
        aux_data: AuxData = AuxData(),
        fastdiv_mods=(None, None),
    ) -> None:
        if const_expr(mask_mod is not None):
            sides = const_expr((self.tile_n, self.tile_m) if self.swap_AB else self.tile)
            scores = layout_utils.reshape_acc_to_mn(acc_S)
            places = layout_utils.reshape_acc_to_mn(
                thr_mma.partition_C(cute.make_identity_tensor(sides))
            )
            tile, other = (n_block, m_block) if const_expr(self.swap_AB) else (m_block, n_block)
            first = other * sides[1] + places[0][1]
            ranges = aux_data.tensors[0]
            for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
                row = tile * sides[0] + places[r, 0][0]
                bits = _bits(ranges, 0, row, first)
                for i in cutlass.range(1, cute.size(ranges.shape[0]) // 2, unroll=1):
                    bits = bits | _bits(ranges, i, row, first)
                mask_r2p_lambda(scores[r, None], lambda _: bits, rank1=True)

    @property
    def tile(self) -> tuple[int, int]:
        return self.tile_m, self.tile_n


@cute.jit
def _bits(ranges, i, row, first):
    """Bits of the thread's columns, which begin at `first`, that are in range `i` of the row."""
    start = sm90_col_to_r2p_idx(max(ranges[2 * i, row] - first, Int32(0)))
    end = sm90_col_to_r2p_idx(max(ranges[2 * i + 1, row] - first, Int32(0)))
    bits: Uint32 = r2p_bitmask_below(end, 0) & r2p_bitmask_above(start, 0)
    return bits


def by_ranges(*_: Any) -> Any:
    """Makes flash-attn-4 compile with a mask. It is never called: `RangeMask` masks instead."""
    raise AssertionError("partial tiles are masked by RangeMask")


# Flash-attn-4 names compiled kernels by this, also on disk. Change it whenever this file's mask or
# order changes.
by_ranges.__cute_hash__ = "dyncp-ranges-1"  # type: ignore[attr-defined]


class _AllHeadsOfATile(SingleTileScheduler):  # type: ignore[misc]
    last_first = False

    @classmethod
    def create(cls, params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
        return cls(params, cute.arch.block_idx(), loc=loc, ip=ip)

    @staticmethod
    def get_grid_shape(params: Any, *, loc: Any = None, ip: Any = None) -> Any:
        return params.num_head, params.num_block, params.num_batch

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        head, tile, batch = self._blk_coord
        if const_expr(self.last_first):
            tile = self.params.num_block - 1 - tile
        return WorkTileInfo((tile, head, batch, Int32(0)), self._is_first_block)

    def __new_from_mlir_values__(self, values: list[Any]) -> Any:
        made = super().__new_from_mlir_values__(values)
        made.__class__ = type(self)
        return made


class FirstTilesFirst(_AllHeadsOfATile):
    pass


class LastTilesFirst(_AllHeadsOfATile):
    last_first = True

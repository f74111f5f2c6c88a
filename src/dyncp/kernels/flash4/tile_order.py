"""The order in which flash-attn-4 takes its tiles in kernels over tile lists.

Its own order is all tiles of the first head, then those of the next; a long tile that starts last
runs on alone. Here all heads of a tile come together, and tiles that meet most come first under
most masks: forward the last query tiles, backward the first key tiles.
"""

from typing import Any

from cutlass import Int32, const_expr, cute
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo


class _AllHeadsOfATile(SingleTileScheduler):
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

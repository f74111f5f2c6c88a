"""The order in which flash-attn-4's forward over tile lists takes its query tiles.

It starts with the first rows. Under most masks the last ones attend most, and a long tile that
starts last runs on alone: one rank's call of 4,096 rows took up to 1.7 times as long as its tiles
do in a large one. Its causal path starts with the last rows; the path over lists can as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("to_underlying_arguments", "get_grid_shape", "create")


@contextmanager
def last_rows_first() -> Iterator[None]:
    """What is compiled inside starts with the last rows."""
    from flash_attn.cute.tile_scheduler import SingleTileLPTScheduler, SingleTileScheduler

    def arguments(args: Any, **options: Any) -> Any:
        args.lpt = True
        return SingleTileLPTScheduler.to_underlying_arguments(args, **options)

    kept = {name: SingleTileScheduler.__dict__[name] for name in NAMES}
    SingleTileScheduler.to_underlying_arguments = staticmethod(arguments)
    SingleTileScheduler.get_grid_shape = staticmethod(SingleTileLPTScheduler.get_grid_shape)
    SingleTileScheduler.create = staticmethod(SingleTileLPTScheduler.create)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(SingleTileScheduler, name, method)

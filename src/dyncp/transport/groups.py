"""Process groups of closed transports, kept for the next one over the same ranks.

Torch names a group by its ranks and by how many groups there are. A group that is opened after
another one was destroyed can get that one's name, and with it the addresses that it left in the
store: ranks then connect to sockets that are closed. So no group is destroyed before the world is.
Those that ended well are used again; those on which a call failed may still hold its messages, and
stay open unused.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Key = tuple[str, tuple[int, ...], timedelta]


@dataclass
class _Kept:
    free: dict[Key, list[Any]] = field(default_factory=lambda: defaultdict(list))
    failed: list[Any] = field(default_factory=list)


_by_world: dict[Any, _Kept] = {}  # of the present world alone: its end is theirs


def open_group(backend: str, ranks: Sequence[int], timeout: timedelta) -> Any:
    """A group of these ranks, which all open it together, in the same order."""
    free = _of_this_world().free[backend, tuple(ranks), timeout]
    if free:
        return free.pop(0)
    return dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )


def close_group(
    group: Any, backend: str, ranks: Sequence[int], timeout: timedelta, *, failed: bool
) -> None:
    """`failed`: messages may still be on their way over it."""
    if not dist.is_initialized():
        return
    kept = _of_this_world()
    if failed:
        kept.failed.append(group)
    else:
        kept.free[backend, tuple(ranks), timeout].append(group)


def _of_this_world() -> _Kept:
    world = dist.group.WORLD
    if world not in _by_world:
        _by_world.clear()
        _by_world[world] = _Kept()
    return _by_world[world]

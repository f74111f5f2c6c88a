"""Arena: the memory of an executor's calls, taken once and used again by every call."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

HEADROOM = 1.25  # of growth after the first, and of memory reserved for samples: batches differ
ALIGNMENT = 256


class Arena:
    """Hands out pieces of one buffer, from its start again after each `reset`.

    Where a piece does not fit, it gets memory of its own, and the next `reset` makes the buffer
    large enough for all. `used` are the bytes handed out since the last `reset`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = 0
        self._allocate(0)
        self._views: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()

    def reset(self, needed: int = 0) -> None:
        """Forgets all pieces; the next ones take up to `needed` bytes, if that is known."""
        needed = max(needed, self.used)
        if needed > self.capacity:
            self._replace(needed if self.capacity == 0 else int(needed * HEADROOM))
        self.used = 0

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffer at least so large."""
        if num_bytes > self.capacity:
            self._replace(num_bytes)

    def _replace(self, size: int) -> None:
        self._views.clear()
        self._allocate(0)  # frees the old buffer before the new one
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self._whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._whole_fp32 = self._whole[: size // 4 * 4].view(torch.float32)
        self.capacity = size

    def take(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], not cleared."""
        return self._piece(self._whole, num_bytes, 1)

    def take_fp32(self, items: int) -> Tensor:
        return self._piece(self._whole_fp32, items, 4)

    def _piece(self, whole: Tensor, items: int, item_bytes: int) -> Tensor:
        first = self.used // item_bytes
        self.used += -(-items * item_bytes // ALIGNMENT) * ALIGNMENT
        if self.used > self.capacity:
            self._views.clear()
            return torch.empty(items, dtype=whole.dtype, device=self.device)
        return whole[first : first + items]

    def kept(self, key: Any) -> Any:
        """What `keep` kept for `key` (views of the first pieces after a `reset`) if the buffer is
        still the same, or None. Its pieces are then taken."""
        views, used = self._views.get(key, (None, 0))
        self.used += used
        return views

    def keep(self, key: Any, views: Any) -> None:
        if self.used <= self.capacity:
            self._views[key] = views, self.used

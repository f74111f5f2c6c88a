"""Arena: the memory of an executor's calls, taken once and used again by every call."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

HEADROOM = 1.25  # of each growth after the first: batches differ, and growing twice is dearer
ALIGNMENT = 256


class Arena:
    """Hands out pieces of one buffer, from its start again after each `reset`.

    Where a piece does not fit, it gets memory of its own, and the next `reset` makes the buffer
    large enough for all. `used` are the bytes handed out since the last `reset`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = 0
        self._whole = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @property
    def capacity(self) -> int:
        return len(self._whole)

    def reset(self, needed: int = 0) -> None:
        """Forgets all pieces; the next ones take up to `needed` bytes, if that is known."""
        needed = max(needed, self.used)
        if needed > self.capacity:
            size = needed if self.capacity == 0 else int(needed * HEADROOM)
            self._views.clear()
            self._whole = self._whole.new_empty(0)  # frees the old buffer before the new one
            self._whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], not cleared."""
        first, num_bytes = self.used, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.used += num_bytes
        if self.used > self.capacity:
            self._views.clear()
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return self._whole[first : self.used]

    def take_fp32(self, items: int) -> Tensor:
        return self.take(4 * items).view(torch.float32)[:items]

    def kept(self, key: Any) -> Any:
        """What `keep` kept for `key` (views of pieces) if the buffer is still the same, or None."""
        return self._views.get(key)

    def keep(self, key: Any, views: Any) -> None:
        if self.used <= self.capacity:
            self._views[key] = views

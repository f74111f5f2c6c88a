"""Arena: the memory of an executor's calls, taken once and used again by every call."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

HEADROOM = 1.25  # of growth after the first, and of memory reserved for samples: batches differ


class Arena:
    """One buffer that every call takes anew. `used` are the bytes of the latest call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used = 0
        self._views: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._allocate(0)

    def take(self, num_bytes: int, needed: int = 0) -> Tensor:
        """uint8[num_bytes], not cleared, until the next call; others will take up to `needed`."""
        self.used, needed = num_bytes, max(num_bytes, needed)
        if needed > self.capacity:
            self._replace(needed if self.capacity == 0 else int(needed * HEADROOM))
        return self._whole[:num_bytes]

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffer at least so large."""
        if num_bytes > self.capacity:
            self._replace(num_bytes)

    def _replace(self, size: int) -> None:
        self._views.clear()
        self._allocate(0)  # frees the old buffer before the new one
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        with torch.inference_mode(False):  # calls in other modes use it, too
            self._whole = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.capacity = size

    def kept(self, key: Any) -> Any:
        """What `keep` kept for `key` (views of the buffer) if the buffer is still the same, or
        None."""
        return self._views.get(key)

    def keep(self, key: Any, views: Any) -> None:
        self._views[key] = views

"""The protocol of all kernels."""

from typing import Any, Protocol

import torch
from torch import Tensor

from dyncp.kernels.call import KernelCall


class Kernel(Protocol):
    """Computes the tiles of a call into partial outputs and log-sum-exps, and their gradients.

    q, dout: [query rows, q heads, dim]; k, v: [key rows, kv heads, dim]; lse, delta: [query rows,
    q heads]. `out`, `lse`, `dq`, `dk`, `dv` are accumulators in fp32 (fp64 for fp64 inputs).
    """

    @property
    def name(self) -> str: ...

    def lower(self, call: KernelCall, device: torch.device) -> Any:
        """Whatever this kernel needs to run the call; made once in `prepare`."""

    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Merges the attention of the call's tiles into `out` and `lse` in place."""

    def attend_backward(
        self,
        lowered: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Adds the tiles' gradients to `grads` (dq, dk, dv) in place. `inputs` are q, k, v; `lse`
        is the final log-sum-exp of the whole row, `delta` the row sum of dO·O."""

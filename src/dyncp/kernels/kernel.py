"""The protocol of all kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dyncp.kernels.call import KernelCall
from dyncp.kernels.index_arrays import IndexArrays


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Rows that contributions are added up in; `Held` says which tensor has a row's sum.

    `final` has q's dtype, `wide` the accumulator dtype (fp32, fp64 for fp64 inputs); where the two
    are equal they are one tensor, and `wide` is None where no row is ever WIDE. `partial` is room
    for one call's output and log-sum-exps, for kernels that round partials, where they get merged.
    """

    final: Tensor  # [rows, heads, dim]
    wide: Tensor | None
    partial: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What a backward call adds to. `own` are the accumulators of a kernel that settles."""

    dq: Sums
    dk: Sums
    dv: Sums
    own: Any = None


class Kernel(Protocol):
    """Computes the tiles of a call into partial outputs and log-sum-exps, and their gradients.

    q, dout: [query rows, q heads, dim]; k, v: [key rows, kv heads, dim]; lse, delta: [query rows,
    q heads] in the accumulator dtype; on GPUs heads come first in memory, each head's rows padded
    to whole kernel tiles.
    """

    @property
    def name(self) -> str: ...

    @property
    def settles(self) -> bool:
        """Whether gradients collect in accumulators of the kernel's own until `settle`; then calls
        of backward contribute nothing to the rows of `Gradients`, and settling does."""

    @property
    def rounds_partials(self) -> bool:
        """Whether a partial output comes rounded to q's dtype, so that the first one of a row may
        as well stay there (NOTHING → FINAL → WIDE)."""

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        """Whatever this kernel needs to run the call; made once in `prepare`. Numbers for the
        device are added to `arrays`, which sends them all at once."""

    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Sums, lse: Tensor
    ) -> None:
        """Merges the attention of the call's tiles into `out` and `lse`, as its states say."""

    def attend_backward(
        self,
        lowered: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        """Adds the tiles' gradients to `grads`, as the call's states say. `inputs` are q, k, v;
        `lse` is the final log-sum-exp of the whole row, `delta` the row sum of dO·O."""


class SettlingKernel(Kernel, Protocol):
    """A kernel that collects gradients in a layout of its own, over all calls of a program."""

    def open_gradients(
        self, calls: list[Any], q: Tensor, k: Tensor, take: Callable[[int], Tensor]
    ) -> Any:
        """Zeroed accumulators for the lowered calls of a program and workspaces like q and k;
        `take` gives room for so many fp32."""

    def settle_queries(self, own: Any, rows: slice, scale: float, dq: Tensor) -> None:
        """Rounds the collected gradients of query rows into `dq` [rows, heads, dim], q's dtype.
        Rows begin at 0 or at a slot, which starts on a kernel-tile border."""

    def settle_keys(self, own: Any, rows: slice, scale: float, dk: Tensor, dv: Tensor) -> None:
        """The same for key rows."""

    def clear_queries(self, own: Any, rows: slice) -> None:
        """Forgets what was collected for query rows: their slot gets another block."""

    def clear_keys(self, own: Any, rows: slice) -> None:
        """The same for key rows."""

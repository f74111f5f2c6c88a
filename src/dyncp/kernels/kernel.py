"""The protocol of all kernels."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dyncp.kernels.call import KernelCall
from dyncp.kernels.index_arrays import IndexArrays


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Rows that contributions are added up in; `Held` says which tensor has a row's sum.

    `final` has q's dtype, `wide` the accumulator dtype (fp32, fp64 for fp64 inputs); where the two
    are equal they are one tensor, and `wide` is None where no row is ever WIDE. A kernel that does
    not merge writes the rows `q_rows` (backward: `k_rows`) of its call, which `final` has.
    """

    final: Tensor  # [rows, heads, dim]
    wide: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What a backward call adds to. Kernels that collect have `panels` in `final`, [heads, rows ×
    dim], of dq, and of dk and dv where heads are grouped; where they are not, dk and dv are those
    of the call."""

    dq: Sums
    dk: Sums
    dv: Sums


class Kernel(Protocol):
    """Computes the tiles of a call into partial outputs and log-sum-exps, and their gradients.

    q, dout: [query rows, q heads, dim]; k, v: [key rows, kv heads, dim]; lse, delta: [query rows,
    q heads] in the accumulator dtype; heads come first in memory, each head's rows padded to whole
    kernel tiles. `scale` is above 0.
    """

    @property
    def name(self) -> str: ...

    @property
    def merges(self) -> bool:
        """Whether forward calls add up what they compute, as the states of rows say; otherwise
        each leaves an output of its own."""

    @property
    def collects(self) -> bool:
        """Whether gradients collect in sums of the kernel's own order, over all calls of a
        program; backward then takes log-sum-exps in base 2."""

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        """Whatever this kernel needs to run the call; made once in `prepare`. Numbers for the
        device are added to `arrays`, which sends them all at once."""

    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Sums, lse: Tensor
    ) -> None:
        """The attention of the call's tiles, into `out` and `lse`."""

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
        """Adds the tiles' gradients to `grads`. `inputs` are q, k, v; `lse` is the final
        log-sum-exp of the whole row, `delta` the row sum of dO·O."""

"""`KernelCall` describes what a kernel computes, `Kernel` is the base class of all kernels, and
`IndexArrays` sends a plan's index arrays to the device."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dyncp.arrays import Bool, Int32, Int64, UInt8
from dyncp.plan import AttentionShape


class RowState(IntEnum):
    """Which tensor holds the sum of a row's contributions, before or after one of them.

    A row with one contribution goes from NOTHING to FINAL: nothing is added up. A row with three
    goes NOTHING → WIDE → WIDE → FINAL: it is added up in the accumulator dtype and rounded to the
    final dtype once. It stays WIDE if results are received for it, because those are added later.
    """

    NOTHING = 0
    FINAL = 1  # the tensor of the final dtype
    WIDE = 2  # the tensor of the accumulator dtype
    UNTOUCHED = 3  # only as `after`: the row gets no contribution from this call


@dataclass(frozen=True, eq=False)
class RowStates:
    """The `RowState` of every row before and after one contribution, uint8[rows]."""

    before: UInt8
    after: UInt8

    @property
    def touched(self) -> Bool:
        touched: Bool = self.after != RowState.UNTOUCHED
        return touched


@dataclass(frozen=True, eq=False)
class KernelCall:
    """The tiles that a kernel computes in one call, as rows of the workspaces.

    A row's coordinate is the offset of its sequence in the batch plus the token's index there;
    unused rows have -1. A query row attends a key if the key's coordinate is in one of the row's
    ranges *and* the pair is in one of the rectangles. Rows outside all rectangles have empty ranges
    and are UNTOUCHED.
    """

    head_group: int
    rectangles: Int64  # [tiles, 4]: query rows [q0, q1) × key rows [k0, k1)
    q_coordinates: Int64  # [query rows]
    k_coordinates: Int64  # [key rows]
    ranges: Int32  # [query rows, R, 2], coordinates
    q_states: RowStates  # for out (forward) or dq (backward)
    k_states: RowStates  # for dk and dv (backward)
    q_rows: slice  # from the first to the last kernel tile with a touched row
    k_rows: slice
    alone: bool = False  # the only call of its head group, on a rank without messages


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """The two tensors that contributions are added up in; `RowState` says which one holds a row's
    sum.

    `final` has q's dtype, `wide` has the accumulator dtype (fp32; fp64 for fp64 inputs). If the two
    dtypes are equal, both are the same tensor. `wide` is None if no row is ever WIDE. For a kernel
    that does not merge, `final` has only the rows `q_rows` (dk and dv: `k_rows`) of its call.
    """

    final: Tensor  # [rows, heads, dim]
    wide: Tensor | None = None


class BackwardInputs(NamedTuple):
    """Inputs of a backward call. `lse` is the log-sum-exp over all keys of a row, not only over
    those of this call; `delta` is the row sum of dO·O."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """The sums that a backward call adds to. For kernels that collect, `final` is in panels:
    [heads, rows × dim], see `row_ops.panels_to_rows`. dk and dv are in panels only if several q
    heads share a kv head; otherwise the call writes its own dk and dv as rows."""

    dq: Sums
    dk: Sums
    dv: Sums


class SequenceRows(NamedTuple):
    """The rows of one whole sequence in a backward call."""

    first: int  # its first local row
    rows: int
    place: int  # its first row in the gradient sums
    padded: int  # its rows there, padded to whole kernel tiles


ALIGNMENT = 16  # bytes, for vector loads


@dataclass(slots=True, eq=False)
class Index:
    """An array for the device. `IndexArrays.send` sets `tensor`."""

    array: npt.NDArray[Any]
    tensor: Tensor = field(init=False)

    def __len__(self) -> int:
        return len(self.array)


class IndexArrays:
    """Collects the index arrays of a plan while it is lowered, and sends them to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._indices: list[Index] = []
        self._on_gpu: tuple[Tensor, torch.cuda.Event] | None = None  # all arrays, and their arrival
        self._users: set[int] = set()  # streams that have waited for the arrays

    def add(self, array: npt.NDArray[Any]) -> Index:
        index = Index(np.ascontiguousarray(array))
        self._indices.append(index)
        return index

    def send(self) -> None:
        """Copies all arrays at once. On a GPU, the copy is from pinned memory, on a stream of its
        own."""
        sizes = [-(-index.array.nbytes // ALIGNMENT) * ALIGNMENT for index in self._indices]
        *starts, total = accumulate(sizes, initial=0)
        on_gpu = self.device.type == "cuda"
        host = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        for index, start in zip(self._indices, starts, strict=True):
            flat = index.array.view(np.uint8).reshape(-1)
            host.numpy()[start : start + len(flat)] = flat
        whole = self._copy_to_gpu(host) if on_gpu else host
        for index, start in zip(self._indices, starts, strict=True):
            dtype = torch.from_numpy(index.array[:0]).dtype
            items = whole[start : start + index.array.nbytes].view(dtype)
            index.tensor = items.view(index.array.shape)
        self._indices = []

    def _copy_to_gpu(self, host: Tensor) -> Tensor:
        stream = _side_stream(self.device)
        with torch.cuda.stream(stream):
            # Rounded up to a power of two, so that later plans reuse the memory of older ones.
            size = 1 << (len(host) - 1).bit_length()
            whole = torch.empty(size, dtype=torch.uint8, device=self.device)
            whole[: len(host)].copy_(host, non_blocking=True)
            self._on_gpu = (whole, stream.record_event())
        return whole

    def wait(self) -> None:
        """Makes the current stream wait for the arrays, and keeps their memory until the stream no
        longer uses it."""
        if self._on_gpu is None:
            return
        whole, arrived = self._on_gpu
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._users:
            self._users.add(stream.cuda_stream)
            stream.wait_event(arrived)
            whole.record_stream(stream)


@cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Kernel(ABC):
    """Computes the tiles of a call into partial outputs and log-sum-exps, and their gradients.

    q, dout: [query rows, q heads, dim]; k, v: [key rows, kv heads, dim]; lse, delta: [query rows,
    q heads] in the accumulator dtype, stored heads first, with each head's rows padded to whole
    kernel tiles. `scale` is positive.

    A kernel of your own sets `name` and defines the three abstract methods. The other attributes
    are for kernels that need more from the executor; a plain kernel keeps the defaults.
    """

    name: str
    merges: bool = True
    """Whether forward calls add to the sums of rows, as their states say. If not, every call writes
    an output of its own, and the executor merges the outputs."""
    collects: bool = False
    """Whether all backward calls of a program add to gradient sums in the kernel's own layout.
    Backward then takes log-sum-exps in base 2."""
    capturable: bool = False
    """Whether CUDA graphs can capture calls: they allocate nothing and wait for nothing."""
    row_multiple: int = 1
    """Slots of received blocks and the rows of sums are padded to multiples of this."""
    dim_multiple: int = 1
    """The head dim of sums is padded to multiples of this."""
    most_sequences: int = 0
    """The most whole sequences that one backward call can take, each aligned to kernel tiles."""

    def refuses(self, shape: AttentionShape) -> str:  # noqa: ARG002
        """The reason why this kernel does not take such inputs; empty if it does."""
        return ""

    def sequence_rows(
        self,
        lowered: Any,  # noqa: ARG002
        dim: int,  # noqa: ARG002
    ) -> tuple[list[SequenceRows], list[SequenceRows]]:
        """The rows of the sequences of a backward call, for queries and for keys. Both are empty
        unless the kernel aligns each sequence to kernel tiles."""
        return [], []

    @abstractmethod
    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        """Returns whatever `attend` or `attend_backward` needs for this call; called once, in
        `prepare`. Arrays for the device are added to `arrays`, which sends them all at once."""

    @abstractmethod
    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Sums, lse: Tensor
    ) -> None:
        """Computes the attention of the call's tiles into `out` and `lse`."""

    @abstractmethod
    def attend_backward(
        self, lowered: Any, inputs: BackwardInputs, scale: float, grads: Gradients
    ) -> None:
        """Adds the gradients of the call's tiles to `grads`."""

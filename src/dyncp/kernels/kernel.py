"""What a kernel is asked to compute, the base class of all kernels, and `IndexArrays`, which sends
what kernels look up on the device."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dyncp.arrays import Bool, Int32, Int64, UInt8
from dyncp.plan import AttentionShape


class RowState(IntEnum):
    """Where the sum of a row's contributions is, before and after a contribution to it.

    A row with one contribution goes from NOTHING to FINAL, and nothing is ever added up. One with
    three goes NOTHING → WIDE → WIDE → FINAL: added up in the accumulator dtype, and rounded to the
    final one once; it stays WIDE where results are received for it, which are added later.
    """

    NOTHING = 0
    FINAL = 1  # in the tensor of the final dtype
    WIDE = 2  # in the tensor of the accumulator dtype
    UNTOUCHED = 3  # only as `after`: this contribution is not for this row


@dataclass(frozen=True, eq=False)
class RowStates:
    """Where each row's sum is before and after one contribution, uint8[rows] of `RowState`."""

    before: UInt8
    after: UInt8

    @property
    def touched(self) -> Bool:
        touched: Bool = self.after != RowState.UNTOUCHED
        return touched


@dataclass(frozen=True, eq=False)
class KernelCall:
    """What a kernel is asked to compute, in rows of the workspaces.

    A row's coordinate is its sequence's offset in the batch plus its position there; unused rows
    have -1. A query row attends the keys whose coordinates lie in its ranges *and* whose
    (query, key) pair lies in one of the rectangles. Rows that no rectangle touches keep empty
    ranges, and are UNTOUCHED.
    """

    head_group: int
    rectangles: Int64  # [tiles, 4]: query rows [q0, q1) × key rows [k0, k1)
    q_coordinates: Int64  # [query rows]
    k_coordinates: Int64  # [key rows]
    ranges: Int32  # [query rows, R, 2], coordinates
    q_states: RowStates  # of out (forward) or dq (backward)
    k_states: RowStates  # of dk and dv (backward)
    q_rows: slice  # whole kernel tiles that it touches
    k_rows: slice
    alone: bool = False  # the only call of its head group, on a rank without messages


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Rows that contributions are added up in; `RowState` says which tensor has a row's sum.

    `final` has q's dtype, `wide` the accumulator dtype (fp32, fp64 for fp64 inputs); where the two
    are equal they are one tensor, and `wide` is None where no row is ever WIDE. A kernel that does
    not merge writes the rows `q_rows` (backward: `k_rows`) of its call, which `final` has.
    """

    final: Tensor  # [rows, heads, dim]
    wide: Tensor | None = None


class BackwardInputs(NamedTuple):
    """What a backward call reads. `lse` is the final log-sum-exp of the whole row, `delta` the row
    sum of dO·O."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """What a backward call adds to. Kernels that collect have sums in their own order in `final`
    (panels, [heads, rows × dim]; see `row_ops.panels_to_rows`), of dq, and of dk and dv where heads
    are grouped; where they are not, dk and dv are those of the call."""

    dq: Sums
    dk: Sums
    dv: Sums


class SequenceRows(NamedTuple):
    """Rows of a whole sequence in a backward call."""

    first: int  # of the rank's own rows
    rows: int
    place: int  # first row in sums
    padded: int  # rows there, up to the border of kernel tiles


ALIGNMENT = 16  # bytes: vector loads


class Index:
    """An array to be sent to the device; `tensor` is set by `IndexArrays.send`."""

    __slots__ = ("array", "tensor")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.tensor: Tensor

    def __len__(self) -> int:
        return len(self.array)


class IndexArrays:
    """Collects the arrays of a plan while it is lowered, and sends them to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._indices: list[Index] = []
        self._whole: Tensor | None = None  # all of them, once they are sent to a GPU
        self._sent: torch.cuda.Event | None = None
        self._users: set[int] = set()  # streams

    def add(self, array: npt.NDArray[Any]) -> Index:
        index = Index(np.ascontiguousarray(array))
        self._indices.append(index)
        return index

    def send(self) -> None:
        """One copy of all arrays, from pinned memory on a stream of its own where the device is a
        GPU."""
        starts, total = [], 0
        for index in self._indices:
            starts.append(total)
            total += -(-index.array.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = self.device.type == "cuda"
        host = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        for index, start in zip(self._indices, starts, strict=True):
            host.numpy()[start : start + index.array.nbytes] = index.array.view(np.uint8).reshape(
                -1
            )
        if not on_gpu:
            self._point_into(host, starts)
            return
        stream = _side_stream(self.device)
        with torch.cuda.stream(stream):
            # A power of two: the next plan's arrays fit where an older plan's were.
            whole = torch.empty(
                1 << (total - 1).bit_length(), dtype=torch.uint8, device=self.device
            )
            whole[:total].copy_(host, non_blocking=True)
            self._point_into(whole, starts)
            self._whole, self._sent = whole, stream.record_event()

    def wait(self) -> None:
        """Makes the current stream wait for them, and their memory outlive its use there."""
        if self._sent is None or self._whole is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._users:
            self._users.add(stream.cuda_stream)
            stream.wait_event(self._sent)
            self._whole.record_stream(stream)

    def _point_into(self, whole: Tensor, starts: list[int]) -> None:
        for index, start in zip(self._indices, starts, strict=True):
            dtype = torch.from_numpy(index.array[:0]).dtype
            flat = whole[start : start + index.array.nbytes].view(dtype)
            index.tensor = flat.view(index.array.shape)
        self._indices = []


_streams: dict[torch.device, "torch.cuda.Stream"] = {}


def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


class Kernel(ABC):
    """Computes the tiles of a call into partial outputs and log-sum-exps, and their gradients.

    q, dout: [query rows, q heads, dim]; k, v: [key rows, kv heads, dim]; lse, delta: [query rows,
    q heads] in the accumulator dtype; heads come first in memory, each head's rows padded to whole
    kernel tiles. `scale` is positive.

    A kernel of your own sets `name` and defines the three abstract methods. The other attributes
    describe kernels that need more from the executor; the defaults fit plain ones.
    """

    name: str
    merges: bool = True
    """Forward calls add up what they compute, as the states of rows say; otherwise each call leaves
    an output of its own."""
    collects: bool = False
    """Gradients accumulate in sums in the kernel's own layout over all calls of a program; backward
    then takes log-sum-exps in base 2."""
    capturable: bool = False
    """Calls allocate nothing and wait for nothing, so that CUDA graphs can capture them."""
    row_multiple: int = 1
    """Slots of received blocks, and the rows of sums, are padded to multiples of this."""
    dim_multiple: int = 1
    """The head dim of sums is padded to multiples of this."""
    most_sequences: int = 0
    """How many whole sequences, each aligned to its kernel tiles, one backward call may take."""

    def refuses(self, shape: AttentionShape) -> str:  # noqa: ARG002
        """Why this kernel does not take such inputs; empty if it does."""
        return ""

    def sequence_rows(
        self,
        lowered: Any,  # noqa: ARG002
        dim: int,  # noqa: ARG002
    ) -> tuple[list[SequenceRows], list[SequenceRows]]:
        """Of queries and of keys, where a backward call consists of whole sequences."""
        return [], []

    @abstractmethod
    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        """Whatever this kernel needs to run the call; made once in `prepare`. Numbers for the
        device are added to `arrays`, which sends them all at once."""

    @abstractmethod
    def attend(
        self, lowered: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Sums, lse: Tensor
    ) -> None:
        """The attention of the call's tiles, into `out` and `lse`."""

    @abstractmethod
    def attend_backward(
        self, lowered: Any, inputs: BackwardInputs, scale: float, grads: Gradients
    ) -> None:
        """Adds the tiles' gradients to `grads`."""

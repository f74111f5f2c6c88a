"""Step: the immutable handle of a prepared plan."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dyncp.checks import whole_number
from dyncp.executor.contiguous import Contiguous, move_rows
from dyncp.executor.engine import Engine
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.layout import DTYPES, PlanLowering, RankLayout, dtypes_of, lay_out_ranks
from dyncp.executor.numbers import number_of
from dyncp.executor.shard import gather, shard
from dyncp.executor.streams import Arrival
from dyncp.kernels import Dtypes, IndexArrays
from dyncp.plan import (
    AttentionShape,
    Direction,
    MemoryUse,
    RankPlan,
    measure_memory,
    whole_documents,
    with_halo,
)
from dyncp.transport import Transport


@dataclass(frozen=True, eq=False)
class CallLayout:
    """Where everything of a call lies, on all ranks of this process, for one attention shape."""

    ranks: tuple[RankLayout, ...]
    direction: Direction
    dtypes: Dtypes
    arrivals: tuple[Arrival, ...]  # of the index arrays that it uses
    call: int = 0  # 16 bits that stand for plan, mask, direction and shape

    @cached_property
    def num_bytes(self) -> int:
        return sum(rank.num_bytes for rank in self.ranks)

    def wait_for_indices(self) -> None:
        for arrival in self.arrivals:
            arrival.wait()


class Step:
    """A plan made ready to run. Every attention layer of the step takes it.

    With virtual ranks, q, kv and out hold the rows of rank 0, then those of rank 1, and so on.

    It is no dataclass: wrappers (FSDP's mixed precision) take those apart and build them anew at
    every module that gets one.
    """

    def __init__(
        self,
        parts: tuple[RankPlan, ...],
        lowered: Mapping[tuple[str, Direction], tuple[LoweredProgram, ...]],
        engine: Engine,
        arrival: Arrival,
        layouts: dict[tuple[str, Direction, AttentionShape], CallLayout],
    ) -> None:
        self.parts = parts  # of the ranks that this process drives
        self.lowered, self.engine, self.arrival, self.layouts = lowered, engine, arrival, layouts
        self.accepted: set[Any] = set()  # calls that `check` found nothing wrong with
        self.others: list[Step] = []  # for another kernel
        self._halos: dict[int, Contiguous] = {}
        self.number = number_of(self)  # stands for it in compiled graphs

    @staticmethod
    def prepare(parts: tuple[RankPlan, ...], engine: Engine) -> "Step":
        """Lowers a plan, and sends its index arrays to the device."""
        return Step.of(PlanLowering(parts, engine))

    @staticmethod
    @torch.inference_mode(False)
    def of(lowering: PlanLowering) -> "Step":
        """All index arrays go to the device in one copy."""
        lowering.lay_out()  # a call since then may have told the shape
        arrival = Arrival(lowering.arrays)
        step = Step(lowering.parts, lowering.programs, lowering.engine, arrival, {})
        for key, laid_out in lowering.layouts.items():
            step._add(*key, laid_out, (arrival,))
        return step

    def fitting(self, inputs: tuple[Tensor, ...]) -> "Step":
        """This handle, or the plan prepared for another kernel where this one's refuses such
        tensors (q, k, v, or q and packed kv) and the choice was left to the executor."""
        engine = self.engine.fitting(self.shape_of(*inputs[:2]))
        if engine is self.engine:
            return self
        if not self.others:
            self.others.append(Step.prepare(self.parts, engine))
        return self.others[0]

    @property
    def num_bytes(self) -> int:
        """MemoryUse of the largest call so far, or to come: forward and backward share it."""
        return max(layout.num_bytes for layout in self.layouts.values())

    @property
    def transport(self) -> Transport:
        return self.engine.transport

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def plan(self) -> RankPlan:
        return self.parts[0]

    @property
    def fingerprint(self) -> str:
        """That of the plan's batch, which its local data have, too."""
        return self.plan.fingerprint

    @cached_property
    def num_rows(self) -> int:
        """Rows that q and kv must have on this process."""
        return sum(part.local_rows for part in self.parts)

    @property
    def masks(self) -> tuple[str, ...]:
        return tuple(self.plan.masks)

    def layout(self, mask: str, direction: Direction, q: Tensor, k: Tensor) -> CallLayout:
        """Where everything of a call with these tensors lies; made once per shape."""
        shape = self.shape_of(q, k)
        self.engine.shape = shape
        found = self.layouts.get((mask, direction, shape))
        if found is None:
            with torch.inference_mode(False):
                arrays = IndexArrays(self.device)
                ranks = lay_out_ranks(self.lowered[mask, direction], shape, self.engine, arrays)
                arrivals = (self.arrival, Arrival(arrays))
            found = self._add(mask, direction, shape, ranks, arrivals)
        return found

    def _add(
        self,
        mask: str,
        direction: Direction,
        shape: AttentionShape,
        ranks: tuple[RankLayout, ...],
        arrivals: tuple[Arrival, ...],
    ) -> CallLayout:
        call = f"{self.plan.digest} {mask} {direction} {shape}"
        number = zlib.crc32(call.encode()) & 0xFFFF
        layout = CallLayout(ranks, direction, dtypes_of(shape), arrivals, number)
        self.layouts[mask, direction, shape] = layout
        return layout

    def shape_of(self, q: Tensor, k: Tensor) -> AttentionShape:
        """The attention shape of a call with these tensors; k may be packed with v."""
        _, heads, dim = q.shape
        return _shape_of(heads, k.shape[-2], dim, q.dtype, self.parts[0].shape.partial_dtype)

    def memory(self, shape: AttentionShape | None = None) -> MemoryUse:
        """Bytes that a call takes on each of this process's ranks, with the executor's kernel."""
        return measure_memory(self.parts, shape, self.engine.style)

    def check(self, mask: str, inputs: tuple[Tensor, ...], *, backward: bool) -> None:
        """Raises ValueError where a call and the plan do not fit together. `inputs` are q, k, v, or
        q and packed kv. Layers call alike: what was accepted once is not looked at again."""
        call = (mask, backward, *[(x.shape, x.dtype, x.device) for x in inputs])
        if call not in self.accepted:
            self._check_mask(mask, backward=backward)
            self._check_inputs(*unpacked(*inputs))
            self.accepted.add(call)

    def _check_mask(self, mask: str, *, backward: bool) -> None:
        plan = self.plan.mask_plan(mask)
        if backward and plan.backward is None:
            raise ValueError(
                "q, kv or sink requires gradients, but this plan was made for evaluation "
                "(forward_only) and has no backward; plan without it, or use torch.no_grad()"
            )

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        _check_tensors(q, k, v)
        if q.shape[0] != self.num_rows:
            raise ValueError(
                f"q has {q.shape[0]} tokens; this plan gives "
                f"{'rank ' + str(self.plan.rank) if len(self.parts) == 1 else 'these ranks'} "
                f"{self.num_rows} local rows"
            )
        if q.device != self.device:
            raise ValueError(
                f"q is on {q.device}; this step was prepared for {self.device}: move q, k and v "
                f"there, or make the executor with device={str(q.device)!r}"
            )
        planned, shape = self.plan.shape, self.shape_of(q, k)
        if planned.exact and shape != planned:
            raise ValueError(
                f"q and kv have {_describe(shape)}; the plan was made for {_describe(planned)}"
            )

    def sent_bytes(self, mask: str, direction: Direction, shape: AttentionShape) -> int:
        """Bytes that this process's ranks send in one call, as the plan declares them."""
        return sum(part.sent_bytes(mask, direction, shape) for part in self.parts)

    def shard(self, values: Tensor | Sequence[Tensor], *, fill: float = 0) -> Tensor:
        """This process's rows `[num_rows, ...]` of a per-token tensor of the batch, which all ranks
        hold: `[tokens, ...]` of all sequences, concatenated, or a list with one tensor each. Rows
        that only pad get `fill`. A rank's gradient is that of its own rows."""
        return shard(self, values, fill)

    def gather(self, rows: Tensor, *, loss: str | None = None) -> list[Tensor]:
        """Per-token results `[num_rows, ...]` of all ranks as one tensor per sample, on every rank.

        All ranks of the group must call it together. Rows that require gradients need `loss`:
        "replicated" where every rank computes the same loss from what it gets (each takes the
        gradient of its own rows), "summed" where the loss is the sum of what ranks compute (the
        gradients of all ranks are added up)."""
        return gather(self, rows, loss)

    @cached_property
    def contiguous(self) -> Contiguous:
        """The rows of `to_contiguous`: whole documents, with their borders."""
        order = whole_documents(self.plan)
        names = "to_contiguous", "from_contiguous"
        return Contiguous(names, order, self.parts, self.engine)

    def to_contiguous(self, x: Tensor) -> Tensor:
        """Rows `[num_rows, ...]` of all ranks as whole documents, `[contiguous.num_rows, ...]`: for
        layers with state. All ranks call it together."""
        return move_rows(self.contiguous, x, self.number, back=False)

    def from_contiguous(self, y: Tensor) -> Tensor:
        """The way back of `to_contiguous`; rows that only pad are 0."""
        return move_rows(self.contiguous, y, self.number, back=True)

    def halo(self, tokens: int) -> Contiguous:
        """The rows of `add_halo`: own ones, each piece behind the tokens before it."""
        tokens = whole_number("halo", tokens, 0)
        if tokens not in self._halos:
            order = with_halo(self.plan, tokens)
            names = f"add_halo of {tokens}", f"drop_halo of {tokens}"
            self._halos[tokens] = Contiguous(names, order, self.parts, self.engine)
        return self._halos[tokens]

    def add_halo(self, x: Tensor, tokens: int) -> Tensor:
        """Own rows `[num_rows, ...]` with the `tokens` before each piece of a document, `[halo(
        tokens).num_rows, ...]`: for layers that look back so far, such as short convolutions. All
        ranks call it together."""
        return move_rows(self.halo(tokens), x, self.number, back=False)

    def drop_halo(self, y: Tensor, tokens: int) -> Tensor:
        """The way back of `add_halo`; rows that only pad are 0."""
        return move_rows(self.halo(tokens), y, self.number, back=True)


def unpacked(q: Tensor, k: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of q, k, v, or of q and packed kv."""
    if v is None:
        k, v = k.unbind(1)
    return q, k, v


@lru_cache
def _shape_of(
    q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype, partial: str | None
) -> AttentionShape:
    return AttentionShape(q_heads, kv_heads, dim, DTYPES[dtype], partial)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected [tokens, heads, head_dim]"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; "
                "q, k and v must agree"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together; "
            "tokens and head_dim must be equal, and k and v alike"
        )
    if 0 in (*q.shape[1:], *k.shape[1:]):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; at least one head and one entry "
            "per head are needed"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"kv has {k.shape[1]} heads, which do not divide the {q.shape[1]} heads of q"
        )


def _describe(shape: Any) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head_dim {shape.head_dim}, "
        f"{shape.dtype}"
    )

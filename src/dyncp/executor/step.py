"""Step: the immutable handle of a plan that is ready to run. PreparedPlan: the data behind it."""

import itertools
import weakref
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dyncp.checks import whole_number
from dyncp.executor.engine import Engine
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.layout import DTYPES, dtypes_of
from dyncp.executor.row_moves import Contiguous, gather, gather_targets, shard, shard_targets
from dyncp.executor.row_work import RankCall, make_rank_call
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
    """A call of one attention shape on all ranks of this process, laid out in memory."""

    ranks: tuple[RankCall, ...]
    dtypes: Dtypes
    arrays: tuple[IndexArrays, ...]  # the index arrays that it uses
    number: int  # 16-bit hash of plan, mask, direction and shape

    @cached_property
    def num_bytes(self) -> int:
        return sum(rank.layout.num_bytes for rank in self.ranks)


class PreparedPlan:
    """The plan parts of this process's ranks, lowered for an engine's kernel, and the layouts of
    their calls. A plan for one attention shape is laid out here, in the dtype that calls of this
    shape had lately; any other plan with the first call of each shape. It can be made in any
    thread, since it does not use the device; `send` completes it."""

    @torch.inference_mode(False)
    def __init__(self, parts: tuple[RankPlan, ...], engine: Engine) -> None:
        self.parts, self.engine = parts, engine
        self.num_rows = sum(part.local_rows for part in parts)
        self.accepted: set[Any] = set()  # calls that passed `check`
        self._arrays = IndexArrays(engine.device)
        self._layouts: dict[tuple[str, Direction, AttentionShape], CallLayout] = {}
        self._row_orders: dict[int | None, Contiguous] = {}
        self._other: PreparedPlan | None = None  # the same plan for the alternative kernel
        fixed = engine.graphs.wanted
        self._programs = {
            (name, direction): tuple(
                LoweredProgram(
                    part, part.masks[name], direction, engine.kernel, self._arrays, fixed=fixed
                )
                for part in parts
            )
            for name, mask in parts[0].masks.items()
            for direction, _ in mask.programs()
        }
        if parts[0].shape.exact:
            expected = engine.called.get(parts[0].shape, parts[0].shape)
            for key in self._programs:
                self._lay_out(*key, expected, self._arrays)

    @torch.inference_mode(False)
    def send(self) -> "PreparedPlan":
        """Copies all index arrays to the device, in one copy."""
        self._arrays.send()
        return self

    def _lay_out(
        self, mask: str, direction: Direction, shape: AttentionShape, *arrays: IndexArrays
    ) -> CallLayout:
        """Lays out a call; the ranks of this process follow each other in memory and in rows. The
        call uses all of `arrays`; its own index arrays are added to the last."""
        ranks: list[RankCall] = []
        base = first_row = 0
        for program in self._programs[mask, direction]:
            rank = make_rank_call(program, shape, self.engine.row_ops, arrays[-1], base, first_row)
            ranks.append(rank)
            base, first_row = base + rank.layout.num_bytes, first_row + program.part.local_rows
        number = zlib.crc32(f"{self.parts[0].digest} {mask} {direction} {shape}".encode()) & 0xFFFF
        layout = CallLayout(tuple(ranks), dtypes_of(shape), arrays, number)
        self._layouts[mask, direction, shape] = layout
        return layout

    def layout(self, mask: str, direction: Direction, q: Tensor, k: Tensor) -> CallLayout:
        """The layout of a call with these tensors, made once per shape."""
        shape = self.shape_of(q, k)
        found = self._layouts.get((mask, direction, shape))
        if found is None:
            with torch.inference_mode(False):
                arrays = IndexArrays(self.engine.device)
                found = self._lay_out(mask, direction, shape, self._arrays, arrays)
                arrays.send()
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest call laid out so far. Forward and backward share memory."""
        return max(layout.num_bytes for layout in self._layouts.values())

    def shape_of(self, q: Tensor, k: Tensor) -> AttentionShape:
        """The attention shape of a call with these tensors. k may be packed with v."""
        _, heads, dim = q.shape
        return _shape_of(heads, k.shape[-2], dim, q.dtype, self.parts[0].shape.partial_dtype)

    def fitting(self, inputs: tuple[Tensor, ...]) -> "PreparedPlan":
        """This object, or the same plan prepared for the alternative kernel, if this one's kernel
        refuses these inputs (q, k, v, or q and packed kv)."""
        engine = self.engine.fitting(self.shape_of(*inputs[:2]))
        if engine is self.engine:
            return self
        if self._other is None:
            self._other = PreparedPlan(self.parts, engine).send()
        return self._other

    def row_order(self, halo: int | None) -> Contiguous:
        """Whole documents (None), or local rows preceded by `halo` tokens."""
        if halo not in self._row_orders:
            if halo is None:
                order, names = whole_documents(self.parts[0]), ("to_contiguous", "from_contiguous")
            else:
                order = with_halo(self.parts[0], halo)
                names = f"add_halo of {halo}", f"drop_halo of {halo}"
            self._row_orders[halo] = Contiguous(names, order, self.parts, self.engine)
        return self._row_orders[halo]

    def check(self, mask: str, inputs: tuple[Tensor, ...], *, backward: bool) -> None:
        """Raises ValueError if the call does not fit the plan. `inputs` are q, k, v, or q and
        packed kv. All layers make the same call, so a call that passed is not checked again."""
        call = (mask, backward, *[(x.shape, x.dtype, x.device) for x in inputs])
        if call not in self.accepted:
            plan = self.parts[0].mask_plan(mask)
            if backward and plan.backward is None:
                raise ValueError(
                    "q, kv or sink requires gradients, but this plan was made for evaluation "
                    "(forward_only) and has no backward; plan without forward_only, or use "
                    "torch.no_grad()"
                )
            self._check_inputs(*unpacked(*inputs))
            self.accepted.add(call)

    def _check_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        _check_tensors(q, k, v)
        if q.shape[0] != self.num_rows:
            alone = len(self.parts) == 1
            raise ValueError(
                f"q has {q.shape[0]} tokens; this plan gives "
                f"{'rank ' + str(self.parts[0].rank) if alone else 'these ranks'} "
                f"{self.num_rows} local rows"
            )
        device = self.engine.device
        if q.device != device:
            raise ValueError(
                f"q is on {q.device}; this step was prepared for {device}: move q, k and v "
                f"there, or create the executor with device={str(q.device)!r}"
            )
        planned, shape = self.parts[0].shape, self.shape_of(q, k)
        if planned.exact and shape != replace(planned, dtype=shape.dtype):
            raise ValueError(
                f"q and kv have {describe(shape)}; the plan was made for {describe(planned)}"
            )
        self.engine.called[planned] = shape


class Step:
    """A plan that is ready to run: the handle that every attention layer gets.

    With virtual ranks, q, kv and out contain the rows of rank 0, then those of rank 1, and so on.
    It is immutable.

    It is not a dataclass, because wrappers like FSDP's mixed precision would copy it at every
    module that gets one.
    """

    __slots__ = ("__weakref__", "_number", "_prepared")

    def __init__(self, prepared: PreparedPlan, number: Tensor | None = None) -> None:
        self._prepared = prepared
        self._number = _number_of(prepared) if number is None else number

    @property
    def prepared(self) -> PreparedPlan:
        """The lowered plan that attention calls use."""
        return self._prepared

    @property
    def number(self) -> Tensor:
        """Identifies the step in compiled graphs, int64[] on the CPU."""
        return self._number

    @property
    def parts(self) -> tuple[RankPlan, ...]:
        """The parts of the plan for the ranks that this process runs."""
        return self._prepared.parts

    @property
    def plan(self) -> RankPlan:
        """The first of `parts`; the only one unless ranks are virtual."""
        return self._prepared.parts[0]

    @property
    def transport(self) -> Transport:
        return self._prepared.engine.transport

    @property
    def device(self) -> torch.device:
        return self._prepared.engine.device

    @property
    def fingerprint(self) -> str:
        """Hash of the plan's batch; the batch's local data have the same."""
        return self.plan.fingerprint

    @property
    def num_rows(self) -> int:
        """The number of rows that q and kv must have in this process."""
        return self._prepared.num_rows

    @property
    def masks(self) -> tuple[str, ...]:
        return tuple(self.plan.masks)

    def memory(self, shape: AttentionShape | None = None) -> MemoryUse:
        """Bytes that a call needs on each of this process's ranks, with the executor's kernel."""
        return measure_memory(self.parts, shape, self._prepared.engine.style)

    def sent_bytes(self, mask: str, direction: Direction, shape: AttentionShape) -> int:
        """Bytes that this process's ranks send in one call, according to the plan."""
        return sum(part.sent_bytes(mask, direction, shape) for part in self.parts)

    def shard(self, values: Tensor | Sequence[Tensor], *, fill: float = 0) -> Tensor:
        """This process's rows `[num_rows, ...]` of a per-token tensor that every rank holds for the
        whole batch: one tensor `[tokens, ...]` with all sequences concatenated, or a list with one
        tensor per sequence. Padding rows get `fill`. Each rank's gradient covers its own rows."""
        return shard(self.parts, values, fill)

    def gather(self, rows: Tensor, *, loss: str | None = None) -> list[Tensor]:
        """Gathers per-token results `[num_rows, ...]` of all ranks: one tensor per sample, on every
        rank.

        All ranks of the group call it together. Rows that require gradients need `loss`:
        "replicated" if every rank computes the same loss from the result (each rank keeps the
        gradient of its own rows), "summed" if the loss is the sum of the ranks' losses (the
        gradients of all ranks are added up)."""
        return gather(self.parts, self.transport, rows, loss)

    def shard_targets(
        self, values: Tensor | Sequence[Tensor], data: Mapping[str, Tensor]
    ) -> Tensor:
        """What belongs to the targets of this process's rows, `[targets, ...]`, of a per-token
        tensor of the whole batch (as in `shard`): an advantage, reward or old log-probability of a
        token belongs to the row that predicts it. `data` are this step's local data, made with
        `list_targets=True`, or of a batch whose tokens have several targets."""
        return shard_targets(self.parts, values, data)

    def gather_targets(
        self, values: Tensor, data: Mapping[str, Tensor], *, loss: str | None = None
    ) -> list[Tensor]:
        """Gathers results by target `[targets, ...]` of all ranks: one tensor per sample, on every
        rank, with the value of each predicted token at its place, and 0 for other tokens. `data`
        and `loss` are as in `shard_targets` and `gather`."""
        return gather_targets(self.parts, self.transport, values, data, loss)

    @property
    def contiguous(self) -> Contiguous:
        """Describes the rows of `to_contiguous`: whole documents and their boundaries."""
        return self._prepared.row_order(None)

    def to_contiguous(self, x: Tensor) -> Tensor:
        """Redistributes rows `[num_rows, ...]` so that each rank has whole documents,
        `[contiguous.num_rows, ...]`, for layers with state. All ranks call it together."""
        return self.contiguous.run(x, self._number, back=False)

    def from_contiguous(self, y: Tensor) -> Tensor:
        """The inverse of `to_contiguous`. Padding rows are 0."""
        return self.contiguous.run(y, self._number, back=True)

    def halo(self, tokens: int) -> Contiguous:
        """Describes the rows of `add_halo`: local rows, each piece preceded by its halo."""
        return self._prepared.row_order(whole_number("halo", tokens, 0))

    def add_halo(self, x: Tensor, tokens: int) -> Tensor:
        """Local rows `[num_rows, ...]` with the `tokens` tokens before each piece of a document,
        `[halo(tokens).num_rows, ...]`, for layers that look back that far, such as short
        convolutions. All ranks call it together."""
        return self.halo(tokens).run(x, self._number, back=False)

    def drop_halo(self, y: Tensor, tokens: int) -> Tensor:
        """The inverse of `add_halo`. Padding rows are 0."""
        return self.halo(tokens).run(y, self._number, back=True)


# Compiled graphs take tensors, so a step is passed to them as its number. A graph saves the number
# for its backward, and the tensor's memory holds a reference to the plan, so the plan stays alive
# even if the user has dropped the step.
_counter = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, PreparedPlan] = weakref.WeakValueDictionary()


class _Memory(bytearray):
    prepared: PreparedPlan


def _number_of(prepared: PreparedPlan) -> Tensor:
    number, memory = next(_counter), _Memory(8)
    memory.prepared = prepared
    _by_number[number] = prepared
    return torch.frombuffer(memory, dtype=torch.int64)[0].fill_(number)


def step_of(number: Tensor) -> Step:
    """The step with this number."""
    prepared = _by_number.get(int(number))
    if prepared is None:
        raise ValueError(
            "a compiled graph ran with a step that no longer exists; keep the handle of prepare() "
            "until its backward has run"
        )
    return Step(prepared, number)


def unpacked(q: Tensor, k: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, from these three or from q and packed kv."""
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
                "q, k and v must have the same dtype and device"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together; "
            "tokens and head_dim must be equal, and k and v must have the same shape"
        )
    if 0 in (*q.shape[1:], *k.shape[1:]):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; at least one head and one entry "
            "per head are required"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} heads, which do not divide the {q.shape[1]} heads of q"
        )


def describe(shape: AttentionShape) -> str:
    return (
        f"{shape.q_heads} q heads, {shape.kv_heads} kv heads, head_dim {shape.head_dim}, "
        f"{shape.dtype}"
    )

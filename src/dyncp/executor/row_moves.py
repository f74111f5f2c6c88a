"""Rows of all ranks in another order: contiguous, for layers with state (`step.to_contiguous`,
`step.add_halo`, and back), and that of the batch (`step.shard`, `step.gather`).

plan/contiguous.py says which order the former is. Each rank sends others just the rows that they
need. Gradients follow dyncp's convention: what is added up over ranks (`sum_gradients`) is the
gradient.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from dyncp.arrays import Int64, starts_of
from dyncp.checks import instance_of
from dyncp.executor.engine import Engine
from dyncp.plan import ContiguousOrder, Direction, RankPlan, batch_order, gather_samples
from dyncp.transport import Transport


class RowMap(NamedTuple):
    """Row `source[i]` becomes row `target[i]`. Rows count over all ranks, in the order before and
    in the one after; the bounds are those of ranks."""

    target: Int64
    source: Int64
    target_bounds: Int64
    source_bounds: Int64

    def reversed(self) -> "RowMap":
        """That of gradients."""
        return RowMap(self.source, self.target, self.source_bounds, self.target_bounds)


class RankExchange:
    """One rank's part of a row map. It sends `sent` rows, `num_sent` of them to each peer, and
    receives others in one buffer, ordered likewise. `steps` are (target rows, source rows, whether
    these are in the buffer, whether it adds): the first ones copy, the others (which no map has
    that takes each row once) add, row by row in one fixed order."""

    def __init__(self, rows: RowMap, rank: int, device: torch.device) -> None:
        first, last = rows.target_bounds[rank : rank + 2]
        local_first, local_last = rows.source_bounds[rank : rank + 2]
        here = (rows.target >= first) & (rows.target < last)
        local = (rows.source >= local_first) & (rows.source < local_last)
        self.num_rows, self.input_rows = int(last - first), int(local_last - local_first)

        def index(values: Int64) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

        leaving, span = local & ~here, max(self.input_rows, 1)
        peer = np.searchsorted(rows.target_bounds, rows.target[leaving], side="right") - 1
        row = rows.source[leaving] - local_first
        sent = _distinct(peer * span + row, (len(rows.target_bounds) - 1) * span)
        self.sent, self.num_sent = index(sent % span), _count(sent // span)

        target, source, local = rows.target[here] - first, rows.source[here], local[here]
        coming = _distinct(source[~local], int(rows.source_bounds[-1]))
        of_peer = np.searchsorted(rows.source_bounds, coming, side="right") - 1
        self.num_received = _count(of_peer)
        place = np.where(local, source - local_first, np.searchsorted(coming, source))
        self.steps = tuple(
            (index(target[chosen]), index(place[chosen]), received, layer > 0)
            for layer, of_layer in enumerate(_layers(target, source))
            for received in (False, True)
            if len(chosen := of_layer[local[of_layer] != received])
        )

    def place(self, local: Tensor, received: Tensor) -> Tensor:
        """The rows of the result."""
        result = local.new_zeros(self.num_rows, *local.shape[1:])
        for target, source, from_peers, adds in self.steps:
            rows = (received if from_peers else local).index_select(0, source)
            if adds:
                result.index_add_(0, target, rows)
            else:
                result.index_copy_(0, target, rows)
        return result


def _distinct(values: Int64, bound: int) -> Int64:
    """As `np.unique`, faster, for values below `bound`."""
    found = np.zeros(bound, np.bool_)
    found[values] = True
    return np.flatnonzero(found)


def _count(peers: Int64) -> dict[int, int]:
    """How often each occurs, in their order."""
    return {peer: count for peer, count in enumerate(np.bincount(peers).tolist()) if count}


def _layers(target: Int64, source: Int64) -> list[Int64]:
    """Entries in groups that have each target once; the order of sources is that of additions."""
    if np.bincount(target, minlength=1).max() <= 1:
        return [np.arange(len(target))]
    order = np.lexsort((source, target))
    ordered = target[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    first = np.maximum.accumulate(np.where(new, np.arange(len(ordered)), 0))
    layer = np.arange(len(ordered)) - first
    return [order[layer == number] for number in range(int(layer.max(initial=0)) + 1)]


class Exchange:
    """A row map on the ranks of this process. `name` tells the exchanges of a plan apart."""

    def __init__(self, name: str, rows: RowMap, parts: Sequence[RankPlan], engine: Engine) -> None:
        self.name, self._engine, self._digest = name, engine, parts[0].digest
        with torch.inference_mode(False):  # calls in other modes use the same tensors
            self._ranks = [RankExchange(rows, part.rank, engine.device) for part in parts]
        self.input_rows = [rank.input_rows for rank in self._ranks]
        self.sent_rows = sum(sum(rank.num_sent.values()) for rank in self._ranks)

    def run(self, x: Tensor) -> Tensor:
        """The result's rows of this process's ranks."""
        engine = self._engine
        engine.check_open()
        kind = f"{self._digest} {self.name} {x.dtype} {tuple(x.shape[1:])}"
        engine.begin_call()
        try:
            return self._exchange(x, zlib.crc32(kind.encode()) & 0xFFFF)
        finally:
            engine.lock.release()

    def _exchange(self, x: Tensor, number: int) -> Tensor:
        channels = self._engine.transport.open(number)
        parts, received, results = x.split_with_sizes(self.input_rows), [], []
        for rank, part, channel in zip(self._ranks, parts, channels, strict=True):
            coming = x.new_empty(sum(rank.num_received.values()), *x.shape[1:])
            sends = _messages(part.index_select(0, rank.sent), rank.num_sent)
            channel.launch(0, sends, _messages(coming, rank.num_received))
            received.append(coming)
        for rank, part, coming, channel in zip(self._ranks, parts, received, channels, strict=True):
            if rank.num_received and coming.nbytes:
                channel.wait(0)
            results.append(rank.place(part, coming))
            channel.finish()
        return torch.cat(results) if len(results) > 1 else results[0]


def _messages(rows: Tensor, counts: dict[int, int]) -> dict[int, Tensor]:
    """One message per peer, as bytes; rows of no bytes need none."""
    if not rows.nbytes:
        return {}
    split = rows.split_with_sizes(list(counts.values()))
    return {
        peer: part.flatten().view(torch.uint8) for peer, part in zip(counts, split, strict=True)
    }


class MoveRows(torch.autograd.Function):
    """Moves rows there; gradients come back the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, there: Exchange, back: Exchange) -> Tensor:
        # What is saved makes checkpointing run this again before its backward on all ranks, also
        # on those whose layer saves nothing.
        ctx.save_for_backward(number)
        ctx.there, ctx.back = there, back
        return there.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (number,) = ctx.saved_tensors
        return MoveRows.apply(grad, number, ctx.back, ctx.there), None, None, None  # type: ignore[no-untyped-call]


class Contiguous:
    """This process's rows in contiguous order, in pieces that belong together.

    Piece i are rows cu_seqlens[i] to cu_seqlens[i + 1] (int32, on the step's device), of document
    `documents[i]` of the batch, from its token `starts[i]` on: 0 where a document begins. Documents
    are numbered over the whole batch, in its order. Rows that only pad, if there are any, are the
    last piece of their rank, with document -1. `lengths` are the rows of pieces, `piece_of_row`
    (int32[rows]) is what some kernels call seq_idx. `rows_per_rank` are those of all ranks, without
    padding, and `imbalance` is the most over their mean.
    """

    def __init__(
        self,
        names: tuple[str, str],
        order: ContiguousOrder,
        parts: Sequence[RankPlan],
        engine: Engine,
    ) -> None:
        """`names` are those of the calls that bring rows there and back."""
        self._names, self._parts, self._engine = names, parts, engine
        first, last = parts[0].rank, parts[-1].rank + 1
        self.num_rows = int(order.row_bounds[last] - order.row_bounds[first])
        pieces = slice(*order.piece_bounds[[first, last]])
        self.lengths: tuple[int, ...] = tuple(order.piece_rows[pieces].tolist())
        self.documents, self.starts = order.document[pieces], order.start[pieces]
        self.rows_per_rank = order.rows_per_rank
        self.imbalance = float(order.rows_per_rank.max() / order.rows_per_rank.mean())
        local, bounds = batch_order(parts[0]), (order.row_bounds, starts_of(parts[0].rows_per_rank))
        filled, counting = np.flatnonzero(order.token >= 0), np.flatnonzero(order.counts)
        # Into the order, and back from the rows that count.
        self._there = RowMap(filled, local[order.token[filled]], *bounds)
        self._back = RowMap(local[order.token[counting]], counting, *bounds[::-1])
        self._exchanges: dict[tuple[bool, Direction], Exchange] = {}

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return self._on_device(starts_of(np.asarray(self.lengths, np.int64)))

    @cached_property
    def piece_of_row(self) -> Tensor:
        return self._on_device(np.repeat(np.arange(len(self.lengths)), self.lengths))

    def _on_device(self, values: Int64) -> Tensor:
        with torch.inference_mode(False):
            return torch.from_numpy(values.astype(np.int32)).to(self._engine.device)

    def sent_bytes(
        self, row_bytes: int, direction: Direction = Direction.FORWARD, *, back: bool = False
    ) -> int:
        """Bytes that this process's ranks send to bring rows of so many bytes into this order, or
        `back`; or their gradients."""
        return self._exchange(Direction(direction), back=back).sent_rows * row_bytes

    def _exchange(self, direction: Direction, *, back: bool) -> Exchange:
        key = back, direction
        if key not in self._exchanges:
            name, rows = self._names[back], self._back if back else self._there
            if direction is Direction.BACKWARD:
                name, rows = f"{name} backward", rows.reversed()
            self._exchanges[key] = Exchange(name, rows, self._parts, self._engine)
        return self._exchanges[key]

    def run(self, x: Tensor, number: Tensor, *, back: bool) -> Tensor:
        """Rows into this order, or `back`; `number` is that of the step."""
        there, gradient = (self._exchange(direction, back=back) for direction in Direction)
        instance_of("what is moved", x, Tensor, "a torch tensor")
        if not x.ndim or len(x) != sum(there.input_rows):
            raise ValueError(
                f"{there.name} got shape {tuple(x.shape)}; this step has {sum(there.input_rows)} "
                f"{'rows in contiguous order' if back else 'rows'}"
            )
        result: Tensor = MoveRows.apply(x, number, there, gradient)  # type: ignore[no-untyped-call]
        return result


@_disable_dynamo
def move_rows(contiguous: Contiguous, x: Tensor, number: Tensor, *, back: bool) -> Tensor:
    """`Contiguous.run`, which torch.compile does not look into: a graph break."""
    return contiguous.run(x, number, back=back)


LOSSES = ("replicated", "summed")


def shard(parts: Sequence[RankPlan], values: Tensor | Sequence[Tensor], fill: float) -> Tensor:
    whole = _concatenated(parts[0], values)
    rows = np.concatenate([part.row_coordinates for part in parts])
    index = torch.from_numpy(rows).to(whole.device)
    taken = whole.index_select(0, index.clamp_min(0))
    if (rows >= 0).all():
        return taken
    return taken.masked_fill((index < 0).view(-1, *[1] * (taken.ndim - 1)), fill)


def _concatenated(part: RankPlan, values: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor with the tokens of all sequences of the batch."""
    lengths = part.lengths.tolist()
    if isinstance(values, Tensor):
        if not values.ndim or len(values) != sum(lengths):
            raise ValueError(
                f"shard got shape {tuple(values.shape)}; the batch has {sum(lengths)} tokens: give "
                "[tokens, ...] of all its sequences, concatenated, or a list with one tensor each"
            )
        return values
    instance_of("what shard got", values, (list, tuple), "a tensor, or one per sequence")
    for value in values:
        instance_of("what shard got for a sequence", value, Tensor, "a torch tensor")
    found = [len(value) if value.ndim else 0 for value in values]
    if found != lengths:
        shown = f"{found[:8]}{' ...' if len(found) > 8 else ''}"
        raise ValueError(
            f"shard got sequences of {shown} tokens; those of the batch have {lengths[:8]}"
            f"{' ...' if len(lengths) > 8 else ''}"
        )
    return torch.cat(list(values))


def gather(
    parts: Sequence[RankPlan], transport: Transport, rows: Tensor, loss: str | None
) -> list[Tensor]:
    instance_of("what gather got", rows, Tensor, "a torch tensor")
    num_rows, counts = sum(part.local_rows for part in parts), parts[0].rows_per_rank.tolist()
    if not rows.ndim or len(rows) != num_rows:
        raise ValueError(f"gather got shape {tuple(rows.shape)}; this step has {num_rows} rows")
    if loss is not None and loss not in LOSSES:
        raise ValueError(f"gather got loss={loss!r}; choose one of {', '.join(LOSSES)}")
    alone = len(parts) == parts[0].num_ranks
    if alone or not (rows.requires_grad and torch.is_grad_enabled()):
        return gather_samples(parts[0], transport.gather(rows, counts))
    if loss is None:
        raise ValueError(
            "gather got rows that require gradients: say loss='replicated' if every rank computes "
            "the same loss from what it gets, loss='summed' if the loss is the sum of what ranks "
            "compute; or give rows.detach()"
        )
    return gather_samples(parts[0], list(_Gather.apply(rows, parts[0], transport, loss)))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, part: RankPlan, transport: Transport, loss: str
    ) -> tuple[Tensor, ...]:
        ctx.rank, ctx.transport, ctx.loss = part.rank, transport, loss
        return tuple(transport.gather(rows.detach(), part.rows_per_rank.tolist()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.loss == "replicated":
            return grads[ctx.rank], None, None, None
        total = ctx.transport.sum(torch.cat(grads))
        return torch.split(total, [len(grad) for grad in grads])[ctx.rank], None, None, None

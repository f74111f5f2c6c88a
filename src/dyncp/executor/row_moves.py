"""Moves rows of all ranks into another order: contiguous, for layers with state
(`step.to_contiguous`, `step.add_halo`, and back), or that of the batch (`step.shard`,
`step.gather`).

plan/contiguous.py defines the contiguous order. Each rank sends the other ranks only rows that they
need. As everywhere in dyncp, the gradient is the sum over all ranks (`sum_gradients`).
"""

import zlib
from collections.abc import Mapping, Sequence
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
    """Row `source[i]` of the old order becomes row `target[i]` of the new one. Rows are numbered
    over all ranks; the bounds say where each rank's rows start."""

    target: Int64
    source: Int64
    target_bounds: Int64
    source_bounds: Int64

    def reversed(self) -> "RowMap":
        """The map for gradients: source and target swapped."""
        return RowMap(self.source, self.target, self.source_bounds, self.target_bounds)


class RankExchange:
    """One rank's part of a row map. The rank sends its rows `sent`, ordered by peer,
    `num_sent[peer]` to each. It receives `num_received[peer]` rows into one buffer, also by peer.

    `steps` are (target rows, source rows, whether the sources are in the buffer, whether to add).
    If several sources have the same target, the first step copies and later ones add, in a fixed
    order."""

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
        sent = np.unique(peer * span + row)
        self.sent, self.num_sent = index(sent % span), _count(sent // span)

        target, source, local = rows.target[here] - first, rows.source[here], local[here]
        coming = np.unique(source[~local])
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
        """The rows of the result, from local and received rows."""
        result = local.new_zeros(self.num_rows, *local.shape[1:])
        for target, source, from_peers, adds in self.steps:
            rows = (received if from_peers else local).index_select(0, source)
            if adds:
                result.index_add_(0, target, rows)
            else:
                result.index_copy_(0, target, rows)
        return result


def _count(peers: Int64) -> dict[int, int]:
    """How often each peer occurs, in increasing order of peers."""
    return {peer: count for peer, count in enumerate(np.bincount(peers).tolist()) if count}


def _layers(target: Int64, source: Int64) -> list[Int64]:
    """Splits the entries into groups in which each target occurs once. The sources of a target are
    added in increasing order."""
    if np.bincount(target, minlength=1).max() <= 1:  # usual, and sorting takes a millisecond
        return [np.arange(len(target))]
    order = np.lexsort((source, target))
    ordered = target[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    first = np.maximum.accumulate(np.where(new, np.arange(len(ordered)), 0))
    layer = np.arange(len(ordered)) - first
    return [order[layer == number] for number in range(int(layer.max(initial=0)) + 1)]


class Exchange:
    """A row map on the ranks of this process. Each exchange of a plan has a different `name`."""

    def __init__(self, name: str, rows: RowMap, parts: Sequence[RankPlan], engine: Engine) -> None:
        self.name, self._engine, self._digest = name, engine, parts[0].digest
        with torch.inference_mode(False):  # calls outside inference mode use the same tensors
            self._ranks = [RankExchange(rows, part.rank, engine.device) for part in parts]
        self.input_rows = [rank.input_rows for rank in self._ranks]
        self.sent_rows = sum(sum(rank.num_sent.values()) for rank in self._ranks)

    def run(self, x: Tensor) -> Tensor:
        """The rows of this process's ranks in the new order."""
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
    """One message per peer, as bytes; none if rows have no bytes."""
    if not rows.nbytes:
        return {}
    split = rows.split_with_sizes(list(counts.values()))
    return {
        peer: part.flatten().view(torch.uint8) for peer, part in zip(counts, split, strict=True)
    }


class MoveRows(torch.autograd.Function):
    """Moves rows by the exchange `there`, and their gradients by the exchange `back`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, there: Exchange, back: Exchange) -> Tensor:
        # A saved tensor makes checkpointing run this again before backward on all ranks, even on
        # ranks whose layer saves nothing.
        ctx.save_for_backward(number)
        ctx.there, ctx.back = there, back
        return there.run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (number,) = ctx.saved_tensors
        return MoveRows.apply(grad, number, ctx.back, ctx.there), None, None, None  # type: ignore[no-untyped-call]


class Contiguous:
    """This process's rows in contiguous order, as pieces of documents.

    Piece i is rows cu_seqlens[i] to cu_seqlens[i + 1] (int32, on the step's device). It starts at
    token `starts[i]` of document `documents[i]`; documents are numbered over the whole batch.
    Padding rows, if any, are the last piece of their rank, with document -1. `lengths` are the
    numbers of rows of the pieces, `piece_of_row` (int32[rows]) is what some kernels call seq_idx.
    `rows_per_rank` counts the rows of all ranks without padding, and `imbalance` is their maximum
    divided by their mean.
    """

    def __init__(
        self,
        names: tuple[str, str],
        order: ContiguousOrder,
        parts: Sequence[RankPlan],
        engine: Engine,
    ) -> None:
        """`names` are the names of the methods that move rows there and back."""
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
        # Rows that do not count (halos, repeated prefixes) are not moved back.
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
        """Bytes that this process's ranks send to move rows of `row_bytes` bytes into this order,
        or `back`. Direction.BACKWARD stands for their gradients."""
        return self._exchange(Direction(direction), back=back).sent_rows * row_bytes

    def _exchange(self, direction: Direction, *, back: bool) -> Exchange:
        key = back, direction
        if key not in self._exchanges:
            name, rows = self._names[back], self._back if back else self._there
            if direction is Direction.BACKWARD:
                name, rows = f"{name} backward", rows.reversed()
            self._exchanges[key] = Exchange(name, rows, self._parts, self._engine)
        return self._exchanges[key]

    @_disable_dynamo
    def run(self, x: Tensor, number: Tensor, *, back: bool) -> Tensor:
        """Moves rows into this order, or `back`. `number` is the step's. A graph break in
        torch.compile."""
        there, gradient = (self._exchange(direction, back=back) for direction in Direction)
        instance_of(f"the argument of {there.name}", x, Tensor, "a torch tensor")
        if not x.ndim or len(x) != sum(there.input_rows):
            raise ValueError(
                f"{there.name} got shape {tuple(x.shape)}; this step has {sum(there.input_rows)} "
                f"{'rows in contiguous order' if back else 'rows'}"
            )
        result: Tensor = MoveRows.apply(x, number, there, gradient)  # type: ignore[no-untyped-call]
        return result


LOSSES = ("replicated", "summed")


def shard(parts: Sequence[RankPlan], values: Tensor | Sequence[Tensor], fill: float) -> Tensor:
    """See `Step.shard`."""
    whole = _concatenated(parts[0], values)
    rows = np.concatenate([part.row_coordinates for part in parts])
    index = torch.from_numpy(rows).to(whole.device)
    taken = whole.index_select(0, index.clamp_min(0))
    if (rows >= 0).all():
        return taken
    return taken.masked_fill((index < 0).view(-1, *[1] * (taken.ndim - 1)), fill)


def _concatenated(part: RankPlan, values: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor with the tokens of all sequences of the batch, after checks."""
    lengths = part.lengths.tolist()
    if isinstance(values, Tensor):
        if not values.ndim or len(values) != sum(lengths):
            raise ValueError(
                f"shard got shape {tuple(values.shape)}; the batch has {sum(lengths)} tokens: pass "
                "[tokens, ...] of all sequences, concatenated, or a list with one tensor each"
            )
        return values
    instance_of("what shard got", values, (list, tuple), "a tensor, or one per sequence")
    for value in values:
        instance_of("what shard got for a sequence", value, Tensor, "a torch tensor")
    found = [len(value) if value.ndim else 0 for value in values]
    if found != lengths:
        shown = f"{found[:8]}{' ...' if len(found) > 8 else ''}"
        raise ValueError(
            f"shard got sequences of {shown} tokens; the sequences of the batch have {lengths[:8]}"
            f"{' ...' if len(lengths) > 8 else ''}"
        )
    return torch.cat(list(values))


def gather(
    parts: Sequence[RankPlan], transport: Transport, rows: Tensor, loss: str | None
) -> list[Tensor]:
    """See `Step.gather`."""
    instance_of("what gather got", rows, Tensor, "a torch tensor")
    num_rows, counts = sum(part.local_rows for part in parts), parts[0].rows_per_rank.tolist()
    if not rows.ndim or len(rows) != num_rows:
        raise ValueError(f"gather got shape {tuple(rows.shape)}; this step has {num_rows} rows")
    return gather_samples(parts[0], _gathered(parts, transport, rows, counts, loss))


def _gathered(
    parts: Sequence[RankPlan], transport: Transport, rows: Tensor, counts: list[int], loss: Any
) -> list[Tensor]:
    """The rows of every rank, of which `counts` has the numbers."""
    if loss is not None and loss not in LOSSES:
        raise ValueError(f"gather got loss={loss!r}; choose one of {', '.join(LOSSES)}")
    alone = len(parts) == parts[0].num_ranks
    if alone or not (rows.requires_grad and torch.is_grad_enabled()):
        return transport.gather(rows, counts)
    if loss is None:
        raise ValueError(
            "gather got rows that require gradients: pass loss='replicated' if every rank computes "
            "the same loss from the result, loss='summed' if the loss is the sum of the ranks' "
            "losses; or pass rows.detach()"
        )
    return list(_Gather.apply(rows, parts[0].rank, transport, counts, loss))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, rank: int, transport: Transport, counts: list[int], loss: str
    ) -> tuple[Tensor, ...]:
        ctx.rank, ctx.transport, ctx.loss = rank, transport, loss
        return tuple(transport.gather(rows.detach(), counts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        none = (None, None, None, None)
        if ctx.loss == "replicated":
            return grads[ctx.rank], *none
        total = ctx.transport.sum(torch.cat(grads))
        return torch.split(total, [len(grad) for grad in grads])[ctx.rank], *none


def shard_targets(
    parts: Sequence[RankPlan], values: Tensor | Sequence[Tensor], data: Mapping[str, Tensor]
) -> Tensor:
    """See `Step.shard_targets`."""
    whole = _concatenated(parts[0], values)
    return whole[_target_tokens(parts[0], data).to(whole.device)]


def gather_targets(
    parts: Sequence[RankPlan],
    transport: Transport,
    values: Tensor,
    data: Mapping[str, Tensor],
    loss: str | None,
) -> list[Tensor]:
    """See `Step.gather_targets`."""
    instance_of("what gather_targets got", values, Tensor, "a torch tensor")
    tokens = _target_tokens(parts[0], data).to(values.device)
    if not values.ndim or len(values) != len(tokens):
        raise ValueError(
            f"gather_targets got shape {tuple(values.shape)}; these local data have {len(tokens)} "
            "targets"
        )
    if len(parts) < parts[0].num_ranks:
        number = torch.tensor([len(tokens)], device=values.device)
        counts = torch.cat(transport.gather(number, [1] * parts[0].num_ranks)).tolist()
        tokens = torch.cat(transport.gather(tokens, counts))
        values = torch.cat(_gathered(parts, transport, values, counts, loss))
    lengths = parts[0].lengths.tolist()
    whole = values.new_zeros(sum(lengths), *values.shape[1:]).index_add(0, tokens, values)
    return list(torch.split(whole, lengths))


def _target_tokens(part: RankPlan, data: Mapping[str, Tensor]) -> Tensor:
    """The coordinates in the batch of the tokens that local rows predict."""
    if "target_tokens" not in data:
        raise ValueError(
            "these local data do not list their targets; make them with make_local_data(..., "
            "list_targets=True)"
        )
    given = data.get("batch_fingerprint")
    own = torch.frombuffer(bytearray.fromhex(part.fingerprint), dtype=torch.int64)
    if given is None or not torch.equal(given.cpu(), own):
        raise ValueError("local data and step are of different batches")
    return data["target_tokens"].flatten()

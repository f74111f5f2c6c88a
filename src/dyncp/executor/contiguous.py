"""Rows in contiguous order, for layers with state: `step.to_contiguous`, `step.add_halo`, back.

plan/contiguous.py says which order that is. Each rank sends others just the rows that they need.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from dyncp.arrays import Int64, starts_of
from dyncp.checks import instance_of
from dyncp.executor.engine import Engine
from dyncp.plan import ContiguousOrder, Direction, RankPlan, batch_order
from dyncp.transport import Channel


@dataclass(frozen=True, eq=False)
class Move:
    """`target` and `source` are rows of the result and of the input; the bounds are those of ranks
    in either order. `name` tells moves of a step apart."""

    name: str
    target: Int64
    source: Int64
    target_bounds: Int64
    source_bounds: Int64

    def reversed(self) -> "Move":
        """The move of gradients."""
        bounds = self.source_bounds, self.target_bounds
        return Move(f"{self.name} backward", self.source, self.target, *bounds)

    def of_ranks(self, ranks: Sequence[int], device: torch.device) -> "BoundMove":
        first, last = ranks[0], ranks[-1] + 1
        rows = int(self.source_bounds[last] - self.source_bounds[first])
        with torch.inference_mode(False):  # calls in other modes use the same tensors
            bound = tuple(_of_rank(self, rank, device) for rank in ranks)
        return BoundMove(self.name, rows, bound)


@dataclass(frozen=True, eq=False)
class RankMove:
    """One rank's part. It sends `sent` rows, `num_sent` of them to each peer, and receives others
    in one buffer, ordered likewise. `steps` are (target rows, source rows, from the buffer): the
    first ones copy, the others (which no move has that copies each row once) add, row by row in
    one fixed order."""

    num_rows: int
    input_rows: int
    sent: Tensor
    num_sent: dict[int, int]
    num_received: dict[int, int]
    steps: tuple[tuple[Tensor, Tensor, bool, bool], ...]  # and whether it adds


@dataclass(frozen=True, eq=False)
class BoundMove:
    """A move on the ranks of this process."""

    name: str
    num_rows: int  # of the input
    ranks: tuple[RankMove, ...]

    @property
    def sent_rows(self) -> int:
        return sum(sum(rank.num_sent.values()) for rank in self.ranks)


def _of_rank(move: Move, rank: int, device: torch.device) -> RankMove:
    first, last = move.target_bounds[rank : rank + 2]
    own_first, own_last = move.source_bounds[rank : rank + 2]
    mine = (move.target >= first) & (move.target < last)
    own = (move.source >= own_first) & (move.source < own_last)

    leaving = own & ~mine
    peer = np.searchsorted(move.target_bounds, move.target[leaving], side="right") - 1
    span = int(own_last - own_first)
    row = move.source[leaving] - own_first
    sent = _distinct(peer * span + row, (len(move.target_bounds) - 1) * span)

    target, source, local = move.target[mine] - first, move.source[mine], own[mine]
    coming = _distinct(source[~local], int(move.source_bounds[-1]))
    of_peer = np.searchsorted(move.source_bounds, coming, side="right") - 1
    place = np.where(local, source - own_first, np.searchsorted(coming, source))

    def index(values: Int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

    steps = tuple(
        (index(target[chosen]), index(place[chosen]), received, layer > 0)
        for layer, of_layer in enumerate(_layers(target, source))
        for received in (False, True)
        if len(chosen := of_layer[local[of_layer] != received])
    )
    return RankMove(
        num_rows=int(last - first),
        input_rows=span,
        sent=index(sent % max(span, 1)),
        num_sent=_count(sent // max(span, 1)),
        num_received=_count(of_peer),
        steps=steps,
    )


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


def run_move(move: BoundMove, x: Tensor, engine: Engine, plan: str) -> Tensor:
    """The result's rows of this process's ranks; `plan` is the digest of the step's plan."""
    engine.check_open()
    kind = f"{plan} {move.name} {x.dtype} {tuple(x.shape[1:])}"
    if not engine.lock.acquire(blocking=False):
        engine.wait_for_lock()
    try:
        channels = engine.transport.open(zlib.crc32(kind.encode()) & 0xFFFF)
        return _exchange(move, x, channels)
    finally:
        engine.lock.release()


def _exchange(move: BoundMove, x: Tensor, channels: Sequence[Channel]) -> Tensor:
    parts = x.split_with_sizes([rank.input_rows for rank in move.ranks])
    received = []
    for rank, part, channel in zip(move.ranks, parts, channels, strict=True):
        coming = x.new_empty(sum(rank.num_received.values()), *x.shape[1:])
        leaving = part.index_select(0, rank.sent)
        channel.launch(0, _messages(leaving, rank.num_sent), _messages(coming, rank.num_received))
        received.append(coming)
    results = []
    for rank, part, coming, channel in zip(move.ranks, parts, received, channels, strict=True):
        if rank.num_received and coming.nbytes:
            channel.wait(0)
        results.append(_placed(rank, part, coming))
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


def _placed(rank: RankMove, own: Tensor, received: Tensor) -> Tensor:
    result = own.new_zeros(rank.num_rows, *own.shape[1:])
    for target, source, from_peers, adds in rank.steps:
        rows = (received if from_peers else own).index_select(0, source)
        if adds:
            result.index_add_(0, target, rows)
        else:
            result.index_copy_(0, target, rows)
    return result


class MoveRows(torch.autograd.Function):
    """Moves rows there; gradients come back the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, there: Any, back: Any) -> Tensor:
        # What is saved makes checkpointing run this again before its backward on all ranks, also
        # on those whose layer saves nothing.
        ctx.save_for_backward(number)
        ctx.there, ctx.back = there, back
        result: Tensor = there(x)
        return result

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
        self._engine, self._digest = engine, parts[0].digest
        self._ranks = tuple(part.rank for part in parts)
        first, last = self._ranks[0], self._ranks[-1] + 1
        self.num_rows = int(order.row_bounds[last] - order.row_bounds[first])
        pieces = slice(*order.piece_bounds[[first, last]])
        self.lengths: tuple[int, ...] = tuple(order.piece_rows[pieces].tolist())
        self.documents, self.starts = order.document[pieces], order.start[pieces]
        self.rows_per_rank = order.rows_per_rank
        self.imbalance = float(order.rows_per_rank.max() / order.rows_per_rank.mean())
        self._there, self._back = _moves(names, order, parts[0])
        self._bound: dict[tuple[bool, Direction], BoundMove] = {}

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
        self,
        row_bytes: int,
        direction: Direction = Direction.FORWARD,
        *,
        back: bool = False,
    ) -> int:
        """Bytes that this process's ranks send to bring rows of so many bytes into this order, or
        `back`; or their gradients."""
        return self._move(Direction(direction), back=back).sent_rows * row_bytes

    def _move(self, direction: Direction, *, back: bool) -> BoundMove:
        key = back, direction
        if key not in self._bound:
            move = self._back if back else self._there
            move = move if direction is Direction.FORWARD else move.reversed()
            self._bound[key] = move.of_ranks(self._ranks, self._engine.device)
        return self._bound[key]

    def run(self, x: Tensor, number: Tensor, *, back: bool) -> Tensor:
        """Rows into this order, or `back`; `number` is that of the step."""
        moves = [self._move(direction, back=back) for direction in Direction]
        instance_of("what is moved", x, Tensor, "a torch tensor")
        if not x.ndim or len(x) != moves[0].num_rows:
            raise ValueError(
                f"{moves[0].name} got shape {tuple(x.shape)}; this step has {moves[0].num_rows} "
                f"{'rows in contiguous order' if back else 'rows'}"
            )
        there, gradient = (
            partial(run_move, move, engine=self._engine, plan=self._digest) for move in moves
        )
        result: Tensor = MoveRows.apply(x, number, there, gradient)  # type: ignore[no-untyped-call]
        return result


def _moves(names: tuple[str, str], order: ContiguousOrder, part: RankPlan) -> tuple[Move, Move]:
    """From own rows into the order, and back from the rows that count."""
    own, own_bounds = batch_order(part), starts_of(part.rows_per_rank)
    filled, counting = np.flatnonzero(order.token >= 0), np.flatnonzero(order.counts)
    return (
        Move(names[0], filled, own[order.token[filled]], order.row_bounds, own_bounds),
        Move(names[1], own[order.token[counting]], counting, own_bounds, order.row_bounds),
    )


@_disable_dynamo
def move_rows(contiguous: Contiguous, x: Tensor, number: Tensor, *, back: bool) -> Tensor:
    """`Contiguous.run`, which torch.compile does not look into: a graph break."""
    return contiguous.run(x, number, back=back)

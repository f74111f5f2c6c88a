"""Rows between two orders of all ranks: each rank sends others just the rows that they need.

An order of rows puts those of rank 0 first, then those of rank 1, and so on; rows are numbered
over all ranks. A move is a list of (row of the result, row of the input). Rows of the result that
it does not list are 0; those that it lists several times are sums.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.executor.engine import Engine
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
    sent = np.unique(peer * span + move.source[leaving] - own_first)
    to_peer, num_sent = np.unique(sent // max(span, 1), return_counts=True)

    target, source, local = move.target[mine] - first, move.source[mine], own[mine]
    coming = np.unique(source[~local])
    of_peer = np.searchsorted(move.source_bounds, coming, side="right") - 1
    from_peer, num_received = np.unique(of_peer, return_counts=True)
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
        num_sent=dict(zip(to_peer.tolist(), num_sent.tolist(), strict=True)),
        num_received=dict(zip(from_peer.tolist(), num_received.tolist(), strict=True)),
        steps=steps,
    )


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

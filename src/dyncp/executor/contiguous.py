"""Rows in contiguous order, for layers with state: `step.to_contiguous`, `step.add_halo`, back.

plan/contiguous.py says which order that is; row_moves.py moves the rows.
"""

from collections.abc import Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from dyncp.arrays import Int64, starts_of
from dyncp.checks import instance_of
from dyncp.executor.engine import Engine
from dyncp.executor.row_moves import BoundMove, Move, MoveRows, run_move
from dyncp.plan import ContiguousOrder, Direction, RankPlan, batch_order


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

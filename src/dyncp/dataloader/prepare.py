"""Prepares one batch on this rank: the agreed plan, and the tokens that it gives the rank."""

import logging
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dyncp.dataloader.batch_data import BatchData
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.decision import Decision
from dyncp.dataloader.errors import PeerError
from dyncp.dataloader.exchange import Exchange
from dyncp.dataloader.local_tokens import (
    fingerprint_tensor,
    local_rows,
    local_sequences,
    num_targets,
    without_targets,
)
from dyncp.dataloader.metrics import BatchRecord
from dyncp.dataloader.planning import Planning
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.sample_data import add_sample_data
from dyncp.dataloader.samples import layout_mask
from dyncp.dataloader.state import Position
from dyncp.masks import Mask
from dyncp.plan import Plan, RankPlan, decode_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AgreedPlan(RankPlan):
    """A part that the ranks `agreed_by` (global ranks) have agreed on already: `prepare` of an
    executor over these ranks reads that instead of asking them again. A `filler` stands in for a
    batch that a replica lacks in the last round; its sample is another replica's."""

    agreed_by: tuple[int, ...] = ()
    filler: bool = False


@dataclass(frozen=True, eq=False)
class Prepared:
    """A batch ready for training; `targets` are those of this rank's tokens."""

    data: dict[str, Any]
    plan: RankPlan | Plan
    end: Position
    record: BatchRecord
    targets: int = 0


class Preparing:
    """Turns decisions into plans and local data."""

    def __init__(
        self, config: LoaderConfig, ranks: LoaderRanks, planning: Planning, exchange: Exchange
    ) -> None:
        self._config, self._ranks = config, ranks
        self._planning, self._exchange = planning, exchange
        wanted = config.pin_memory
        self._pins = torch.cuda.is_available() if wanted is None else wanted

    def prepare(self, step: int, batch: BatchData) -> Prepared:
        selection = batch.selection
        decision = self._exchange.decision(step, selection)
        if batch.without_reading():
            batch.batch()  # all of its masks
        self._exchange.check_samples(selection, decision, batch.marks())
        if batch.without_reading():
            self._exchange.check_batch(selection, decision, batch.batch().fingerprint)
        plan, size = (
            self._static(batch, decision) if decision.static else self._part(batch, decision)
        )
        data, targets = self._data(batch, plan)
        part = plan.parts[0] if isinstance(plan, Plan) else plan
        shared = self._compare(batch, decision, part)
        self._exchange.leave(selection, decision, shared)
        record = BatchRecord.of(part, decision.seconds, size, static=decision.static)
        targets = targets if self._ranks.counts_targets else 0
        return Prepared(data, plan, selection.end, record, targets)

    def _compare(self, batch: BatchData, decision: Decision, part: RankPlan) -> list[int]:
        """Compares what was read here with other ranks; samples that several of them have."""
        selection, shared = batch.selection, self._shared(part)
        marks = batch.marks()
        self._exchange.check_samples(selection, decision, marks)
        mine = {n: marks[n] for n in shared if n in marks and marks[n].content}
        self._exchange.compare_shared(selection, mine)
        return shared

    def _shared(self, part: RankPlan) -> list[int]:
        if self._ranks.num_members == 1:
            return []
        if self._ranks.num_members > self._ranks.num_ranks:  # peers have all that a rank has
            return list(range(len(part.lengths)))
        owners = np.unique(np.stack([part.blocks.sequence, part.blocks.owner]), axis=1)[0]
        sequences, ranks = np.unique(owners, return_counts=True)
        return [int(number) for number in sequences[ranks > 1]]

    def _part(self, batch: BatchData, decision: Decision) -> tuple[RankPlan | Plan, int]:
        ranks = range(self._ranks.num_ranks) if self._ranks.rank is None else [self._ranks.rank]
        encoded = [self._exchange.part(batch.selection, decision, rank) for rank in ranks]
        parts = tuple(decode_part(part) for part in encoded)
        for rank, part in zip(ranks, parts, strict=True):
            self._check_part(part, rank, decision)
        size = max(map(len, encoded))
        if self._ranks.rank is None:
            return Plan(parts), size
        return self._agreed(parts[0], filler=batch.selection.filler), size

    def _check_part(self, part: RankPlan, rank: int, decision: Decision) -> None:
        found = (part.rank, part.num_ranks, part.digest, part.fingerprint)
        wanted = (rank, self._ranks.num_ranks, decision.digest, decision.batch)
        if found != wanted:
            raise PeerError(
                "the store has a part of another plan: rank {} of {}, plan {}, batch {}".format(
                    *found
                )
                + "; agreed on was rank {} of {}, plan {}, batch {}".format(*wanted)
            )

    def _static(self, batch: BatchData, decision: Decision) -> tuple[RankPlan | Plan, int]:
        if not self._ranks.member:
            logger.warning(
                "batch %d of epoch %d gets a static plan: %s",
                batch.selection.number,
                batch.selection.end.epoch,
                decision.reason,
            )
        plan = self._planning.static_plan(batch.batch())
        self._exchange.agree_on_static(batch.selection, plan.digest)
        if self._ranks.rank is None:
            return plan, 0
        return self._agreed(plan.parts[self._ranks.rank], filler=batch.selection.filler), 0

    def _agreed(self, part: RankPlan, *, filler: bool) -> RankPlan:
        if not self._ranks.group_ranks and not filler:
            return part
        values = {field.name: getattr(part, field.name) for field in fields(RankPlan)}
        return AgreedPlan(**values, agreed_by=self._ranks.group_ranks, filler=filler)

    def _data(self, batch: BatchData, plan: RankPlan | Plan) -> tuple[dict[str, Any], int]:
        """This rank's data, and its number of targets."""
        batch.read_ahead(local_sequences(plan))
        data: dict[str, Any] = local_rows(
            plan, batch.sample, lambda number: _layout(batch, number), self._config.token_fields
        )
        if batch.selection.filler:
            data = without_targets(data)
        targets = num_targets(data)
        data["batch_fingerprint"] = fingerprint_tensor(plan.fingerprint)
        data = add_sample_data(data, batch, plan, self._config)
        return {name: self._pinned(value) for name, value in data.items()}, targets

    def _pinned(self, value: Any) -> Any:
        return value.pin_memory() if self._pins and isinstance(value, Tensor) else value


def _layout(batch: BatchData, number: int) -> Mask:
    masks: Any = batch.masks(number)
    return masks if isinstance(masks, Mask) else layout_mask(masks)

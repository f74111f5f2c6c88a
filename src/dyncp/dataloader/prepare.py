"""Prepares one batch on this rank: the agreed plan, and the tokens that it gives the rank."""

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from dyncp.dataloader.batch_data import BatchData
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.exchange import Decision, Exchange
from dyncp.dataloader.local_tokens import local_rows, local_sequences, num_targets, without_targets
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
    executor over these ranks reads that instead of asking them again."""

    agreed_by: tuple[int, ...] = ()


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
            self._exchange.check_batch(selection, decision, batch.batch().fingerprint)
        plan, size = (
            self._static(step, batch, decision) if decision.static else self._part(batch, decision)
        )
        self._exchange.leave(selection, decision)
        data, targets = self._data(batch, plan)
        part = plan.parts[0] if isinstance(plan, Plan) else plan
        record = BatchRecord.of(part, decision.seconds, size, static=decision.static)
        targets = targets if self._ranks.counts_targets else 0
        return Prepared(data, plan, selection.end, record, targets)

    def _part(self, batch: BatchData, decision: Decision) -> tuple[RankPlan | Plan, int]:
        ranks = range(self._ranks.num_ranks) if self._ranks.rank is None else [self._ranks.rank]
        encoded = [self._exchange.part(batch.selection, decision, rank) for rank in ranks]
        parts = tuple(decode_part(part) for part in encoded)
        size = max(map(len, encoded))
        return (Plan(parts) if self._ranks.rank is None else self._agreed(parts[0])), size

    def _static(
        self, step: int, batch: BatchData, decision: Decision
    ) -> tuple[RankPlan | Plan, int]:
        if not self._ranks.member:
            logger.warning(
                "batch %d of epoch %d gets a static plan: %s",
                batch.selection.number,
                batch.selection.end.epoch,
                decision.reason,
            )
        plan = self._planning.static_plan(batch.batch())
        self._exchange.agree_on_static(step, batch.selection, plan.digest)
        if self._ranks.rank is None:
            return plan, 0
        return self._agreed(plan.parts[self._ranks.rank]), 0

    def _agreed(self, part: RankPlan) -> RankPlan:
        if not self._ranks.group_ranks:
            return part
        values = {field.name: getattr(part, field.name) for field in fields(RankPlan)}
        return AgreedPlan(**values, agreed_by=self._ranks.group_ranks)

    def _data(self, batch: BatchData, plan: RankPlan | Plan) -> tuple[dict[str, Any], int]:
        """This rank's data, and its number of targets."""
        batch.read_ahead(local_sequences(plan))
        data: dict[str, Any] = local_rows(
            plan, batch.sample, lambda number: _layout(batch, number), self._config.token_fields
        )
        if batch.selection.filler:
            data = without_targets(data)
        targets = num_targets(data)
        data = add_sample_data(data, batch, plan, self._config)
        return {name: self._pinned(value) for name, value in data.items()}, targets

    def _pinned(self, value: Any) -> Any:
        return value.pin_memory() if self._pins and isinstance(value, Tensor) else value


def _layout(batch: BatchData, number: int) -> Mask:
    masks: Any = batch.masks(number)
    return masks if isinstance(masks, Mask) else layout_mask(masks)

"""Prepares one batch on this rank: its samples and masks, the agreed plan, and the local data.

Samples are read and masks are made when they are first needed. `BatchData` caches them for the
thread that plans the batch and the thread that delivers it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dyncp.blocks import DEFAULT_MASK, Batch
from dyncp.checks import instance_of
from dyncp.dataloader.agreement import Alone, Record
from dyncp.dataloader.batching import SelectedBatch, SelectedUpdate
from dyncp.dataloader.options import LoaderConfig
from dyncp.dataloader.peers import PeerError, Text
from dyncp.dataloader.planning import BatchPlanner
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.state import Position
from dyncp.masks import Mask, MaskFunction, NamedMasks
from dyncp.plan import AgreedPlan, Plan, RankPlan, decode_part
from dyncp.planner.process import PlanHere, PlanProcess, PlanReply
from dyncp.samples.fields import SampleError, cut_sample, digest_of, input_ids_of, sample_bytes
from dyncp.samples.local_data import (
    NO_SAMPLE,
    LocalData,
    LocalSequence,
    collated,
    fingerprint_tensor,
    local_rows,
    local_sequences,
    sample_ids_of,
)
from dyncp.samples.reading import SeededRandom
from dyncp.samples.source import SampleEntry, SampleSource
from dyncp.samples.targets import check_targets, loss_divisor, num_targets, without_targets

logger = logging.getLogger(__name__)

DIGITS = 8  # hexadecimal digits of a sample's digests; a record may contain a thousand digests
SampleMasks = dict[str, Mask]  # by name


class MaskMaker:
    """Calls the mask function with the length if it needs nothing else, or with the sample."""

    def __init__(self, mask_fn: Any, seed: int = 0) -> None:
        instance_of("mask_fn", mask_fn, Callable, "a function of a sample, such as masks.causal")
        self._mask_fn, self._seed = mask_fn, seed
        # Assumed until a call with a length fails.
        self.takes_lengths = isinstance(mask_fn, MaskFunction | NamedMasks)

    def of_length(self, length: int, index: int) -> SampleMasks | None:
        """The masks of a sample of this length; None if the mask function needs the sample."""
        if not self.takes_lengths:
            return None
        try:
            return _checked(self._mask_fn(length), length, index)
        except Exception:  # it needs the sample; a real mistake is raised by `of_sample`, too
            self.takes_lengths = False
            return None

    def of_sample(self, sample: Any, entry: SampleEntry) -> SampleMasks:
        """The masks of a whole sample."""
        length = len(input_ids_of(sample, entry.index))
        try:
            with SeededRandom(self._seed, entry.epoch, entry.index, "mask"):
                result = self._mask_fn(sample)
        except Exception as error:
            raise SampleError(entry.index, "the mask", error) from error
        return _checked(result, length, entry.index)

    def digest(self, sample: Any, index: int) -> str:
        """Digest of a sample's masks, to compare with other ranks."""
        try:
            return _masks_digest(self.of_sample(sample, SampleEntry(0, index, 0)))
        except Exception as error:  # a sampler may skip this sample; otherwise training raises it
            return type(error).__name__


def _checked(result: Any, length: int, index: int) -> SampleMasks:
    """The masks that a mask function returned for a sample of this length, by name."""
    masks = dict(result) if isinstance(result, Mapping) else {DEFAULT_MASK: result}
    for mask in masks.values():
        given = f"the mask of sample {index}"
        instance_of(given, mask, Mask, "a Mask, or a dict of masks by name")
        if mask.length != length:
            raise ValueError(
                f"the mask function gave a mask of {mask.length} tokens for sample {index}, "
                f"which has {length}"
            )
    return masks


def _cut_mask(mask: Mask, start: int, end: int) -> Mask:
    """The part of a mask for the tokens from `start` to `end`."""
    if mask.length == end - start:
        return mask
    positions, weights = (x if x is None else x[start:end] for x in (mask.positions, mask.weights))
    targets = None if mask.targets is None else mask.targets[start:end]
    if targets is not None:
        targets = np.where((targets >= start) & (targets < end), targets - start, -1)
    branches = mask.branches
    if branches is not None:
        branches = branches[((branches >= start) & (branches < end)).all(axis=1)] - start
    ranges = mask.ranges[start:end].clip(start, end) - start
    return Mask(ranges, positions, targets, mask.name, branches, weights)


def _masks_digest(masks: SampleMasks) -> str:
    text = [f"{name} {mask.digest.hex()}" for name, mask in sorted(masks.items())]
    return digest_of(text)[:DIGITS] if text else ""


class PreparesAhead(Protocol):
    """The part of DCPExecutor's interface that the loader uses."""

    transport: Any

    def prepare_ahead(self, plan: Plan | RankPlan) -> None: ...


@dataclass(frozen=True, eq=False)
class LoaderContext:
    """Everything that an iteration needs from its loader."""

    config: LoaderConfig
    ranks: LoaderRanks
    source: SampleSource
    mask_maker: MaskMaker
    planner: BatchPlanner
    processes: tuple[PlanHere | PlanProcess, ...] = ()
    executor: PreparesAhead | None = None  # will run the plans


class BatchData:
    """The samples, masks and plan of one batch, for the thread that plans it and the thread that
    delivers it."""

    def __init__(self, context: LoaderContext, selection: SelectedBatch) -> None:
        self.selection = selection
        self.plans = context.ranks.plans(selection.number)  # this rank plans it ...
        self.planned: PlanReply | BaseException | None = None  # ... which gave this
        self._doing: Text = "filling it"
        self._source, self._mask_maker = context.source, context.mask_maker
        self._token_fields, self.checks = context.config.token_fields, context.source.checks
        self._read: dict[int, Any] = {}
        self._masks: dict[int, SampleMasks] = {}  # of whole samples
        self._batch: Batch | None = None
        self._lock = threading.RLock()

    def says(self, text: Text) -> None:
        """What is being done for the plan of this batch."""
        self._doing = text

    @property
    def doing(self) -> str:
        return self._doing() if callable(self._doing) else self._doing

    def sample(self, number: int) -> Any:
        """Sample `number` of the batch, cut to the tokens that the batch uses."""
        entry, sample = self.selection.entries[number], self._whole(number)
        if entry.length == entry.whole:
            return sample
        return cut_sample(sample, entry.start, entry.length, entry.index, self._token_fields)

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Announces samples that will be needed soon."""
        entries = self.selection.entries
        self._source.read_ahead(entries[n] for n in numbers if n not in self._read)

    def sequence(self, number: int) -> LocalSequence:
        """Sample `number` of the batch and its masks, for this rank's tokens of it."""
        entry = self.selection.entries[number]
        check_targets(self._whole(number), self._whole_masks(number), entry.index)
        return LocalSequence(self.sample(number), self.masks(number), entry.index)

    def masks(self, number: int) -> SampleMasks:
        """The masks of sample `number` of the batch, cut like the sample."""
        entry, whole = self.selection.entries[number], self._whole_masks(number)
        ends = entry.start, entry.start + entry.length
        return {name: _cut_mask(mask, *ends) for name, mask in whole.items()}

    def _whole_masks(self, number: int) -> SampleMasks:
        """The masks of a whole sample: they may depend on any of its fields."""
        with self._lock:
            if number not in self._masks:
                entry, masks = self.selection.entries[number], None
                if self._source.knows_lengths:
                    masks = self._mask_maker.of_length(entry.whole, entry.index)
                if masks is None:
                    masks = self._mask_maker.of_sample(self._whole(number), entry)
                self._masks[number] = masks
            return self._masks[number]

    def batch(self) -> Batch:
        """The batch as the planner sees it."""
        with self._lock:
            if self._batch is None:
                numbers = range(len(self.selection.entries))
                if self._source.knows_lengths and not self._mask_maker.takes_lengths:
                    self.read_ahead(numbers)
                indices = [entry.index for entry in self.selection.entries]
                self._batch = Batch.of([self.masks(number) for number in numbers], indices)
            return self._batch

    def digests(self, numbers: Iterable[int]) -> dict[str, tuple[int, str, str]]:
        """By number: the index of a sample, and digests of its masks and of its content, as far as
        masks have been made and samples have been read. Other ranks compare them with theirs."""
        entries = self.selection.entries
        with self._lock:
            return {
                str(n): (
                    entries[n].index,
                    _masks_digest(self._masks.get(n, {})),
                    self._content(n) if n in self._read else "",
                )
                for n in numbers
            }

    def _content(self, number: int) -> str:
        index = self.selection.entries[number].index
        return digest_of(sample_bytes(self.sample(number), index, self._token_fields))[:DIGITS]

    def _whole(self, number: int) -> Any:
        with self._lock:
            if number not in self._read:
                self._read[number] = self._source.read(self.selection.entries[number])
            return self._read[number]


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Measurements of one batch. `plan_seconds` is the planner's time, `stall_seconds` how long
    training waited, `queue_depth` how many batches were ready when it asked. `moved_bytes` is the
    traffic of one attention layer: all masks, forward and backward, all ranks."""

    plan_seconds: float
    part_bytes: int
    moved_bytes: int
    compute_imbalance: float
    token_imbalance: float
    solver: str
    static: bool  # a static plan, because the planner failed
    stall_seconds: float = 0.0
    queue_depth: int = 0


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """A batch that is ready for training. `targets` is the number of targets of this rank,
    `compared` is what must be equal on all members of the replica. `completes` says that it is the
    last one of its update."""

    data: dict[str, Any]
    plan: RankPlan | Plan
    end: Position
    record: BatchRecord
    targets: int
    compared: Record
    completes: bool = False


class BatchPreparer:
    """Turns the batches of an update into plans and local data on which all ranks have agreed."""

    def __init__(self, context: LoaderContext, agreement: Alone) -> None:
        config = self._config = context.config
        ranks = self._ranks = context.ranks
        self._agreement = agreement
        self._own = range(ranks.num_ranks) if ranks.rank is None else [ranks.rank]
        pin = config.tuning.pin_memory
        self._pins = torch.cuda.is_available() if pin is None else pin

    def prepare_update(
        self, update: SelectedUpdate, batches: Iterable[BatchData]
    ) -> list[PreparedBatch]:
        """The batches of an update, once all ranks have agreed on them."""
        found = [(batch.selection, self._prepare(batch)) for batch in batches]
        prepared = [one for _, one in found if one is not None]
        verdict = self._agreement.conclude(
            {
                "update": update.fingerprint,
                "last": update.selections[-1].number,
                "targets": sum(one.targets for one in prepared),
                "batches": {
                    str(selection.number): {
                        "samples": selection.fingerprint,
                        "about": str(selection),
                        "plan": "",
                        "digests": {},
                    }
                    | ({} if one is None else one.compared)
                    for selection, one in found
                },
            }
        )
        if len(prepared) < len(found):
            raise PeerError("another rank has planned other batches, and said they are the same")
        items = verdict["targets"] if update.known_items is None else update.known_items
        divisor = {"num_items_in_batch": loss_divisor(items)}
        return [
            replace(
                one,
                data=LocalData(one.data | divisor),
                end=replace(one.end, items=items),
                completes=one is prepared[-1],
            )
            for one in prepared
        ]

    def _prepare(self, batch: BatchData) -> PreparedBatch | None:
        """This rank's part of a batch; None if the rank that plans it has another batch."""
        reply = batch.planned if batch.plans else self._published(batch.selection)
        if isinstance(reply, BaseException):
            raise reply
        if reply is None:
            return None
        parts = tuple(decode_part(part) for part in reply.parts)
        plan = Plan(parts) if self._ranks.rank is None else self._agreed(parts[0], batch)
        data, targets = self._data(batch, plan)
        held = range(len(parts[0].lengths)) if batch.plans else local_sequences(plan)
        record = BatchRecord(
            plan_seconds=reply.seconds,
            part_bytes=max(map(len, reply.parts)),
            moved_bytes=sum(sum(both) for both in parts[0].declared_bytes.values()),
            compute_imbalance=parts[0].balance.compute_max_over_mean,
            token_imbalance=parts[0].balance.tokens_max_over_mean,
            solver=parts[0].solver,
            static=bool(reply.static_because),
        )
        several = self._ranks.num_members > 1  # there is another rank to compare with
        compared = {"plan": plan.digest, "digests": batch.digests(held) if several else {}}
        targets = targets if self._ranks.counts_targets else 0
        return PreparedBatch(data, plan, batch.selection.end, record, targets, compared)

    def _published(self, selection: SelectedBatch) -> PlanReply | None:
        """This rank's part of a plan that another rank made."""
        found = self._agreement.part(selection)
        if found is None:
            return None
        about, part = found
        return PlanReply((part,), about["seconds"], static_because=about["static_because"])

    def _agreed(self, part: RankPlan, batch: BatchData) -> RankPlan:
        found, wanted = (part.rank, part.num_ranks), (self._own[0], self._ranks.num_ranks)
        if found != wanted:
            text = "the part of rank {} of {}"
            raise PeerError(f"the store has {text.format(*found)}, not {text.format(*wanted)}")
        agreed_by, filler = self._ranks.group_ranks, batch.selection.filler
        if not agreed_by and not filler:
            return part
        values = {field.name: getattr(part, field.name) for field in fields(RankPlan) if field.init}
        return AgreedPlan(**values, agreed_by=agreed_by, filler=filler)

    def _data(self, batch: BatchData, plan: RankPlan | Plan) -> tuple[dict[str, Any], int]:
        """This rank's local data, and its number of targets, which `collate` may have changed."""
        number, fields = batch.selection.number, self._config.token_fields
        self._agreement.progress.says("deliver", f"reading samples of batch {number}")
        batch.read_ahead(local_sequences(plan))
        rows: dict[str, Any] = local_rows(plan, batch.sequence, fields, checks=batch.checks)
        if batch.selection.filler:
            rows = without_targets(rows)
        data = self._add_sample_data(rows, plan, batch)
        counted = data if "target_weights" in data or "shift_labels" in data else rows
        targets = 0 if batch.selection.filler else num_targets(counted)
        data["batch_fingerprint"] = fingerprint_tensor(plan.fingerprint)
        if self._pins:
            tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
            data |= {name: value.pin_memory() for name, value in tensors.items()}
        return data, targets

    def _add_sample_data(
        self, data: dict[str, Any], plan: RankPlan | Plan, batch: BatchData
    ) -> dict[str, Any]:
        """Adds `sample_ids`, then calls the user's `collate` with the samples that this rank has
        tokens of, in the batch's order; none for a filler."""
        config, selection = self._config, batch.selection
        if config.sample_ids:
            indices = [NO_SAMPLE if selection.filler else e.index for e in selection.entries]
            data["sample_ids"] = sample_ids_of(plan, indices)
        if config.collate is None:
            return data
        samples = [] if selection.filler else map(batch.sample, local_sequences(plan))
        return collated(config.collate, data, list(samples))

"""Prepares one batch on this rank: its samples and masks, the agreed plan, and the local data.

Samples are read and masks are made when they are first needed. `BatchData` caches them for the
thread that plans the batch and the thread that delivers it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dyncp.blocks import DEFAULT_MASK, Batch
from dyncp.checks import instance_of
from dyncp.dataloader.batching import SelectedBatch
from dyncp.dataloader.dataset import SampleEntry, SampleSource
from dyncp.dataloader.decision import Decision, PlanExchange, SampleDigests
from dyncp.dataloader.local_fields import (
    fingerprint_tensor,
    local_rows,
    local_sequences,
    num_targets,
    rows_and_sequences,
    without_targets,
)
from dyncp.dataloader.options import Collate, LoaderConfig, digest_of
from dyncp.dataloader.peers import Location
from dyncp.dataloader.planning import BatchPlanner
from dyncp.dataloader.ranks import LoaderRanks, PeerError
from dyncp.dataloader.reading import (
    SampleError,
    SeededRandom,
    cut_sample,
    input_ids_of,
    sample_bytes,
)
from dyncp.dataloader.state import Position
from dyncp.masks import Mask, MaskFunction, NamedMasks
from dyncp.plan import Plan, RankPlan, decode_part
from dyncp.planner.process import PlanHere, PlanProcess

logger = logging.getLogger(__name__)

NO_SAMPLE = -1  # in sample_ids: a padding row, or a row of a filler
DIGITS = 8  # hexadecimal digits of a sample's digests; a decision may contain a thousand digests
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
    locations: Sequence[Location] = ()  # where all processes run
    executor: PreparesAhead | None = None  # will run the plans


class BatchData:
    """The samples and masks of one batch, for the thread that plans it and the thread that delivers
    it."""

    def __init__(self, context: LoaderContext, selection: SelectedBatch) -> None:
        self.selection = selection
        self._source, self._mask_maker = context.source, context.mask_maker
        self._token_fields = context.config.token_fields
        self._compared = context.ranks.num_members > 1
        self._read: dict[int, Any] = {}
        self._masks: dict[int, SampleMasks] = {}
        self._batch: Batch | None = None
        self._lock = threading.RLock()

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

    def masks(self, number: int) -> SampleMasks:
        """The masks of sample `number` of the batch. They are made for the whole sample, since they
        may depend on any of its fields, and then cut."""
        with self._lock:
            if number not in self._masks:
                entry, masks = self.selection.entries[number], None
                if self._source.knows_lengths:
                    masks = self._mask_maker.of_length(entry.whole, entry.index)
                if masks is None:
                    masks = self._mask_maker.of_sample(self._whole(number), entry)
                ends = entry.start, entry.start + entry.length
                self._masks[number] = {name: _cut_mask(mask, *ends) for name, mask in masks.items()}
            return self._masks[number]

    def batch(self) -> Batch:
        """The batch as the planner sees it."""
        with self._lock:
            if self._batch is None:
                numbers = range(len(self.selection.entries))
                if not self.needs_no_reading():
                    self.read_ahead(numbers)
                indices = [entry.index for entry in self.selection.entries]
                self._batch = Batch.of([self.masks(number) for number in numbers], indices)
            return self._batch

    def digests(self) -> list[SampleDigests]:
        """Digests of all samples, as far as masks have been made and samples have been read; empty
        if there is no other rank to compare them with."""
        if not self._compared:
            return []
        with self._lock:
            return [
                SampleDigests(
                    entry.index,
                    entry.length,
                    _masks_digest(self._masks.get(number, {})),
                    self._content(number) if number in self._read else "",
                )
                for number, entry in enumerate(self.selection.entries)
            ]

    def needs_no_reading(self) -> bool:
        """Whether `batch` can be made without reading further samples."""
        return not self._source.knows_lengths or self._mask_maker.takes_lengths

    def _content(self, number: int) -> str:
        index = self.selection.entries[number].index
        return digest_of(sample_bytes(self.sample(number), index, self._token_fields))[:DIGITS]

    def _whole(self, number: int) -> Any:
        with self._lock:
            if number not in self._read:
                self._read[number] = self._source.read(self.selection.entries[number])
            return self._read[number]


@dataclass(frozen=True, eq=False)
class AgreedPlan(RankPlan):
    """A part that the global ranks `agreed_by` have agreed on: `prepare` of an executor over these
    ranks does not compare it again. A `filler` is a placeholder with a sample of another replica,
    if the last round has no batch left for this one."""

    agreed_by: tuple[int, ...] = ()
    filler: bool = False


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
    """A batch that is ready for training. `targets` is the number of targets of this rank."""

    data: dict[str, Any]
    plan: RankPlan | Plan
    end: Position
    record: BatchRecord
    targets: int = 0


class BatchPreparer:
    """Turns the decision about a batch into its plan and local data."""

    def __init__(self, context: LoaderContext, exchange: PlanExchange) -> None:
        config = self._config = context.config
        ranks = self._ranks = context.ranks
        self._planner, self._exchange = context.planner, exchange
        self._own = range(ranks.num_ranks) if ranks.rank is None else [ranks.rank]
        pin = config.pin_memory
        self._pins = torch.cuda.is_available() if pin is None else pin

    def prepare(self, step: int, batch: BatchData) -> PreparedBatch:
        selection = batch.selection
        decision = self._exchange.decision(step, selection)
        make_parts = self._static_parts if decision.static else self._planned_parts
        parts = make_parts(batch, decision)
        plan = Plan(parts) if self._ranks.rank is None else self._agreed(parts[0], batch)
        data, targets = self._data(batch, plan)
        shared = self._shared(parts[0])
        fingerprint = batch.batch().fingerprint if batch.needs_no_reading() else ""
        self._exchange.check_samples(selection, decision, batch.digests(), shared, fingerprint)
        if decision.static:
            self._exchange.check_static(selection, plan.digest)
        self._exchange.leave(selection, decision, shared)
        record = BatchRecord(
            plan_seconds=decision.seconds,
            part_bytes=0 if decision.static else max(decision.sizes[rank] for rank in self._own),
            moved_bytes=sum(sum(both) for both in parts[0].declared_bytes.values()),
            compute_imbalance=parts[0].balance.compute_max_over_mean,
            token_imbalance=parts[0].balance.tokens_max_over_mean,
            solver=parts[0].solver,
            static=decision.static,
        )
        targets = targets if self._ranks.counts_targets else 0
        return PreparedBatch(data, plan, selection.end, record, targets)

    def _planned_parts(self, batch: BatchData, decision: Decision) -> tuple[RankPlan, ...]:
        """This process's parts of the published plan."""
        parts = []
        for rank in self._own:
            part = decode_part(self._exchange.part(batch.selection, decision, rank))
            found = (part.rank, part.num_ranks, part.digest, part.fingerprint)
            wanted = (rank, self._ranks.num_ranks, decision.digest, decision.batch)
            if found != wanted:
                text = "rank {} of {}, plan {}, batch {}"
                raise PeerError(
                    f"the store has a part of another plan: {text.format(*found)}; expected "
                    f"{text.format(*wanted)}"
                )
            parts.append(part)
        return tuple(parts)

    def _static_parts(self, batch: BatchData, decision: Decision) -> tuple[RankPlan, ...]:
        """This process's parts of the static plan, which every process makes itself."""
        if not self._ranks.member:
            logger.warning(
                "batch %d of epoch %d gets a static plan: %s",
                batch.selection.number,
                batch.selection.end.epoch,
                decision.reason,
            )
        plan = self._planner.static_plan(batch.batch())
        return tuple(plan.parts[rank] for rank in self._own)

    def _agreed(self, part: RankPlan, batch: BatchData) -> RankPlan:
        agreed_by, filler = self._ranks.group_ranks, batch.selection.filler
        if not agreed_by and not filler:
            return part
        values = {field.name: getattr(part, field.name) for field in fields(RankPlan) if field.init}
        return AgreedPlan(**values, agreed_by=agreed_by, filler=filler)

    def _data(self, batch: BatchData, plan: RankPlan | Plan) -> tuple[dict[str, Any], int]:
        """This rank's local data, and its number of targets."""
        batch.read_ahead(local_sequences(plan))
        fields = self._config.token_fields
        rows: dict[str, Any] = local_rows(plan, batch.sample, batch.masks, fields)
        if batch.selection.filler:
            rows = without_targets(rows)
        targets = num_targets(rows)
        rows["batch_fingerprint"] = fingerprint_tensor(plan.fingerprint)
        data = self._add_sample_data(rows, plan, batch)
        if self._pins:
            tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
            data |= {name: value.pin_memory() for name, value in tensors.items()}
        return data, targets

    def _add_sample_data(
        self, data: dict[str, Any], plan: RankPlan | Plan, batch: BatchData
    ) -> dict[str, Any]:
        """Adds `sample_ids` and `sample_fields`, then calls the user's `collate`, with the samples
        that this rank has tokens of, in the batch's order; none for a filler."""
        config, selection = self._config, batch.selection
        if config.sample_ids:
            data["sample_ids"] = _sample_ids(plan, selection)[None]
        if not (config.sample_fields or config.collate):
            return data
        numbers = [] if selection.filler else local_sequences(plan)
        samples = [batch.sample(number) for number in numbers]
        for name in config.sample_fields:
            for number, sample in zip(numbers, samples, strict=True):
                if name not in sample:
                    raise ValueError(
                        f"sample {selection.entries[number].index} has no field {name!r}, which "
                        "sample_fields declares"
                    )
            data[name] = [sample[name] for sample in samples]
        return _collated(config.collate, data, samples) if config.collate else data

    def _shared(self, part: RankPlan) -> list[int]:
        """The samples that several members have tokens of, by their numbers in the batch."""
        if self._ranks.num_members == 1:
            return []
        if self._ranks.num_members > self._ranks.num_ranks:  # tensor-parallel peers share them all
            return list(range(len(part.lengths)))
        owners = np.unique(np.stack([part.blocks.sequence, part.blocks.owner]), axis=1)[0]
        sequences, ranks = np.unique(owners, return_counts=True)
        return [int(number) for number in sequences[ranks > 1]]


def _sample_ids(plan: RankPlan | Plan, selection: SelectedBatch) -> Tensor:
    """The index in the dataset of each local row's sample."""
    indices = np.array([entry.index for entry in selection.entries], np.int64)
    _, sequence = rows_and_sequences(plan)
    none = (sequence < 0) | selection.filler
    return torch.from_numpy(np.where(none, NO_SAMPLE, indices[sequence]))


def _collated(collate: Collate, data: dict[str, Any], samples: list[Any]) -> dict[str, Any]:
    try:
        found = collate(data, samples)
    except Exception as error:
        raise RuntimeError(f"collate raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(
            f"collate returned {type(found).__name__}; expected a dict: the local data, with any "
            "further fields"
        )
    return dict(found)

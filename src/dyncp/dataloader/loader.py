"""DCPDataLoader: yields each rank's data and plan of every batch, prepared ahead of training."""

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cache
from typing import Any

import torch.distributed as dist

from dyncp.dataloader.agreement import Together
from dyncp.dataloader.batching import BatchSelector
from dyncp.dataloader.look_ahead import LoaderMetrics, LookAhead
from dyncp.dataloader.options import (
    Budget,
    Collate,
    LoaderConfig,
    LoaderTuning,
    describe_schedule,
    integer_option,
)
from dyncp.dataloader.planning import BatchPlanner
from dyncp.dataloader.prepare import LoaderContext, MaskMaker, PreparesAhead
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.state import Position, from_state, to_state
from dyncp.gradients import YieldedBatches
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig
from dyncp.samples import SampleLimits, SampleSource, describe_sampler, open_source
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Any], RankPlan | Plan]

# Options that decide which batches are made: a state is only loaded if they are unchanged.
OPTIONS_OF_BATCHES = (
    "seed", "shuffle", "accumulation_steps", "max_length", "too_long", "drop_last", "bad_samples",
)  # fmt: skip


class DCPDataLoader:
    """Yields `(local_data, plan)` for every batch of `dataset`, planned ahead of training.

    Samples of `dataset` are dicts with `input_ids`, read by index or by iteration.
    `mask_fn(sample)` returns the mask of a sample, or a dict of masks by name. Plans are made for
    the ranks of `group`: a ProcessGroup, or a DeviceMesh, whose dimension "cp" runs the plans. Its
    dimensions named dp... are replicas, which get different batches; ranks along "tp" get the same
    data, and each has a share of the heads of `model`. The default is the world, or a single rank.
    `virtual_ranks=N` plans for N ranks inside this process, and yields whole Plans with the data of
    all ranks.

    `model` (an AttentionShape, a ModelConfig, a Transformers config, or a model that has one)
    describes the layers to the planner; `topology` the cluster (default: nodes in torchrun's layout
    with devices like this process's). `planner` has the planner's options. With `executor=` (the
    DCPExecutor that will run the plans), most of the work of `executor.prepare(plan)` is done in
    the background. The tables in docs/dataloader.md explain all options.

    Batches: `tokens_per_batch` is the token budget of one plan, summed over its ranks (None: 8,192
    per rank); a function gets the number of batches so far and returns the next budget.
    `accumulation_steps` batches make one optimiser step. `shuffle` permutes the samples by `seed`
    and epoch; `sampler` yields indices, `batch_sampler` lists of indices. With `lengths` (an array,
    or the name of a column), batches are made without reading samples. `too_long` is what to do
    with samples longer than `max_length` (None: the budget): error, truncate, drop or split.
    `bad_samples` is what to do with samples that cannot be read, are malformed or have no tokens:
    error, drop, or drop only those without tokens (drop_empty). The metrics count dropped samples.
    `drop_last` drops a last batch or optimiser step that is not full. `evaluation` keeps the
    dataset's order and makes forward-only plans.

    Data: local rows are padded to a multiple of `local_multiple`. `token_fields` maps names of
    further per-token fields to their token dimension, and `sample_ids` adds each token's sample
    index. `collate(local_data, samples)` returns the data to yield. `tuning` has the options that
    change how the loader works, not what training gets.

    All processes must make their loaders in the same order and with equal arguments. `close()`, the
    end of a `with` block, or the end of the process ends the planning processes.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: Any,
        mask_fn: Any,
        *,
        model: Any = None,
        group: Any = None,
        virtual_ranks: int | None = None,
        executor: PreparesAhead | None = None,
        topology: Topology | None = None,
        planner: PlannerConfig | None = None,
        tokens_per_batch: Budget | None = LoaderConfig.tokens_per_batch,
        accumulation_steps: int = LoaderConfig.accumulation_steps,
        shuffle: bool = LoaderConfig.shuffle,
        seed: int = LoaderConfig.seed,
        sampler: Iterable[int] | None = LoaderConfig.sampler,
        batch_sampler: Iterable[Iterable[int]] | None = LoaderConfig.batch_sampler,
        lengths: Any = LoaderConfig.lengths,
        max_length: int | None = LoaderConfig.max_length,
        too_long: str = LoaderConfig.too_long,
        bad_samples: str = LoaderConfig.bad_samples,
        drop_last: bool = LoaderConfig.drop_last,
        evaluation: bool = LoaderConfig.evaluation,
        local_multiple: int = LoaderConfig.local_multiple,
        token_fields: Mapping[str, int] | None = None,
        sample_ids: bool = LoaderConfig.sample_ids,
        collate: Collate | None = LoaderConfig.collate,
        tuning: LoaderTuning | None = None,
    ) -> None:
        arguments = locals()
        ranks = self.ranks = LoaderRanks.of(group, virtual_ranks)
        self._is_alone = ranks.rank == 0 and not ranks.all_ranks  # there is no process group
        self._together = Together(ranks)
        with self._together.making(LoaderTuning.store_timeout) as agreement:
            config = self.config = LoaderConfig.of(arguments)
            priced = getattr(executor, "priced", (True, True))  # a DCPExecutor's defaults
            planned = BatchPlanner.of(ranks, model, topology, config, planner, priced)
            self.shape, self.topology, self.cost = planned.shape, planned.topology, planned.cost
            _check_executor(executor, ranks)
            most = planned.config.max_tokens_per_rank
            self._budget = config.budget(ranks.num_ranks, most)
            if isinstance(self._budget, int):
                planned.check_tokens(self._budget, "tokens_per_batch is")
            self._schedule = describe_schedule(self._budget)
            self._order = describe_sampler(config.samples.order)
            limits = SampleLimits.of(model)
            source = open_source(dataset, replace(config.samples, limits=limits))
            mask_maker = MaskMaker(mask_fn, config.seed)
            settings: dict[str, str] = {}
            if ranks.shared:  # the other ranks need equal settings
                settings = {
                    **config.shared_settings(),
                    **planned.shared_settings(),
                    **source.identity(mask_maker.digest),
                    "order": self._order,
                    "schedule": self._schedule,
                }
            agreement.compare_settings(settings)
        self._seconds = planned.sample_seconds(mask_fn)
        processes = planned.make_processes(config.planning_processes(ranks.num_members))
        self.metrics = LoaderMetrics(processes)
        self._context = LoaderContext(
            config, ranks, source, mask_maker, planned, processes, executor
        )
        self._position, self._resuming = Position(), False
        self._completes_update = False
        self._yielded = YieldedBatches(group)
        self._counted: dict[Any, int] = {}  # the result of the latest `len`, by what it depends on
        self._running: list[LookAhead] = []  # the running iteration, if any
        self._resources = (*processes, source, self._together)
        weakref.finalize(self, _close, self._running, self._resources, at_exit=True)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def completes_update(self) -> bool:
        """Whether the batch that was yielded last is the last one of its optimiser step: of
        `accumulation_steps` batches, or of fewer at the end of an epoch."""
        return self._completes_update

    @property
    def planning_pids(self) -> list[int]:
        """Process ids of the running planning processes."""
        return [process.pid for process in self._context.processes if process.pid is not None]

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration start at the beginning of `epoch`, and ends a running iteration.
        Does nothing if the loader is in this epoch already, so a loaded state is kept."""
        epoch = integer_option("epoch", epoch, 0)
        if epoch != self._position.epoch:
            _close(self._running)
            self._position, self._resuming = self._position.next_epoch(epoch), False

    def __len__(self) -> int:
        """Number of batches that each rank gets in this epoch. The lengths of all samples must be
        known: from a list, from `lengths=`, or because an epoch has read all samples."""
        sampler, source = self.config.batch_sampler, self._context.source
        if not source.knows_lengths and isinstance(sampler, Sized):
            return self._selector().num_rounds(len(sampler))
        start = self._start()
        start = replace(source.rewind(start), total=start.total - start.batches)
        key = start.epoch, start.total if callable(self._budget) else 0, self._budget
        if key not in self._counted or self.config.samples.order is not None:
            by_lengths = source.by_lengths()
            if by_lengths is None:
                raise TypeError(
                    "the number of batches depends on the lengths of all samples; pass lengths= "
                    "(an array, or the name of a column) to know it before an epoch has read them"
                )
            with by_lengths.undisturbed():
                self._counted = {key: self._selector(by_lengths).num_batches(start)}
        return self._counted[key]

    @property
    def remaining(self) -> int:
        """Number of batches that the next iteration yields: `len`, or the rest of an epoch if a
        state within it has just been loaded."""
        done = self._position.batches if self._resuming else 0
        return len(self) - done // self.ranks.num_replicas

    def __iter__(self) -> Iterator[Batch]:
        """Starts at the beginning of the epoch, or at a state that has just been loaded. Ends a
        running iteration: there is one at a time."""
        _close(self._running)
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this loader was made before torch.distributed was initialised and would give all "
                f"data to each of the {dist.get_world_size()} ranks; make it after "
                "init_process_group, or pass virtual_ranks=1"
            )
        if not self._resuming and self._position.started:  # the last iteration ended early
            self._position = self._context.source.rewind(self._position)
        self._context.source.open()
        start, selector = self._start(), self._selector()
        updates, first = selector.updates(start), selector.first_number(start)
        agreement = self._together.begin(first, self.config.tuning.store_timeout)
        look_ahead = LookAhead(self._context, agreement, updates, start)
        self._running.append(look_ahead)
        return self._batches(look_ahead)

    def _batches(self, look_ahead: LookAhead) -> Iterator[Batch]:
        self._yielded.begin()
        try:
            while (prepared := look_ahead.take()) is not None:
                self.metrics.record(prepared.record)
                self._position, self._resuming = prepared.end, False
                self._completes_update = prepared.completes
                if not self.config.evaluation:
                    self._yielded.add(prepared.plan, completes=prepared.completes)
                yield prepared.data, prepared.plan
            if self._position.started:
                self._position = self._position.next_epoch(self._position.epoch + 1)
            self._resuming = False
        finally:
            look_ahead.close()

    def state_dict(self) -> dict[str, Any]:
        """The position of this loader: after the last batch that it yielded, or, after a complete
        loop, at the start of the next epoch. Equal on all ranks. Raises ValueError if the dataset's
        own state cannot be saved."""
        if self._position.started and not (self._resuming or self._completes_update):
            _warn_of_part()
        return to_state(self._start(), self._batch_settings(), self.ranks.num_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue after the last batch of the state. The number of ranks
        may be different. Ends a running iteration."""
        settings = self._batch_settings()
        budget = state.get("terms", {}).get("tokens_per_batch")
        if self.config.tokens_per_batch is None and settings["tokens_per_batch"] is not None:
            settings["tokens_per_batch"] = budget  # the default depends on the number of ranks
        position = from_state(state, settings, self.ranks.num_replicas)
        _close(self._running)
        self._position, self._resuming = position, True
        self._budget = settings["tokens_per_batch"] or self._budget

    def close(self) -> None:
        """Ends the running iteration and all planning processes. The loader can be used again."""
        _close(self._running, self._resources)

    def __enter__(self) -> "DCPDataLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Position:
        """The position of the next batch, with the sampler's state if an epoch starts there."""
        self._position = self._context.source.start(self._position)
        return self._position

    def _selector(self, source: SampleSource | None = None) -> BatchSelector:
        """Selects batches from the loader's source; or from another source, only to count them,
        without recording skipped samples in the metrics."""
        return BatchSelector(
            source or self._context.source,
            self.config,
            self._budget,
            self.ranks.replica,
            self.ranks.num_replicas,
            self._seconds,
            self.metrics.skip if source is None else lambda *_: None,
        )

    def _batch_settings(self) -> dict[str, Any]:
        """Settings that must be equal when a state is loaded, for the same batches to follow."""
        source, config = self._context.source, self.config
        identity = source.identity()
        lengths = identity.pop("lengths", "")
        return {name: getattr(config, name) for name in OPTIONS_OF_BATCHES} | {
            "order": self._order,
            "dataset": ", ".join(f"{name} {text}" for name, text in identity.items()),
            "num_samples": source.num_samples,
            "tokens_per_batch": None if callable(self._budget) else self._budget,
            "schedule": self._schedule,
            "window": config.windows(knows_lengths=source.knows_lengths)[0],
            "lengths": lengths,
        }


@cache
def _warn_of_part() -> None:
    logger.warning(
        "a loader state was saved within an optimiser step: whoever resumes from it needs the "
        "gradients of its first batches as well; save when loader.completes_update is true"
    )


def _close(
    running: list[LookAhead], resources: Sequence[Any] = (), *, at_exit: bool = False
) -> None:
    """Closes iterations, then resources. As a finalizer it must hold no reference to the loader,
    nor to the mask function, which may refer to the loader."""
    while running:
        running.pop().close(at_exit=at_exit)
    for resource in resources:
        resource.close()


def _check_executor(executor: Any, ranks: LoaderRanks) -> None:
    if executor is None:
        return
    if not hasattr(executor, "prepare_ahead"):
        raise ValueError(f"executor is {type(executor).__name__}; expected a DCPExecutor")
    own = tuple(range(ranks.num_ranks)) if ranks.rank is None else (ranks.rank,)
    runs, of = executor.transport.ranks, executor.transport.num_ranks
    if (of, runs) != (ranks.num_ranks, own):
        raise ValueError(
            f"executor= runs rank {_listed(runs)} of {of}; this loader's plans are "
            f"for rank {_listed(own)} of {ranks.num_ranks}: make both over the same group, or "
            "with the same virtual_ranks"
        )


def _listed(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])

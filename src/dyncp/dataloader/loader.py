"""DCPDataLoader: batches, plans and this rank's part of the data, prepared ahead."""

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dyncp.cost import CostModel
from dyncp.dataloader.batch_data import Masking
from dyncp.dataloader.batching import Batching
from dyncp.dataloader.cluster import cluster_of
from dyncp.dataloader.config import (
    STORE_TIMEOUT,
    Budget,
    Collate,
    LoaderConfig,
    describe_schedule,
    whole_number,
)
from dyncp.dataloader.dataset import Source, open_source
from dyncp.dataloader.handshake import Handshake
from dyncp.dataloader.look_ahead import Background, LookAhead
from dyncp.dataloader.metrics import LoaderMetrics
from dyncp.dataloader.model_shape import shape_of, tell_assumption
from dyncp.dataloader.order import describe_sampler
from dyncp.dataloader.plan_process import PlanProcess
from dyncp.dataloader.plan_store import LocalStore, SharedStore, Store
from dyncp.dataloader.planning import Planning
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.dataloader.sample_seconds import SampleSeconds
from dyncp.dataloader.state import Position, Terms, from_state, to_state
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Any], RankPlan | Plan]

# Loaders that processes have made together, by their global ranks: the same number on all of them.
_made: dict[tuple[int, ...], int] = {}


class DCPDataLoader:
    """Yields `(local_data, plan)` for every batch of `dataset`, planned before it is asked for.

    `dataset` has samples (dicts with `input_ids`) by index or by iteration; `mask_fn(sample)` gives
    a sample's mask, or several by name. `group` (ProcessGroup or one-dimensional DeviceMesh) runs
    the plans; by default the world, or one rank. `mesh` is a DeviceMesh whose dimension "cp" runs
    the plans; those named dp... are replicas, which get different batches. `virtual_ranks=N` plans
    for N ranks in this process, and yields whole Plans with the data of all ranks.

    `model` (an AttentionShape, a ModelConfig, a Transformers config, or a model that has one) tells
    the planner what attention looks like; `dtype` is that of q and kv, as a name ("bf16") or a
    torch dtype. `topology` and `cost` say what plans are for; by default machines with devices like
    this process's, laid out by torchrun. docs/dataloader.md has a table of the other options.

    Batches: `tokens_per_batch` is the budget of one plan, all its ranks together (None: 8,192 per
    rank); a function gets the number of batches so far and gives the budget of the next one.
    `accumulation_steps` batches make one optimiser step. `shuffle` is by `seed` and epoch;
    `sampler` gives indices, `batch_sampler` lists of indices instead. `lengths` (array, or name of
    a column) spares reading samples to learn their lengths. Samples longer than `max_length`
    (None: the budget) are handled by `too_long`: error, truncate, drop or split; `bad_samples` that
    cannot be read or are no samples, and `empty_samples` without tokens: error or drop. What is
    dropped is counted in the metrics. `drop_last` drops a last batch or optimiser step that is not
    full. A batch is filled from the next samples of `window` batches, and a round dealt to the
    replicas from the next `window` batches of each; 1 keeps the order (None: 32 and 16, or 4 where
    samples have to be read to be dealt; 1 in evaluation). An iteration goes on to the end of epoch
    `epochs - 1` (None: without end), looking ahead from one epoch to the next. `evaluation`: no
    shuffle, forward-only plans.

    Plans: no rank gets more than `max_tokens_per_rank` tokens; local rows are padded to
    `local_multiple`. `look_ahead` is the number of batches that are prepared before they are asked
    for, and up to four times as many where that proves too few. `num_planners` processes plan, with
    the same result (None: one for each batch that this rank plans ahead, at most 4 and its share of
    the cores). A planner that gives no plan within `plan_timeout` seconds is replaced for that
    batch by a static method; `store_timeout` bounds every answer of the store and of the other
    ranks. `plan_function` is called in place of `dyncp.plan_batch`: a function of a module that the
    planning process can import, with the same arguments.

    Data: `token_fields` names further fields and their token dimension, `sample_fields` those that
    belong to whole samples; `sample_ids` adds every token's sample. `collate(local_data, samples)`
    gives what is yielded instead of the local data. `num_workers` processes read samples ahead (0:
    the loader's own threads). `pin_memory` (None: where CUDA is there). Every `log_every` batches,
    rank 0 logs one line of metrics.

    Every process makes its loaders in the same order and with equal arguments. `close` (or leaving
    a `with` block, or the end of the process) ends the planning processes.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: Any,
        mask_fn: Any,
        *,
        model: Any = None,
        dtype: str | torch.dtype | None = None,
        group: Any = None,
        mesh: Any = None,
        virtual_ranks: int | None = None,
        topology: Topology | None = None,
        planner: PlannerConfig | None = None,
        cost: CostModel | None = None,
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
        empty_samples: str = LoaderConfig.empty_samples,
        drop_last: bool = LoaderConfig.drop_last,
        window: int | None = LoaderConfig.window,
        epochs: int | None = LoaderConfig.epochs,
        evaluation: bool = LoaderConfig.evaluation,
        max_tokens_per_rank: int | None = LoaderConfig.max_tokens_per_rank,
        local_multiple: int = LoaderConfig.local_multiple,
        look_ahead: int = LoaderConfig.look_ahead,
        num_planners: int | None = LoaderConfig.num_planners,
        plan_timeout: float = LoaderConfig.plan_timeout,
        store_timeout: float = LoaderConfig.store_timeout,
        plan_function: Callable[..., Any] = LoaderConfig.plan_function,
        token_fields: Mapping[str, int] | None = None,
        sample_fields: Sequence[str] = LoaderConfig.sample_fields,
        sample_ids: bool = LoaderConfig.sample_ids,
        collate: Collate | None = LoaderConfig.collate,
        num_workers: int = LoaderConfig.num_workers,
        pin_memory: bool | None = LoaderConfig.pin_memory,
        log_every: int | None = LoaderConfig.log_every,
    ) -> None:
        arguments = locals()
        self.ranks = LoaderRanks.of(group, mesh, virtual_ranks)
        chosen = (group, mesh, virtual_ranks)
        self._is_alone = all(x is None for x in chosen) and not dist.is_initialized()
        self._number, self._iterations = _next_number(self.ranks), 0
        with Handshake(self._open_store(STORE_TIMEOUT), self.ranks) as handshake:
            self.config = LoaderConfig.of(arguments)
            self.shape, sizes = shape_of(model, dtype)
            self.topology, cost = cluster_of(self.ranks, topology, cost, self.shape)
            planner = planner or PlannerConfig()
            planning = Planning.of(self.config, self.topology, self.shape, planner, cost, sizes)
            self.metrics = LoaderMetrics()
            source = open_source(dataset, self.config)
            processes = tuple(
                PlanProcess(self.config.plan_timeout)
                for _ in range(self.config.planning_processes(self.ranks.num_members))
            )
            self._background = Background(
                self.config,
                self.ranks,
                source,
                Masking(mask_fn, self.config.seed),
                planning,
                processes,
                self.metrics,
            )
            self._seconds = SampleSeconds(
                mask_fn, cost, sizes, forward_only=planning.config.forward_only
            )
            self._budget = self.config.budget(self.ranks.num_ranks)
            if isinstance(self._budget, int) and self.config.batch_sampler is None:
                planning.check_tokens(self._budget)
            self._schedule = describe_schedule(self._budget)
            self._order = describe_sampler(self.config.order)
            self._position, self._resuming = Position(), False
            self._counted: dict[Any, int] = {}  # batches of the epoch that len was asked for last
            self._open = _Open(processes, source)
            self._finalizer = weakref.finalize(self, self._open.close, at_exit=True)
            if model is None:
                tell_assumption(self.ranks.rank)
            bound = self.config.plan_timeout + self.config.store_timeout
            places = handshake.compare(self._shared_terms(), bound)
            self._background = replace(self._background, places=places)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def planning_pid(self) -> int | None:
        """Process id of the first planning process, while it runs."""
        return self._background.processes[0].pid

    @property
    def planning_pids(self) -> list[int]:
        """Process ids of all planning processes that run."""
        pids = [process.pid for process in self._background.processes]
        return [pid for pid in pids if pid is not None]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration. It begins at the start of the epoch,
        unless this is the epoch that `load_state_dict` is in the middle of. An iteration that is
        under way ends."""
        epoch = whole_number("epoch", epoch, 0)
        if epoch != self._position.epoch:
            self._open.close_iteration()
            self._position, self._resuming = self._position.next_epoch(epoch), False

    def __len__(self) -> int:
        """Batches that each rank gets in this epoch. Known where the lengths of all samples are: by
        `lengths=`, of lists, and of other datasets once an epoch has read them all."""
        sampler, source = self.config.batch_sampler, self._background.source
        if not source.knows_lengths and isinstance(sampler, Sized):
            return self._batching().num_rounds(len(sampler))
        start = self._start()
        start = replace(source.rewind(start), total=start.total - start.batches)
        key = start.epoch, start.total if callable(self._budget) else 0, self._budget
        if key not in self._counted or self.config.order is not None:
            by_lengths = source.by_lengths()
            if by_lengths is None:
                raise TypeError(
                    "the number of batches depends on the lengths of all samples; pass lengths= "
                    "(an array, or the name of a column) to know it before an epoch has read them"
                )
            with by_lengths.aside():
                self._counted = {key: self._batching(by_lengths).num_batches(start)}
        return self._counted[key]

    def __iter__(self) -> Iterator[Batch]:
        """From the start of the epoch, or once from where `load_state_dict` says. An iteration that
        is under way ends: there is one at a time."""
        self._open.close_iteration()
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this loader was made before torch.distributed was initialised and gives one rank "
                f"all data, but there are {dist.get_world_size()}; make it after "
                "init_process_group, or give virtual_ranks=1"
            )
        if not self._resuming and self._position.started:  # broken off
            self._position = self._background.source.rewind(self._position)
        self._background.source.open()
        start, batching = self._start(), self._batching()
        steps, first = batching.steps(start), batching.first_number(start)
        store = self._open_store(self.config.store_timeout)
        look_ahead = LookAhead(self._background, steps, store, first)
        self._open.look_ahead = look_ahead
        return self._batches(look_ahead, batching)

    def _batches(self, look_ahead: LookAhead, batching: Batching) -> Iterator[Batch]:
        try:
            while (prepared := look_ahead.take()) is not None:
                self.metrics.record(prepared.record)
                self._log()
                self._position, self._resuming = prepared.end, False
                yield prepared.data, prepared.plan
            if self._position.started:
                self._position = batching.next_epoch(self._position)
            self._resuming = False
        finally:
            look_ahead.close()

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: behind the batch that was yielded last, or, after the loop, at the
        start of the next epoch. Equal on all ranks. Refused where the dataset's or sampler's part
        of it could not be restored."""
        return to_state(self._start(), self._terms(), self.ranks.num_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin with the batch after those of the state, also on another
        number of ranks. An iteration that is under way ends."""
        own = self.config.tokens_per_batch is not None
        terms = self._terms()
        replicas = self.ranks.num_replicas
        position, terms = from_state(state, terms, replicas, own_budget=own)
        self._open.close_iteration()
        self._position, self._resuming = position, True
        if terms.tokens_per_batch is not None:
            self._budget = terms.tokens_per_batch

    def close(self) -> None:
        """Ends the iteration and the planning processes. The loader may be iterated again."""
        self._open.close()

    def __enter__(self) -> "DCPDataLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Position:
        """Where the next batch starts, with what is needed to begin there once more."""
        self._position = self._background.source.start(self._position)
        return self._position

    def _batching(self, source: Source | None = None) -> Batching:
        """Of the loader's own source, or of one that only counts."""
        return Batching(
            source or self._background.source,
            self.config,
            self._budget,
            self.ranks.replica,
            self.ranks.num_replicas,
            self._seconds,
            self.metrics.skipped if source is None else None,
        )

    def _terms(self) -> Terms:
        source = self._background.source.terms()
        lengths = source.pop("lengths", "")
        by_budget = isinstance(self._budget, int) and self.config.batch_sampler is None
        return Terms(
            seed=self.config.seed,
            shuffle=self.config.shuffle,
            order=self._order,
            dataset=", ".join(f"{name} {text}" for name, text in source.items()),
            num_samples=self._background.source.num_samples,
            tokens_per_batch=self._budget if by_budget else None,  # type: ignore[arg-type]
            schedule=self._schedule,
            accumulation_steps=self.config.accumulation_steps,
            max_length=self.config.max_length,
            too_long=self.config.too_long,
            drop_last=self.config.drop_last,
            window=self.config.windows(knows_lengths=self._background.source.knows_lengths)[0],
            bad_samples=self.config.bad_samples,
            empty_samples=self.config.empty_samples,
            lengths=lengths,
        )

    def _shared_terms(self) -> dict[str, str]:
        """What has to be equal on all ranks, by name."""
        background = self._background
        if not self.ranks.shared:
            return {}
        return {
            **self.config.shared_terms(),
            **background.planning.shared_terms(),
            **background.source.terms(),
            **background.masking.terms(background.source),
            "order": self._order,
            "schedule": self._schedule,
        }

    def _open_store(self, timeout: float) -> Store:
        """A store of its own keys: by run, restart, loader and iteration (0: the handshake)."""
        number, self._iterations = self._iterations, self._iterations + 1
        if not self.ranks.shared:
            return LocalStore()
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"dyncp/{run}/{restart}/{self._number}/{number}"
        store = distributed_c10d._get_default_store()
        return SharedStore(store, prefix, dist.get_rank(), timeout)

    def _log(self) -> None:
        every, first = self.config.log_every, not self.ranks.member and not self.ranks.replica
        if every and first and self.metrics.batches % every == 0:
            logger.info("batch %d: %s", self.metrics.batches, self.metrics.line())


class _Open:
    """What has to be closed, apart from the loader itself, so that it can be collected."""

    def __init__(self, processes: tuple[PlanProcess, ...], source: Source) -> None:
        self.processes, self.source = processes, source
        self.look_ahead: LookAhead | None = None

    def close_iteration(self, *, at_exit: bool = False) -> None:
        if self.look_ahead is not None:
            self.look_ahead.close(at_exit=at_exit)
            self.look_ahead = None

    def close(self, *, at_exit: bool = False) -> None:
        self.close_iteration(at_exit=at_exit)
        for process in self.processes:
            process.close()
        self.source.close()


def _next_number(ranks: LoaderRanks) -> str:
    """Name of this loader, equal on all of its processes: ranks, and how many they made before."""
    if not ranks.shared:
        return ""
    number = _made.get(ranks.all_ranks, 0)
    _made[ranks.all_ranks] = number + 1
    first, last = ranks.all_ranks[0], ranks.all_ranks[-1]
    digest = format(hash(ranks.all_ranks) & 0xFFFFFFFF, "08x")
    return f"{first}-{last}-{digest}/{number}"

"""DCPDataLoader: batches, plans and this rank's part of the data, prepared ahead."""

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dyncp.cost import CostModel
from dyncp.dataloader.batch_data import Masking
from dyncp.dataloader.batching import Batching
from dyncp.dataloader.cluster import cluster_of
from dyncp.dataloader.config import (
    STORE_TIMEOUT,
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
    the planner what attention looks like; `dtype` is that of q and kv. `topology` and `cost` say
    what plans are for; by default machines with devices like this process's, laid out by torchrun.
    `options` are the fields of `LoaderConfig`: tokens_per_batch, accumulation_steps, shuffle, seed,
    lengths, look_ahead, ...

    Every process makes its loaders in the same order and with equal arguments. `close` (or leaving
    a `with` block, or the end of the process) ends the planning processes.
    """

    def __init__(
        self,
        dataset: Any,
        mask_fn: Any,
        *,
        model: Any = None,
        dtype: str | None = None,
        group: Any = None,
        mesh: Any = None,
        virtual_ranks: int | None = None,
        topology: Topology | None = None,
        planner: PlannerConfig | None = None,
        cost: CostModel | None = None,
        **options: Any,
    ) -> None:
        self.ranks = LoaderRanks.of(group, mesh, virtual_ranks)
        self._number, self._iterations = _next_number(self.ranks), 0
        with Handshake(self._open_store(STORE_TIMEOUT), self.ranks) as handshake:
            self.config = LoaderConfig.of(options)
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

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
from dyncp.dataloader.batching import BatchSelector
from dyncp.dataloader.dataset import SampleSource, open_source
from dyncp.dataloader.look_ahead import LoaderMetrics, LookAhead
from dyncp.dataloader.options import (
    STORE_TIMEOUT,
    Budget,
    Collate,
    LoaderConfig,
    describe_schedule,
    integer_option,
)
from dyncp.dataloader.peers import Peers
from dyncp.dataloader.planning import BatchPlanner, model_shape, sample_seconds, topology_and_cost
from dyncp.dataloader.prepare import LoaderContext, MaskMaker, PreparesAhead
from dyncp.dataloader.ranks import LoaderRanks, SharedStore, Store
from dyncp.dataloader.state import Position, describe_sampler, from_state, to_state
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig
from dyncp.planner.process import PlanProcess
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, Any], RankPlan | Plan]

# How many loaders these global ranks have made together; each process counts the same. It names the
# keys of a loader in the store, and so outlives loaders.
_num_made: dict[tuple[int, ...], int] = {}
# Options that a saved state has to agree on, as they are.
OPTIONS_OF_BATCHES = (
    "seed", "shuffle", "accumulation_steps", "max_length", "too_long", "drop_last", "bad_samples",
    "empty_samples",
)  # fmt: skip


class DCPDataLoader:
    """Yields `(local_data, plan)` for every batch of `dataset`, planned ahead.

    `dataset` has samples (dicts with `input_ids`) by index or by iteration; `mask_fn(sample)`
    returns a sample's mask, or several by name. `group` (ProcessGroup or one-dimensional
    DeviceMesh) runs the plans; by default the world, or one rank. `mesh` is a DeviceMesh whose
    dimension "cp" runs the plans; dimensions named dp... are replicas, which get different batches;
    the ranks of "tp" get the same data, and their share of the heads of `model`.
    `virtual_ranks=N` plans for N ranks in this process, and yields whole Plans with the data of all
    ranks.

    `model` (an AttentionShape, a ModelConfig, a Transformers config, or a model that has one) tells
    the planner what attention looks like; `dtype` is that of q and kv, as a name ("bf16") or a
    torch dtype. `topology` and `cost` describe the nodes that plans are made for; by default,
    nodes with devices like this process's, in torchrun's layout. With `executor`, the one that
    will run the plans, most of its `prepare(plan)` is done in the background. docs/dataloader.md
    has a table of the other options.

    Batches: `tokens_per_batch` is the budget of one plan, over all its ranks (None: 8,192 per
    rank); a function of the number of batches so far returns the budget of the next one.
    `accumulation_steps` batches make one optimiser step. `shuffle` permutes by `seed` and epoch;
    `sampler` gives indices, `batch_sampler` lists of indices. With `lengths` (an array, or the name
    of a column) samples need not be read to learn their lengths. `too_long` says what happens to
    samples longer than `max_length` (None: the budget): error, truncate, drop or split;
    `bad_samples` to those that cannot be read or are malformed, and `empty_samples` to those
    without tokens: error or drop. Dropped samples are counted in the metrics. `drop_last` drops a
    last batch or optimiser step that is not full. A batch is filled from the next samples of
    `window` batches, and a round is dealt to the replicas from the next `window` batches of each; 1
    keeps the order (None: 32 and 16, or 4 if samples must be read to be dealt; 1 in evaluation). An
    iteration ends with epoch `epochs - 1` (None: never), and looks ahead from one epoch to the
    next. `evaluation`: no shuffle, forward-only plans.

    Plans: no rank gets more than `max_tokens_per_rank` tokens; local rows are padded to a multiple
    of `local_multiple`. `look_ahead` is the number of batches that are prepared in advance, growing
    up to four times if training has to wait. `num_planners` processes plan, with the same result
    (None: one for each batch that this rank plans ahead, at most 4 and its share of the cores). A
    batch that has no plan after `plan_timeout` seconds gets a static one; `store_timeout` bounds
    every answer of the store and of the other ranks. `plan_function` is called instead of
    `dyncp.plan_batch`, with the same arguments: a function of a module that the planning process
    can import.

    Data: `token_fields` names further fields and their token dimension, `sample_fields` those that
    belong to whole samples; `sample_ids` adds every token's sample. `collate(local_data, samples)`
    returns what is yielded instead of the local data. `num_workers` processes read samples ahead
    (0: the loader's own threads). `pin_memory` (None: if CUDA is available). Every `log_every`
    batches, rank 0 logs one line of metrics.

    All processes must make their loaders in the same order and with equal arguments. `close` (or
    leaving a `with` block, or the end of the process) ends the planning processes.
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
        executor: PreparesAhead | None = None,
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
        ranks = self.ranks = LoaderRanks.of(group, mesh, virtual_ranks)
        chosen = (group, mesh, virtual_ranks)
        self._is_alone = all(x is None for x in chosen) and not dist.is_initialized()
        self._number, self._iterations = _next_number(ranks), 0
        timeouts = LoaderConfig.plan_timeout, STORE_TIMEOUT
        with Peers(self._open_store(STORE_TIMEOUT), ranks, timeouts) as peers:
            config = self.config = LoaderConfig.of(arguments)
            peers.plan_timeout = config.plan_timeout
            peers.store_timeout = config.store_timeout
            self.shape, sizes = model_shape(model, dtype, ranks.tensor_parallel)
            self.topology, cost = topology_and_cost(ranks, topology, cost, self.shape)
            planner = config.planner_config(planner or PlannerConfig())
            batch_planner = BatchPlanner(
                config.plan_function, self.topology, self.shape, planner, cost, sizes
            )
            _check_executor(executor, ranks)
            self._budget = config.budget(ranks.num_ranks)
            if isinstance(self._budget, int) and config.batch_sampler is None:
                batch_planner.check_tokens(self._budget, "tokens_per_batch is")
            self._schedule = describe_schedule(self._budget)
            self._order = describe_sampler(config.order)
            source = open_source(dataset, config)
            mask_maker = MaskMaker(mask_fn, config.seed)
            settings = self._shared_settings(batch_planner, source, mask_maker)
            locations = peers.compare(settings)
        if model is None and not ranks.rank:
            logger.info(
                "no model= given: plans have one head group and assume 4 q heads per kv head; they "
                "fit any layer. Pass model= (a Transformers config, or AttentionShape(q_heads, "
                "kv_heads, head_dim, dtype)) for exact costs"
            )
        self._seconds = sample_seconds(mask_fn, cost, sizes, forward_only=planner.forward_only)
        num_processes = config.planning_processes(ranks.num_members)
        processes = tuple(PlanProcess(config.plan_timeout) for _ in range(num_processes))
        self.metrics = LoaderMetrics(processes)
        self._context = LoaderContext(
            config, ranks, source, mask_maker, batch_planner, processes, locations, executor
        )
        self._position, self._resuming = Position(), False
        self._counted: dict[Any, int] = {}  # batches of the epoch that len was asked for last
        self._running: list[LookAhead] = []  # the iteration, if there is one
        self._resources = (*processes, source)
        weakref.finalize(self, _close, self._running, self._resources, at_exit=True)

    @property
    def epoch(self) -> int:
        return self._position.epoch

    @property
    def planning_pids(self) -> list[int]:
        """Process ids of all running planning processes."""
        pids = [process.pid for process in self._context.processes]
        return [pid for pid in pids if pid is not None]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next iteration, which begins at its start, unless a loaded state
        is in the middle of this epoch. Ends a running iteration if the epoch changes."""
        epoch = integer_option("epoch", epoch, 0)
        if epoch != self._position.epoch:
            self._close_iteration()
            self._position, self._resuming = self._position.next_epoch(epoch), False

    def __len__(self) -> int:
        """Batches that each rank gets in this epoch. Needs the lengths of all samples: those of
        lists, by `lengths=`, or of any dataset once an epoch has read all samples."""
        sampler, source = self.config.batch_sampler, self._context.source
        if not source.knows_lengths and isinstance(sampler, Sized):
            return self._selector().num_rounds(len(sampler))
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
            with by_lengths.undisturbed():
                self._counted = {key: self._selector(by_lengths).num_batches(start)}
        return self._counted[key]

    def __iter__(self) -> Iterator[Batch]:
        """From the start of the epoch, or from a state that has just been loaded. Ends a running
        iteration: there is one at a time."""
        self._close_iteration()
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this loader was made before torch.distributed was initialised and gives one rank "
                f"all data, but there are {dist.get_world_size()}; make it after "
                "init_process_group, or pass virtual_ranks=1"
            )
        if not self._resuming and self._position.started:  # the last iteration was broken off
            self._position = self._context.source.rewind(self._position)
        self._context.source.open()
        start, selector = self._start(), self._selector()
        steps, first = selector.steps(start), selector.first_number(start)
        store = self._open_store(self.config.store_timeout)
        look_ahead = LookAhead(self._context, steps, store, first)
        self._running.append(look_ahead)
        return self._batches(look_ahead)

    def _batches(self, look_ahead: LookAhead) -> Iterator[Batch]:
        try:
            while (prepared := look_ahead.take()) is not None:
                self.metrics.record(prepared.record)
                self._log()
                self._position, self._resuming = prepared.end, False
                yield prepared.data, prepared.plan
            if self._position.started:
                self._position = self._position.next_epoch(self._position.epoch + 1)
            self._resuming = False
        finally:
            look_ahead.close()

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: after the batch that was yielded last, or, after the loop, at the
        start of the next epoch. Equal on all ranks. Raises ValueError if the dataset's own state
        cannot be saved."""
        return to_state(self._start(), self._batch_settings(), self.ranks.num_replicas)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration begin with the batch after those of the state, also on another
        number of ranks. Ends a running iteration."""
        settings = self._batch_settings()
        budget = state.get("terms", {}).get("tokens_per_batch")
        if self.config.tokens_per_batch is None and settings["tokens_per_batch"] is not None:
            settings["tokens_per_batch"] = budget  # the default depends on the number of ranks
        position = from_state(state, settings, self.ranks.num_replicas)
        self._close_iteration()
        self._position, self._resuming = position, True
        self._budget = settings["tokens_per_batch"] or self._budget

    def close(self) -> None:
        """Ends the iteration and the planning processes. The loader may be iterated again."""
        _close(self._running, self._resources)

    def __enter__(self) -> "DCPDataLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_iteration(self) -> None:
        while self._running:
            self._running.pop().close()

    def _start(self) -> Position:
        """Where the next batch starts, with what is needed to begin there again."""
        self._position = self._context.source.start(self._position)
        return self._position

    def _selector(self, source: SampleSource | None = None) -> BatchSelector:
        """Over the loader's source, or over another one that only counts."""
        ranks, counts = self.ranks, source is not None
        return BatchSelector(
            source or self._context.source,
            self.config,
            self._budget,
            ranks.replica,
            ranks.num_replicas,
            self._seconds,
            (lambda *_: None) if counts else self.metrics.skip,
        )

    def _batch_settings(self) -> dict[str, Any]:
        """What must be equal for a state to mean the same batches."""
        source, config = self._context.source, self.config
        identity = source.identity()
        lengths = identity.pop("lengths", "")
        by_budget = isinstance(self._budget, int) and config.batch_sampler is None
        return {name: getattr(config, name) for name in OPTIONS_OF_BATCHES} | {
            "order": self._order,
            "dataset": ", ".join(f"{name} {text}" for name, text in identity.items()),
            "num_samples": source.num_samples,
            "tokens_per_batch": self._budget if by_budget else None,
            "schedule": self._schedule,
            "window": config.windows(knows_lengths=source.knows_lengths)[0],
            "lengths": lengths,
        }

    def _shared_settings(
        self, planner: BatchPlanner, source: SampleSource, mask_maker: MaskMaker
    ) -> dict[str, str]:
        """What must be equal on all ranks, by name."""
        if not self.ranks.shared:
            return {}
        return {
            **self.config.shared_settings(),
            **planner.shared_settings(),
            **source.identity(mask_maker.digest),
            "order": self._order,
            "schedule": self._schedule,
        }

    def _open_store(self, timeout: float) -> Store:
        """With keys by run, restart, loader and iteration (0: making the loader)."""
        number, self._iterations = self._iterations, self._iterations + 1
        if not self.ranks.shared:
            return Store()
        run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"dyncp/{run}/{restart}/{self._number}/{number}"
        store = distributed_c10d._get_default_store()
        return SharedStore(store, prefix, dist.get_rank(), timeout)

    def _log(self) -> None:
        every, first = self.config.log_every, not self.ranks.member and not self.ranks.replica
        if every and first and self.metrics.batches % every == 0:
            logger.info("batch %d: %s", self.metrics.batches, self.metrics.line())


def _close(running: list[LookAhead], resources: Sequence[Any], *, at_exit: bool = False) -> None:
    """Knows no loader and no mask function, which may know the loader: so it can be collected."""
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


def _next_number(ranks: LoaderRanks) -> str:
    """Name of this loader, equal on all its processes: its ranks, and how many they made before."""
    if not ranks.shared:
        return ""
    _num_made[ranks.all_ranks] = number = _num_made.get(ranks.all_ranks, -1) + 1
    first, last = ranks.all_ranks[0], ranks.all_ranks[-1]
    digest = format(hash(ranks.all_ranks) & 0xFFFFFFFF, "08x")
    return f"{first}-{last}-{digest}/{number}"

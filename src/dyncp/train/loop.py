"""Trains the decoder, in one process or on many ranks, and reports every step.

Both runs start from the same weights and see the same batches. They differ in their attention, and
many ranks sum their gradients: every rank's loss is divided by the targets of the whole batch, so
sums over ranks are the loss and the gradients of the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp import masks
from dyncp.dataloader import DCPDataLoader, next_token_loss, sum_gradients, sum_over_ranks
from dyncp.executor import DCPExecutor, attention
from dyncp.kernels import choose_kernel
from dyncp.placement import DEFAULT_TOLERANCES, Limits
from dyncp.plan import Plan, RankPlan
from dyncp.planner import PlannerConfig
from dyncp.topology import preset
from dyncp.train.config import TrainConfig
from dyncp.train.corpus import TextCorpus
from dyncp.train.dense import DenseAttention
from dyncp.train.model import Attend, Decoder

LocalData = dict[str, Tensor]
AttendFor = Callable[[LocalData, Plan | RankPlan], Attend]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimiser step of all ranks together. Imbalances are the fullest rank over the mean."""

    step: int
    tokens: int
    documents: int
    longest: int
    loss: float
    moved_bytes: int  # counted at the transports: forward and backward, all layers, all ranks
    ring_bytes: int  # what ring attention moves for this batch
    compute_imbalance: float
    token_imbalance: float
    seconds: float
    stall_seconds: float = 0.0  # of them, waiting for the loader
    plan_seconds: float = 0.0  # that the planner took for the batch, before the step
    planned_by: str = ""  # solver
    loader: str = ""  # the loader's metrics, in a line


def open_corpus(config: TrainConfig) -> TextCorpus:
    if config.corpus is None:
        return TextCorpus.standard_library(config.max_length)
    return TextCorpus(config.corpus, config.max_length)


def device_of(config: TrainConfig) -> torch.device:
    """The CPU, or this process's GPU."""
    if config.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def check_hardware(config: TrainConfig, processes: int) -> None:
    """Raises ValueError for a kernel or device that `processes` ranks here cannot get."""
    if config.device == "cuda" and torch.cuda.device_count() < processes:
        raise ValueError(
            f"device is 'cuda' for {processes} processes; this machine has "
            f"{torch.cuda.device_count()} GPUs (--virtual-ranks runs all ranks on one)"
        )
    choose_kernel(config.kernel, torch.device(config.device))


def train_in_one_process(config: TrainConfig, corpus: TextCorpus) -> Iterator[StepResult]:
    """The plain run that others are compared with: whole documents, torch's own attention."""
    loader = _loader(config, corpus, virtual_ranks=1)
    mask, device = masks.by_name(config.mask), device_of(config)

    def attend_for(data: LocalData, plan: Plan | RankPlan) -> Attend:
        lengths = _part(plan).lengths.tolist()
        documents = torch.split(data["input_ids"].flatten().cpu(), lengths)
        return DenseAttention([mask({"input_ids": d}) for d in documents], device=device)

    return _train(config, loader, attend_for, lambda: 0)


def train_on_ranks(
    config: TrainConfig, corpus: TextCorpus, virtual_ranks: int | None = None
) -> Iterator[StepResult]:
    """The run under dyncp: on the ranks of the process group, or `virtual_ranks` in this process.

    All ranks of the group iterate it together and get the same results.
    """
    executor = DCPExecutor(
        virtual_ranks=virtual_ranks, kernel=config.kernel, device=device_of(config)
    )
    if executor.device.type == "cuda":
        executor.warm_up(config.decoder.attention_shape())

    def attend_for(_: LocalData, plan: Plan | RankPlan) -> Attend:
        return partial(attention, executor.prepare(plan))

    loader = _loader(config, corpus, virtual_ranks)
    return _train(config, loader, attend_for, lambda: executor.transport.bytes_sent)


def ring_bytes(config: TrainConfig, tokens: int, num_ranks: int) -> int:
    """Bytes that ring attention moves in a step: K and V of all tokens visit all other ranks, in
    backward once more, together with their gradients."""
    return 3 * (num_ranks - 1) * tokens * config.decoder.kv_values * torch.float32.itemsize


def _loader(config: TrainConfig, corpus: TextCorpus, virtual_ranks: int | None) -> DCPDataLoader:
    ranks = virtual_ranks or (dist.get_world_size() if dist.is_initialized() else 1)
    return DCPDataLoader(
        corpus,
        masks.by_name(config.mask),
        model=config.decoder.attention_shape(),
        virtual_ranks=virtual_ranks,
        topology=preset("cpu_gloo", 1, ranks) if config.device == "cpu" else None,
        tokens_per_batch=config.batch_tokens,
        shuffle=True,
        epochs=None,
        seed=config.seed,
        planner=_planner(config),
    )


def _planner(config: TrainConfig) -> PlannerConfig:
    """Fewest bytes within limits: processes of one machine share its cores, so that what a plan
    saves is copying."""
    limits = Limits(*DEFAULT_TOLERANCES)
    return PlannerConfig(config.solver, seed=config.seed, limits=limits, objective="bytes")


def _train(
    config: TrainConfig,
    loader: DCPDataLoader,
    attend_for: AttendFor,
    bytes_sent: Callable[[], int],
) -> Iterator[StepResult]:
    torch.manual_seed(config.seed)
    device = device_of(config)
    model = Decoder(config.decoder).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    with loader:
        batches = iter(loader)
        for number in range(1, config.steps + 1):
            started, sent = perf_counter(), bytes_sent()
            data, plan = next(batches)
            data = {name: value.to(device, non_blocking=True) for name, value in data.items()}
            loss = next_token_loss(model(data, attend_for(data, plan)), data)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            sum_gradients(model)
            optimizer.step()
            here = [loss.item(), bytes_sent() - sent]
            total = sum_over_ranks(torch.tensor(here, dtype=torch.float64)).tolist()
            yield _result(config, number, _part(plan), loader, total, perf_counter() - started)


def _result(
    config: TrainConfig,
    number: int,
    plan: RankPlan,
    loader: DCPDataLoader,
    total: list[float],
    seconds: float,
) -> StepResult:
    loss, moved = total
    last = loader.metrics.last
    assert last is not None
    tokens = int(plan.lengths.sum())
    return StepResult(
        step=number,
        tokens=tokens,
        documents=len(plan.lengths),
        longest=int(plan.lengths.max()),
        loss=loss,
        moved_bytes=int(moved),
        ring_bytes=ring_bytes(config, tokens, plan.num_ranks),
        compute_imbalance=plan.balance.compute_max_over_mean,
        token_imbalance=plan.balance.tokens_max_over_mean,
        seconds=seconds,
        stall_seconds=last.stall_seconds,
        plan_seconds=last.plan_seconds,
        planned_by=last.solver,
        loader=loader.metrics.line(),
    )


def _part(plan: Plan | RankPlan) -> RankPlan:
    return plan.parts[0] if isinstance(plan, Plan) else plan

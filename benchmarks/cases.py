"""What benchmarks share: batches, clusters, static methods, and a planner that fails.

Planning processes import this file, so it must not import torch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, masks, plan_batch
from dyncp.cost import CostModel, ModelConfig, find_profile
from dyncp.masks import MaskFunction
from dyncp.placement import Limits, static_candidates
from dyncp.planner import Candidate, Task
from dyncp.samplers import sample_lengths
from dyncp.topology import Topology, preset

DATA = Path(__file__).parent / "data"
TOKENS = 131_072
SHAPE = AttentionShape(8, 2, 128)
COST = CostModel(find_profile("p4de"), SHAPE)
LIMITS = Limits(compute_tolerance=0.1, token_tolerance=0.2)
MASKS: dict[str, MaskFunction] = {
    "causal": masks.causal,
    "lambda": masks.lambda_shaped,
    "blockwise": masks.causal_blockwise,
    "shared": masks.shared_question,
}
LONG_TAILED = ("ldc_x0.5", "ldc", "ldc_x2", "ldc_x4")
LISTS = (*LONG_TAILED, "longalign", "uniform", "single")
# Lists whose lengths are the same for every seed.
FIXED = ("uniform", "single")
PAPER = ("ring", "zigzag", "loongtrain", "transformer_engine")
FAILING = 120  # planning fails for one sample in this many: about one batch in 20


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: lengths drawn by name and seed, all with one mask."""

    sample: str
    mask: str
    seed: int = 0
    tokens: int = TOKENS

    def __str__(self) -> str:
        return f"{self.sample} {self.mask} {self.seed}"

    def batch(self) -> Batch:
        mask = MASKS[self.mask]
        return Batch.of([mask(n) for n in sample_lengths(self.sample, self.tokens, self.seed)])


def list_cases(seeds: Sequence[int], samples: Sequence[str] = LISTS) -> list[Case]:
    return [
        Case(sample, mask, seed)
        for sample in samples
        for mask in MASKS
        for seed in (seeds[:1] if sample in FIXED else seeds)
    ]


def cluster(nodes: int = 4) -> Topology:
    """Nodes of 8 ranks."""
    return preset("p4de", nodes)


def make_task(
    batch: Batch,
    config: PlannerConfig | None = None,
    topology: Topology | None = None,
    model: ModelConfig | None = None,
) -> Task:
    shape = SHAPE if model is None else model.attention_shape()
    cost = CostModel(COST.profile, shape)
    return Task.of(batch, topology or cluster(), shape, config, cost, model)


@dataclass(frozen=True, eq=False)
class Static:
    """A static method with one DP × CP split, and its simulated step."""

    name: str
    candidate: Candidate

    @property
    def seconds(self) -> float:
        return self.candidate.simulated.step_seconds

    @property
    def method(self) -> str:
        return self.name.partition("/")[0]

    @property
    def in_limits(self) -> bool:
        balance = self.candidate.balance
        return not LIMITS.missed(balance.compute_max_over_mean, balance.tokens_max_over_mean)


def run_statics(task: Task) -> Iterator[Static]:
    """Every static method with every split."""
    for solver in static_candidates(task.batch.lengths, task.shape, task.topology):
        yield Static(solver.name, task.follow(task.place(solver)))


def paper_baselines(statics: Sequence[Static], num_ranks: int | None = None) -> list[Static]:
    """The static methods that the paper compares with: on all `num_ranks` ranks, as in the paper,
    or with every split, including data parallelism alone."""
    own = [s for s in statics if s.method in PAPER]
    if num_ranks is None:
        return own
    return [s for s in own if s.name.partition("/")[2].partition("h")[0] == f"cp{num_ranks}"]


def fastest(statics: Sequence[Static]) -> Static:
    return min(statics, key=lambda static: static.seconds)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.nan if not ratios else math.exp(sum(map(math.log, ratios)) / len(ratios))


def failing_planner(batch: Batch, *args: Any, **keywords: Any) -> Plan:
    """`plan_batch`, but it raises for batches with certain samples, so at least once per epoch."""
    if any(sample % FAILING == 0 for sample in batch.sample_ids):
        raise RuntimeError("injected planner error")
    return plan_batch(batch, *args, **keywords)

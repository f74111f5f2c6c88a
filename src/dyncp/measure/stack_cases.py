"""What runs inside a stack of layers: a rank of a plan, plain attention, or none."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch
from dyncp.cost import CostModel, ModelConfig
from dyncp.executor import DCPExecutor, attention
from dyncp.measure.equal_pairs import WholeDocuments, equal_pairs
from dyncp.measure.implementation import Attend
from dyncp.measure.layer_stack import LayerStack, pass_queries, rotation_of
from dyncp.measure.loads import rank_pairs
from dyncp.measure.noise import Noise
from dyncp.measure.ours import KernelChoice, make_executor
from dyncp.measure.spread_ranks import named_ranks, spread_ranks
from dyncp.measure.timing import Run
from dyncp.measure.whole_documents import attend_whole
from dyncp.plan import Plan, RankPlan

OURS, PLAIN, NONE = "dyncp", "plain", "none"
ATTENTIONS = (OURS, PLAIN, NONE)

GRAPHS: dict[str, str | bool] = {"auto": "auto", "on": True, "off": False}


@dataclass(frozen=True, slots=True, eq=False)
class StackSetting:
    """The layers, and how dyncp's attention runs in them."""

    model: ModelConfig
    layers: int
    shape: AttentionShape
    choice: KernelChoice
    device: torch.device
    graphs: str = "auto"

    def __post_init__(self) -> None:
        if self.graphs not in GRAPHS:
            raise ValueError(f"graphs is {self.graphs!r}; choose from {', '.join(GRAPHS)}")

    def executor(self, rank: int, num_ranks: int) -> DCPExecutor:
        """One rank, whose peers are made up."""
        transport, graphs = Noise(rank, num_ranks), GRAPHS[self.graphs]
        return make_executor(self.choice, self.device, transport=transport, graphs=graphs)


@dataclass(frozen=True, eq=False)
class RankCase:
    """One rank of the plan of a batch: `pairs` are those of one head, `positions` those of its rows
    in their sequences, and `why` says why it was chosen."""

    sample: str
    mask: str
    part: RankPlan
    why: str
    pairs: int
    positions: Tensor
    documents: WholeDocuments = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", equal_pairs(self.rows, self.pairs))

    @property
    def rows(self) -> int:
        return self.part.local_rows


def rank_cases(
    names: tuple[str, str],
    batch: Batch,
    plan: Plan,
    cost: CostModel,
    ranks: tuple[int, ...] | None,
) -> Iterator[RankCase]:
    """The ranks asked for, or those that stand for all; `names` are those of sample and mask."""
    pairs = rank_pairs(plan, cost)
    chosen = spread_ranks(plan, pairs) if ranks is None else named_ranks(plan, ranks)
    for rank, why in chosen.items():
        part, of_head = plan.parts[rank], round(pairs[rank] / cost.shape.q_heads)
        yield RankCase(*names, part, why, of_head, positions_of(part, batch))


def positions_of(part: RankPlan, batch: Batch) -> Tensor:
    """Of every row; padded rows stand at 0."""
    every = np.concatenate([mask.resolved_positions() for mask in batch.masks[DEFAULT_MASK]])
    positions = torch.zeros(part.local_rows, dtype=torch.int64)
    positions[: part.local_tokens] = torch.from_numpy(every[part.local_coordinates])
    return positions


def attend_of(case: RankCase, kind: str, setting: StackSetting) -> Attend:
    """Attention of this kind on the rows of a rank."""
    if kind == NONE:
        return pass_queries
    if kind == PLAIN:
        return attend_whole(case.documents, setting.shape, setting.device)
    executor = setting.executor(case.part.rank, case.part.num_ranks)
    return partial(attention, executor.prepare(case.part))


def stack_run(stack: LayerStack, positions: Tensor, attend: Attend) -> Run:
    """Forward and backward of the stack on random rows, with fresh gradients of all weights."""
    like = next(stack.parameters())
    x, dout = (
        torch.randn(len(positions), stack.hidden, dtype=like.dtype, device=like.device)
        for _ in range(2)
    )
    leaves = [x.requires_grad_(), *stack.parameters()]
    rotation = rotation_of(positions.to(like.device), stack.head_dim, like.dtype)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        stack(x, rotation, attend).backward(dout)

    return run

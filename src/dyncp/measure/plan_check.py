"""One small plan on real or virtual ranks, against dense attention in fp64."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.measure.dense import Results, dense_attention, relative_errors
from dyncp.measure.inputs import Inputs, make_inputs
from dyncp.measure.world import World
from dyncp.plan import gather_samples
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

# Several documents, one of them long enough to be cut, with two ranges per token.
LENGTHS = (1200, 333, 96, 17)
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(4, 2, 128, "bf16")}
# Relative errors: bf16 has 8 bits, so results are right to about 0.4 %; twice rounded on the way.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
VIRTUAL_RANKS = 4
REPLAYS = 2  # the second run of a plan captures its graphs
TIMEOUT = 60.0  # seconds until a rank that does not answer is reported


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """`kernel` is what ran; `errors` are relative, of output and gradients, and `replayed` those of
    the same plan replayed as CUDA graphs, None where graphs are not used."""

    kernel: str
    ranks: int
    virtual: bool
    bytes_moved: int
    errors: dict[str, float]
    tolerance: float
    replayed: dict[str, float] | None = None

    @property
    def passed(self) -> bool:
        return self.allows(self.errors)

    def allows(self, errors: dict[str, float]) -> bool:
        return all(error <= self.tolerance for error in errors.values())  # False for nan


def check_plan(world: World, kernel: str = "auto") -> PlanCheck:
    """Runs the plan; all ranks call it together, and all get the result."""
    shape, virtual = SHAPES[world.device.type], world.num_ranks == 1
    ranks = VIRTUAL_RANKS if virtual else world.num_ranks
    per_machine = ranks if virtual else world.ranks_per_machine
    batch = Batch.of([masks.lambda_shaped(n, sinks=16, window=200) for n in LENGTHS])
    config = PlannerConfig(solver="bisection")  # cuts: `auto` would leave so small a batch whole
    plan = plan_batch(batch, Topology(ranks // per_machine, per_machine), shape, config)
    executor = DCPExecutor(
        kernel=kernel,
        device=world.device,
        virtual_ranks=ranks if virtual else None,
        timeout=TIMEOUT,
    )
    step = executor.prepare(plan)
    inputs = make_inputs(batch.num_tokens, shape, world.device)
    before = executor.transport.bytes_sent
    given = _run(step, inputs)
    moved = executor.transport.bytes_sent - before
    exact, replayed = dense_attention(batch, inputs), None
    if executor.engine.graphs.wanted:
        for _ in range(REPLAYS):
            replayed = relative_errors(_run(step, inputs), exact)
    return PlanCheck(
        kernel=executor.kernel.name,
        ranks=ranks,
        virtual=virtual,
        bytes_moved=moved,
        errors=relative_errors(given, exact),
        tolerance=TOLERANCES[shape.dtype],
        replayed=replayed,
    )


def _run(step: Step, inputs: Inputs) -> Results:
    """Output and gradients of all tokens, in batch order."""
    rows = [torch.from_numpy(part.local_coordinates) for part in step.parts]
    mine = inputs.rows(torch.cat(rows).to(inputs.q.device))
    out = attention(step, *mine.qkv)
    grads = torch.autograd.grad(out, mine.qkv, mine.dout)
    return Results(*(_gather(step, x) for x in (out.detach(), *grads)))


def _gather(step: Step, rows: Tensor) -> Tensor:
    """Rows of all ranks in batch order."""
    plan = step.plan
    if len(step.parts) == plan.num_ranks:
        parts = list(rows.split_with_sizes(plan.rows_per_rank.tolist()))
    else:
        held: list[Any] = [None] * plan.num_ranks
        dist.all_gather_object(held, rows.double().cpu().numpy())
        parts = [torch.from_numpy(part).to(rows.device) for part in held]
    return torch.cat(gather_samples(plan, parts))

"""One small plan on real or virtual ranks, against dense attention in fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.measure.dense import Results, dense_attention, relative_errors
from dyncp.measure.inputs import Inputs, make_inputs
from dyncp.measure.world import World
from dyncp.planner import PlannerConfig, plan_batch

# Several documents, one of them long enough to be cut, with two ranges per token.
LENGTHS = (1200, 333, 96, 17)
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(4, 2, 128, "bf16")}
# Relative errors: bf16 has 8 bits, so results are right to about 0.4 %; twice rounded on the way.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
VIRTUAL_RANKS = 4


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """`kernel` is what ran; `errors` are relative, of output and gradients."""

    kernel: str
    ranks: int
    virtual: bool
    bytes_moved: int
    errors: dict[str, float]
    tolerance: float

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())  # False for nan


def check_plan(world: World, kernel: str = "auto") -> PlanCheck:
    """Runs the plan; all ranks call it together, and all get the result."""
    from dyncp.topology import Topology

    shape, virtual = SHAPES[world.device.type], world.num_ranks == 1
    ranks = VIRTUAL_RANKS if virtual else world.num_ranks
    per_machine = ranks if virtual else world.ranks_per_machine
    batch = Batch.of([masks.lambda_shaped(n, sinks=16, window=200) for n in LENGTHS])
    config = PlannerConfig(solver="bisection")  # cuts: `auto` would leave so small a batch whole
    plan = plan_batch(batch, Topology(ranks // per_machine, per_machine), shape, config)
    options = {"virtual_ranks": ranks} if virtual else {}
    executor = DCPExecutor(kernel=kernel, device=world.device, **options)
    step = executor.prepare(plan)
    inputs = make_inputs(batch.num_tokens, shape, world.device)
    before = executor.transport.bytes_sent
    given = _run(step, inputs)
    moved = executor.transport.bytes_sent - before
    return PlanCheck(
        kernel=executor.kernel.name,
        ranks=ranks,
        virtual=virtual,
        bytes_moved=moved,
        errors=relative_errors(given, dense_attention(batch, inputs)),
        tolerance=TOLERANCES[shape.dtype],
    )


def _run(step: Step, inputs: Inputs) -> Results:
    """Output and gradients of all tokens, in batch order."""
    rows = [torch.from_numpy(part.local_coordinates) for part in step.parts]
    mine = inputs.rows(torch.cat(rows).to(inputs.q.device))
    out = attention(step, *mine.qkv)
    grads = torch.autograd.grad(out, mine.qkv, mine.dout)
    return Results(*(_gather(step, x) for x in (out.detach(), *grads)))


def _gather(step: Step, rows: Tensor) -> Tensor:
    # The transport's own group gathers on the host.
    return torch.cat(step.gather(rows.cpu() if step.plan.num_ranks > len(step.parts) else rows))

"""One batch under every method: dyncp's plan, and each static method at its best DP × CP split."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dyncp.blocks import Batch
from dyncp.cli.plan_numbers import describe_traffic
from dyncp.cost import CostModel, ModelConfig
from dyncp.placement import static_candidates
from dyncp.placement.static import STATIC_SOLVERS
from dyncp.planner import Candidate, PlannerConfig, Task, choose
from dyncp.simulate import simulate_schedules
from dyncp.topology import Topology

OURS = "dyncp"
STATIC_METHODS = tuple(solver.name for solver in STATIC_SOLVERS)


@dataclass(frozen=True, slots=True)
class Setting:
    """What batches are planned for (`planned`) and run on (`topology`, whose ranks may jitter)."""

    planned: Topology
    topology: Topology
    cost: CostModel
    model: ModelConfig | None
    config: PlannerConfig
    methods: tuple[str, ...] = STATIC_METHODS


@dataclass(frozen=True, slots=True)
class Outcome:
    """One batch under one method. A step is `kernel_seconds` + `exposed_seconds` (all attention
    layers) + `token_seconds`, each of the rank that has most."""

    solver: str
    static: bool
    kernel_seconds: float
    exposed_seconds: float
    token_seconds: float
    ideal_seconds: float
    forward_bytes: int
    inter_machine_bytes: int
    compute_max_over_mean: float
    tokens_max_over_mean: float
    workspace_bytes: int = 0

    @property
    def step_seconds(self) -> float:
        return self.kernel_seconds + self.exposed_seconds + self.token_seconds


def run_batch(batch: Batch, setting: Setting, tell: Callable[[str], None]) -> dict[str, Outcome]:
    """Every method's outcome, ours first. `tell` hears what is being planned."""
    tell(setting.config.solver)
    task = Task.of(
        batch, setting.planned, setting.cost.shape, setting.config, setting.cost, setting.model
    )
    ours = choose(task).candidate
    best = {OURS: (_outcome(ours, setting), ours)}
    solvers = static_candidates(
        batch.lengths, setting.cost.shape, setting.topology, setting.methods
    )
    for index, solver in enumerate(solvers):
        tell(solver.name)
        candidate = task.schedule(task.place(solver))
        outcome = _outcome(candidate, setting)
        # The first is data parallelism alone, which is one of every method's splits.
        for method in setting.methods if index == 0 else [solver.name.partition("/")[0]]:
            if method not in best or outcome.step_seconds < best[method][0].step_seconds:
                best[method] = (outcome, candidate)
    return {method: _with_workspace(*found, setting) for method, found in best.items()}


def _with_workspace(outcome: Outcome, candidate: Candidate, setting: Setting) -> Outcome:
    plan = candidate.lower(setting.config.layout)
    return replace(outcome, workspace_bytes=plan.memory().peak)


def _outcome(candidate: Candidate, setting: Setting) -> Outcome:
    simulated = simulate_schedules(
        candidate.graph,
        candidate.placement,
        candidate.schedules,
        setting.topology,
        setting.cost,
        model=setting.model,
    )
    exposed = simulated.num_layers * simulated.exposed_seconds
    forward = [schedule for schedule, _ in candidate.schedules.values()]
    moved = describe_traffic(candidate, setting.topology, forward)
    return Outcome(
        solver=candidate.placement.solver,
        static=candidate.placement.static,
        kernel_seconds=simulated.attention_seconds - exposed,
        exposed_seconds=exposed,
        token_seconds=simulated.token_seconds,
        ideal_seconds=simulated.ideal_seconds,
        forward_bytes=moved["bytes"],
        inter_machine_bytes=moved["inter_machine_bytes"],
        compute_max_over_mean=candidate.balance.compute_max_over_mean,
        tokens_max_over_mean=candidate.balance.tokens_max_over_mean,
    )

"""The model, cluster and costs that plans are made for. `BatchPlanner` requests plans from a
planning process, and makes a static plan if it fails."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import (
    CPU,
    PROFILES,
    CostModel,
    ModelConfig,
    Profile,
    model_shape,
    profile_for_device,
    sample_seconds,
    tell_profile,
)
from dyncp.dataloader.options import LoaderConfig, LoaderTuning
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.plan import Plan
from dyncp.planner import PlannerConfig, plan_batch, tell_usual_decoder
from dyncp.planner.process import PlanFailed, PlanHere, PlanProcess, PlanReply
from dyncp.topology import Topology

STATIC_SOLVER = "zigzag"  # works for every batch, mask and number of ranks
OVERRIDE_HINT = (
    "pass topology=preset(name, nodes, ranks), or tuning=LoaderTuning(cost=CostModel(profile, "
    "shape)), for another"
)


def topology_and_cost(
    ranks: LoaderRanks,
    topology: Topology | None,
    cost: CostModel | None,
    shape: AttentionShape,
    priced: tuple[bool, bool],
) -> tuple[Topology, CostModel]:
    """The given topology and cost model. A missing one follows from the other if possible (a
    topology that is named after a preset has its costs), otherwise from this process's device.
    Ranks with different profiles get a BatchMismatch."""
    if cost is None:
        named = None if topology is None else PROFILES.get(topology.name)
        cost = CostModel(named or _device_profile(ranks), shape, *priced)
    if topology is None:
        found, tp = ranks.topology(), ranks.tensor_parallel
        topology = cost.profile.topology(found.nodes, found.ranks_per_node).slice(tp)
    topology.check_ranks(ranks.num_ranks, "loader")
    return topology, cost


def _device_profile(ranks: LoaderRanks) -> Profile:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else CPU
    if not ranks.rank and ranks.num_ranks > 1:  # plans for one rank do not depend on the profile
        tell_profile(device, OVERRIDE_HINT)
    return profile_for_device(device)


@dataclass(frozen=True, eq=False)
class BatchPlanner:
    """Plans batches. `shape` and `sizes` are those of the model on one rank; `config` is the
    planner's config with the loader's options applied."""

    tuning: LoaderTuning
    topology: Topology
    shape: AttentionShape
    sizes: ModelConfig | None
    config: PlannerConfig
    cost: CostModel

    @staticmethod
    def of(
        ranks: LoaderRanks,
        model: Any,
        topology: Topology | None,
        config: LoaderConfig,
        planner: PlannerConfig | None,
        priced: tuple[bool, bool],
    ) -> "BatchPlanner":
        """A planner by the arguments of a loader; `priced` as in `DCPExecutor`."""
        shape, sizes = model_shape(model, ranks.tensor_parallel)
        topology, cost = topology_and_cost(ranks, topology, config.tuning.cost, shape, priced)
        plans = config.planner_config(planner)
        if sizes is None and not plans.attention_only and not ranks.rank:
            tell_usual_decoder()
        return BatchPlanner(config.tuning, topology, shape, sizes, plans, cost)

    def make_processes(self, number: int) -> tuple[PlanHere | PlanProcess, ...]:
        """Planning processes; with 0, one that plans in the calling thread."""
        timeout = self.tuning.plan_timeout
        return tuple(PlanProcess(timeout) for _ in range(number)) or (PlanHere(),)

    def sample_seconds(self, mask_fn: Any) -> Callable[[int], float]:
        """Predicts the time of a sample from its length."""
        forward_only = self.config.forward_only
        return sample_seconds(mask_fn, self.cost, self.sizes, forward_only=forward_only)

    def plan(self, process: PlanHere | PlanProcess, batch: Batch) -> PlanReply:
        """Each rank's part of the plan, made by `process`; of a static plan if it fails."""
        args = (batch, self.topology, self.sizes or self.shape, self.config)
        try:
            reply = process.plan(partial(self.tuning.plan_function, *args, cost=self.cost))
            most = self.config.max_tokens_per_rank  # a user's plan_function may ignore it
            if most is None or reply.most_tokens <= most:
                return reply
            raise PlanFailed(
                f"the planner assigned {reply.most_tokens} tokens to a rank, more than "
                f"max_tokens_per_rank={most}"
            )
        except PlanFailed as failure:
            start, plan = perf_counter(), self._static_plan(batch)
            seconds = perf_counter() - start
            return PlanReply(plan.encoded_parts, seconds, static_because=str(failure))

    def _static_plan(self, batch: Batch) -> Plan:
        """A static plan, made in this process."""
        most = self.config.max_tokens_per_rank
        plain = replace(self.config, block_size=None, head_groups=1, max_tokens_per_rank=None)
        config = replace(plain, solver=STATIC_SOLVER)
        plan = plan_batch(batch, self.topology, self.shape, config, cost=self.cost)
        found = int(plan.parts[0].tokens_per_rank.max())
        if most is not None and found > most:
            raise ValueError(
                f"the static plan assigns {found} tokens to a rank, more than max_tokens_per_rank="
                f"{most}; raise it, or lower tokens_per_batch"
            )
        return plan

    def shared_settings(self) -> dict[str, str]:
        """Settings that must be equal on all ranks, as strings."""
        return {
            "profile": self.cost.profile.name,
            "executor": f"graphs {self.cost.graphs}, deterministic {self.cost.deterministic}",
            "topology": repr(self.topology),
            "model": repr((self.shape, self.sizes)),
            "planner": repr(self.config),
        }

    def check_tokens(self, tokens: int, what: str) -> None:
        """Raises ValueError for more tokens than all ranks together may hold; `what` begins it."""
        ranks, most = self.topology.num_ranks, self.config.max_tokens_per_rank
        if most is not None and tokens > most * ranks:
            raise ValueError(
                f"{what} {tokens}, but {ranks} ranks with max_tokens_per_rank={most} hold "
                f"{most * ranks}; lower tokens_per_batch, or raise max_tokens_per_rank"
            )

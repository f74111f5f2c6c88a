"""Plans of batches: by the planning process, or the static method that stands in for it."""

from dataclasses import dataclass, replace

from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import CostModel, ModelConfig
from dyncp.dataloader.config import LoaderConfig
from dyncp.dataloader.errors import PlanFailed
from dyncp.dataloader.plan_process import PlanProcess
from dyncp.dataloader.plan_worker import PlanReply, PlanRequest
from dyncp.plan import Plan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

STATIC_SOLVER = "zigzag"  # fits every batch, mask and number of ranks


@dataclass(frozen=True, eq=False)
class Planning:
    """What a plan depends on besides the batch."""

    options: LoaderConfig
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel | None = None
    model: ModelConfig | None = None

    @staticmethod
    def of(
        options: LoaderConfig,
        topology: Topology,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: CostModel | None = None,
        model: ModelConfig | None = None,
    ) -> "Planning":
        """With the loader's options written into the planner's config."""
        if options.local_multiple > 1:
            layout = replace(config.layout, local_multiple=options.local_multiple)
            config = replace(config, layout=layout)
        if options.evaluation:
            config = replace(config, forward_only=True)
        asked = [options.max_tokens_per_rank, config.max_tokens_per_rank]
        most = min((tokens for tokens in asked if tokens is not None), default=None)
        config = replace(config, max_tokens_per_rank=most)
        return Planning(options, topology, shape, config, cost, model)

    def plan(self, process: PlanProcess, batch: Batch) -> PlanReply:
        """Every rank's part, from the planning process; PlanFailed says why there are none."""
        args = (batch, self.topology, self.shape, self.config)
        request = PlanRequest(self.options.plan_function, *args, self.cost, self.model)
        reply = process.plan(request)
        most = self.config.max_tokens_per_rank  # a plan_function of the user's may forget it
        if most is not None and reply.most_tokens > most:
            raise PlanFailed(
                f"the planner gave a rank {reply.most_tokens} tokens, more than "
                f"max_tokens_per_rank={most}"
            )
        return reply

    def static_plan(self, batch: Batch) -> Plan:
        """The plan of the static method, made here: the same on every rank that makes it."""
        most = self.config.max_tokens_per_rank
        plain = replace(self.config, block_size=None, head_groups=1, max_tokens_per_rank=None)
        config = replace(plain, solver=STATIC_SOLVER)
        plan = plan_batch(batch, self.topology, self.shape, config, cost=self.cost)
        found = int(plan.parts[0].tokens_per_rank.max())
        if most is not None and found > most:
            raise ValueError(
                f"the static plan gives a rank {found} tokens, more than max_tokens_per_rank="
                f"{most}; raise it, or lower tokens_per_batch"
            )
        return plan

    def shared_terms(self) -> dict[str, str]:
        """What has to be equal on all ranks, as texts."""
        return {
            "profile": "" if self.cost is None else self.cost.profile.name,
            "topology": repr(self.topology),
            "model": repr((self.shape, self.model)),
            "planner": repr(self.config),
        }

    def check_tokens(self, tokens: int, batch: int | None = None) -> None:
        """Raises ValueError for more tokens than all ranks may hold."""
        most = self.config.max_tokens_per_rank
        if most is not None and tokens > most * self.topology.num_ranks:
            what = "tokens_per_batch is" if batch is None else f"batch {batch} has"
            raise ValueError(
                f"{what} {tokens}, but {self.topology.num_ranks} ranks with max_tokens_per_rank="
                f"{most} hold {most * self.topology.num_ranks}; lower the one or raise the other"
            )

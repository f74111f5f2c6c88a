"""What plans are made for (model, nodes, costs), and the plan of a batch: by the planning
process, or by the static method that replaces it. `SampleSeconds` predicts what a sample takes."""

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from dyncp.blocks import AttentionShape, Batch, Direction, dtype_name
from dyncp.cost import (
    PROFILES,
    CostModel,
    ModelConfig,
    Profile,
    from_transformers_config,
    profile_for_device,
    tell_profile,
)
from dyncp.cost.profile import CPU
from dyncp.dataloader.options import LoaderConfig
from dyncp.dataloader.planning_process import PlanFailed, PlanProcess, PlanReply
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.masks import Mask, MaskFunction, NamedMasks
from dyncp.plan import Plan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

STATIC_SOLVER = "zigzag"  # fits every batch, mask and number of ranks
# Of a decoder of unknown sizes, in units of its hidden size: those of Llama-3-8B.
LAYERS, FFN, VOCAB = 32, 3.5, 32
OVERRIDE_HINT = (
    "pass topology=preset(name, nodes, ranks), or cost=CostModel(profile, shape), for another"
)


def model_shape(
    model: Any, dtype: Any = None, parts: int = 1
) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model` on one rank, and its sizes there if they are known.

    `dtype` is that of q and kv ("bf16", or torch's); by default the model's or its config's.
    `parts` tensor-parallel ranks share a model; an AttentionShape is that of one rank already.
    """
    if model is None or isinstance(model, AttentionShape):
        shape = AttentionShape.assumed() if model is None else model
        return (replace(shape, dtype=dtype) if dtype else shape), None
    if isinstance(model, ModelConfig):
        model = model.divided(parts)
        return model.attention_shape(dtype or "bf16"), model
    config = getattr(model, "config", model)  # a Transformers model, or a config
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    chosen = dtype or _dtype_of(model) or _dtype_of(config) or _dtype_of(entries) or "bf16"
    if hasattr(config, "attention_shape"):
        return config.attention_shape(chosen).divided(parts), None
    if isinstance(entries, Mapping):
        sizes = from_transformers_config(entries).divided(parts)
        return sizes.attention_shape(chosen), sizes
    raise ValueError(
        f"model is {type(model).__name__}; expected an AttentionShape, a ModelConfig, a "
        "Transformers config (object or dict), or a model whose .config is one"
    )


def _dtype_of(model: Any) -> str | None:
    """The name of the dtype of a model's config or weights."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)


def topology_and_cost(
    ranks: LoaderRanks, topology: Topology | None, cost: CostModel | None, shape: AttentionShape
) -> tuple[Topology, CostModel]:
    """What is given is used, and determines the other if it can: a topology with a preset's name
    has that preset's costs. By default, nodes with devices like this process's. All ranks need
    the same; ranks with different profiles get BatchMismatch (see Peers)."""
    if cost is None:
        named = None if topology is None else PROFILES.get(topology.name)
        cost = CostModel(named or _device_profile(ranks), shape)
    if topology is None:
        found = ranks.topology()
        topology = cost.profile.topology(found.nodes, found.ranks_per_node)
    topology.check_ranks(ranks.num_ranks, "loader")
    return topology, cost


def _device_profile(ranks: LoaderRanks) -> Profile:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else CPU
    if not ranks.rank and ranks.num_ranks > 1:  # one rank has nothing to choose
        tell_profile(device, OVERRIDE_HINT)
    return profile_for_device(device)


class BatchPlanner:
    """Plans batches. `config` is the planner's, with the loader's options put into it."""

    def __init__(
        self,
        options: LoaderConfig,
        topology: Topology,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: CostModel | None = None,
        model: ModelConfig | None = None,
    ) -> None:
        if options.local_multiple > 1:
            layout = replace(config.layout, local_multiple=options.local_multiple)
            config = replace(config, layout=layout)
        if options.evaluation:
            config = replace(config, forward_only=True)
        limits = [options.max_tokens_per_rank, config.max_tokens_per_rank]
        lowest = min((tokens for tokens in limits if tokens is not None), default=None)
        self.config = replace(config, max_tokens_per_rank=lowest)
        self._plan_function = options.plan_function
        self._topology, self._shape, self._cost, self._model = topology, shape, cost, model

    def plan(self, process: PlanProcess, batch: Batch) -> PlanReply:
        """Every rank's part, from the planning process; PlanFailed gives the reason if it fails."""
        args = (batch, self._topology, self._shape, self.config)
        costs = {"cost": self._cost, "model": self._model}
        reply = process.plan(partial(self._plan_function, *args, **costs))
        most = self.config.max_tokens_per_rank  # a user's plan_function may ignore it
        if most is not None and reply.most_tokens > most:
            raise PlanFailed(
                f"the planner assigned {reply.most_tokens} tokens to a rank, more than "
                f"max_tokens_per_rank={most}"
            )
        return reply

    def static_plan(self, batch: Batch) -> Plan:
        """The plan of the static method, made in this process; the same on every rank."""
        most = self.config.max_tokens_per_rank
        plain = replace(self.config, block_size=None, head_groups=1, max_tokens_per_rank=None)
        config = replace(plain, solver=STATIC_SOLVER)
        plan = plan_batch(batch, self._topology, self._shape, config, cost=self._cost)
        found = int(plan.parts[0].tokens_per_rank.max())
        if most is not None and found > most:
            raise ValueError(
                f"the static plan assigns {found} tokens to a rank, more than max_tokens_per_rank="
                f"{most}; raise it, or lower tokens_per_batch"
            )
        return plan

    def shared_settings(self) -> dict[str, str]:
        """What must be equal on all ranks, as texts."""
        return {
            "profile": "" if self._cost is None else self._cost.profile.name,
            "topology": repr(self._topology),
            "model": repr((self._shape, self._model)),
            "planner": repr(self.config),
        }

    def check_tokens(self, tokens: int, batch: int | None = None) -> None:
        """Raises ValueError for more tokens than all ranks together may hold."""
        most = self.config.max_tokens_per_rank
        if most is not None and tokens > most * self._topology.num_ranks:
            what = "tokens_per_batch is" if batch is None else f"batch {batch} has"
            raise ValueError(
                f"{what} {tokens}, but {self._topology.num_ranks} ranks with max_tokens_per_rank="
                f"{most} hold {most * self._topology.num_ranks}; lower tokens_per_batch, or raise "
                "max_tokens_per_rank"
            )


class SampleSeconds:
    """Predicted seconds of training on a sample of a given length: all layers of a model on one
    rank, attention by the cost model, other work by tokens.

    Attention pairs are those of the mask of that length; of a causal mask if the mask function
    needs the sample itself. They are counted at powers of two and keys per token are interpolated
    linearly between these, which is exact for causal and full masks. Only operations that IEEE
    arithmetic rounds in one way are used: ranks that predicted other times would deal other
    batches.
    """

    def __init__(
        self, mask_fn: Any, cost: CostModel, model: ModelConfig | None, *, forward_only: bool
    ) -> None:
        model = model or _assumed_model(cost.shape)
        self._mask_fn, self._cost, self._layers = mask_fn, cost, model.layers
        self._directions = [Direction.FORWARD] + [Direction.BACKWARD] * (not forward_only)
        profile = cost.profile
        self._per_token = sum(model.seconds_per_token(profile, d) for d in self._directions)
        self._grid: list[tuple[int, float]] = [(1, 1.0)]  # length, keys per token
        self._known: dict[int, float] = {}

    def __call__(self, length: int) -> float:
        if length not in self._known:
            self._known[length] = self._seconds(length)
        return self._known[length]

    def _seconds(self, length: int) -> float:
        rows = np.array([length])
        pairs = rows * self._keys_per_token(length)
        heads = self._cost.shape.q_heads
        attention = sum(
            float(self._cost.tile_seconds(pairs, rows, rows, heads, direction)[0])
            for direction in self._directions
        )
        return self._layers * attention + length * self._per_token

    def _keys_per_token(self, length: int) -> float:
        while self._grid[-1][0] < length:
            longer = 2 * self._grid[-1][0]
            self._grid.append((longer, _num_pairs(self._mask_fn, longer) / longer))
        at = min(bisect_right(self._grid, length, key=lambda point: point[0]), len(self._grid) - 1)
        (below, keys), (above, more) = self._grid[max(0, at - 1)], self._grid[at]
        if below == above:
            return keys
        return keys + (more - keys) * (length - below) / (above - below)


def _num_pairs(mask_fn: Any, length: int) -> float:
    """Mean over a sample's masks; those of a causal mask if the length does not determine them."""
    if isinstance(mask_fn, MaskFunction | NamedMasks):
        try:
            given = mask_fn(length)
        except Exception:  # a parameter comes from the sample, or does not fit this length
            given = None
        masks = given.values() if isinstance(given, dict) else [given]
        pairs = [mask.num_pairs for mask in masks if isinstance(mask, Mask)]
        if pairs:
            return sum(pairs) / len(pairs)
    return length * (length + 1) / 2


def _assumed_model(shape: AttentionShape) -> ModelConfig:
    hidden = shape.q_heads * shape.head_dim
    sizes = (hidden, LAYERS, round(FFN * hidden), VOCAB * hidden)
    return ModelConfig(*sizes, shape.q_heads, shape.kv_heads, shape.head_dim)

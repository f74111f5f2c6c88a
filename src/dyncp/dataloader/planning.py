"""The model, cluster and costs that plans are made for. `BatchPlanner` requests plans from a
planning process, or makes static plans; `sample_seconds` predicts the training time of a sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
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
from dyncp.dataloader.ranks import LoaderRanks
from dyncp.masks import Mask, MaskFunction, NamedMasks
from dyncp.plan import Plan
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.planner.process import PlanFailed, PlanHere, PlanProcess, PlanReply
from dyncp.topology import Topology

STATIC_SOLVER = "zigzag"  # works for every batch, mask and number of ranks
# A decoder of unknown sizes is assumed to be like Llama-3-8B; FFN and vocabulary in hidden sizes.
LAYERS, FFN, VOCAB = 32, 3.5, 32
OVERRIDE_HINT = (
    "pass topology=preset(name, nodes, ranks), or cost=CostModel(profile, shape), for another"
)


def model_shape(
    model: Any, dtype: Any = None, parts: int = 1
) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model` on one rank, and the model's sizes there if known.

    `dtype` is the dtype of q and kv ("bf16", or a torch dtype; default: the model's or config's).
    A model is divided among `parts` tensor-parallel ranks; a given AttentionShape is not: it must
    be the shape on one rank.
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
    """The name of the dtype in a model's config or of its weights; None if unknown."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)


def topology_and_cost(
    ranks: LoaderRanks, topology: Topology | None, cost: CostModel | None, shape: AttentionShape
) -> tuple[Topology, CostModel]:
    """The given topology and cost model. A missing one follows from the other if possible (a
    topology that is named after a preset has its costs), otherwise from this process's device.
    Ranks with different profiles get a BatchMismatch (see Peers)."""
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
    if not ranks.rank and ranks.num_ranks > 1:  # plans for one rank do not depend on the profile
        tell_profile(device, OVERRIDE_HINT)
    return profile_for_device(device)


@dataclass(frozen=True, eq=False)
class BatchPlanner:
    """Plans batches. `config` is the planner's config with the loader's options applied."""

    plan_function: Callable[..., Any]
    topology: Topology
    shape: AttentionShape
    config: PlannerConfig
    cost: CostModel
    model: ModelConfig | None

    def plan(self, process: PlanHere | PlanProcess, batch: Batch) -> PlanReply:
        """Each rank's part of the plan, made by `process`. Raises PlanFailed with the reason if
        there is none."""
        args = (batch, self.topology, self.shape, self.config)
        costs = {"cost": self.cost, "model": self.model}
        reply = process.plan(partial(self.plan_function, *args, **costs))
        most = self.config.max_tokens_per_rank  # a user's plan_function may ignore it
        if most is not None and reply.most_tokens > most:
            raise PlanFailed(
                f"the planner assigned {reply.most_tokens} tokens to a rank, more than "
                f"max_tokens_per_rank={most}"
            )
        return reply

    def static_plan(self, batch: Batch) -> Plan:
        """The static plan, made in this process; it is the same on every rank."""
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
            "topology": repr(self.topology),
            "model": repr((self.shape, self.model)),
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


def sample_seconds(
    mask_fn: Any, cost: CostModel, model: ModelConfig | None, *, forward_only: bool
) -> Callable[[int], float]:
    """Returns a function that predicts the training time of a sample in seconds from its length:
    all layers of a model on one rank, with attention priced by the cost model and other work by
    tokens.

    Attention pairs are counted from the mask of that length, or from a causal mask if the mask
    function needs the sample itself. They are counted at powers of two; in between, keys per token
    are interpolated linearly, which is exact for causal and full masks. All ranks must predict the
    same times to deal the same batches, so only operations with exact IEEE rounding are used.
    """
    sizes = model or _assumed_model(cost.shape)
    directions = [Direction.FORWARD] + [Direction.BACKWARD] * (not forward_only)
    per_token = sum(sizes.seconds_per_token(cost.profile, way) for way in directions)

    @cache
    def keys_at(power: int) -> float:
        return _num_pairs(mask_fn, power) / power

    def keys_per_token(length: int) -> float:
        below = 1 << length.bit_length() - 1
        if length == below:
            return keys_at(length)
        keys, more = keys_at(below), keys_at(2 * below)
        return keys + (more - keys) * (length - below) / below

    @cache
    def seconds(length: int) -> float:
        rows = np.array([length])
        pairs = rows * keys_per_token(length)
        attention = sum(
            float(cost.tile_seconds(pairs, rows, rows, cost.shape.q_heads, way)[0])
            for way in directions
        )
        return sizes.layers * attention + length * per_token

    return seconds


def _num_pairs(mask_fn: Any, length: int) -> float:
    """Pairs of a sample's masks on average; of a causal mask if the length alone does not determine
    the masks."""
    if isinstance(mask_fn, MaskFunction | NamedMasks):
        try:
            given = mask_fn(length)
        except Exception:  # the mask needs the sample, or cannot have this length
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

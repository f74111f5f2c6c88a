"""Tiny Transformers models, and their batches: planned, split over ranks, and whole."""

from typing import Any

import torch
from benchmarks.parity import dense_bias, dense_loss
from benchmarks.parity_models import make_model
from torch import Tensor

from dyncp import Batch, DCPExecutor, PlannerConfig, Topology, make_local_data, masks, plan_batch
from dyncp.integrations.transformers import layer_masks, model_masks
from dyncp.plan import Layout

LENGTHS = [(150, 9, 31, 4), (12, 180, 40), (3, 77, 5, 60), (14, 9)]


def samples_of(number: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(number)
    return [{"input_ids": torch.randint(97, (n,), generator=random)} for n in LENGTHS[number]]


def planned(
    config: Any, number: int, ranks: int, mask_fn: Any = masks.causal, **options: Any
) -> Any:
    """Samples, batch and plan of a small batch, for the layers of a config."""
    samples = samples_of(number)
    of_layers = model_masks(mask_fn, layer_masks(config))
    batch = Batch.of([of_layers(sample) for sample in samples], range(len(samples)))
    layout = Layout(local_multiple=options.pop("local_multiple", 8))
    chosen = PlannerConfig(block_size=16, layout=layout, **options)
    return samples, batch, plan_batch(batch, Topology(1, ranks), planner=chosen)


def virtual(config: Any, number: int = 0, ranks: int = 4, **options: Any) -> tuple[Any, Any]:
    """Local data and step of virtual ranks."""
    samples, batch, plan = planned(config, number, ranks, **options)
    data = make_local_data(samples, batch, plan)
    return data, DCPExecutor(virtual_ranks=ranks).prepare(plan)


def whole_loss(model: Any, number: int, mask_fn: Any = masks.causal) -> Tensor:
    """The loss of the same batch in one process, by Transformers' own attention."""
    samples, batch, plan = planned(model.config, number, 1, mask_fn, local_multiple=1)
    data = make_local_data(samples, batch, plan)
    layers = layer_masks(model.config)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    by_kind = {
        kind: dense_bias(list(batch.masks[layer.name]))
        for kind, layer in zip(kinds, layers, strict=True)
    }
    return dense_loss(model, data, by_kind)


def plain_model(name: str, **options: Any) -> Any:
    """A model that runs Transformers' own attention; sinks need the eager implementation."""
    model = make_model(name, **options)
    if name == "gpt_oss":
        model.set_attn_implementation("eager")
    return model

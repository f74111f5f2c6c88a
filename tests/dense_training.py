"""Training in one process with Transformers' own attention and dense masks, without dyncp: what
training under dyncp is compared with."""

from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.parity import dense_bias, dense_loss
from torch import Tensor

from dyncp import masks
from dyncp.integrations.transformers import attach, layer_masks, model_masks
from hf_cases import plain_model

LOSSES, WEIGHTS = 1e-5, 1e-4  # largest relative differences


class Trained(NamedTuple):
    losses: list[float]
    weights: list[np.ndarray]
    rates: list[float]  # learning rates of the steps
    model: Any = None


class Batches:
    """The batches of a loader of one rank, epoch by epoch, and their losses under a model."""

    def __init__(self, name: str, samples: Any, **options: Any) -> None:
        other = plain_model(name)
        self._layers = layer_masks(other.config)
        self._kinds = getattr(other.config, "layer_types", None) or ["full_attention"] * len(
            self._layers
        )
        self._mask_fn = model_masks(masks.causal, self._layers)
        alone = {"virtual_ranks": 1, "local_multiple": 1}
        self.loader = attach(other).loader(samples, masks.causal, **options | alone)

    def loss(self, model: Any, data: dict[str, Tensor], plan: Any) -> Tensor:
        of_samples = [
            self._mask_fn({"input_ids": range(n)}) for n in plan.parts[0].lengths.tolist()
        ]
        by_kind = {
            kind: dense_bias([found[layer.name] for found in of_samples])
            for kind, layer in zip(self._kinds, self._layers, strict=True)
        }
        return dense_loss(model, data, by_kind)


def train_dense(
    name: str, samples: Any, steps: int, accumulation: int, clip: float, optimizer: Any, **more: Any
) -> Trained:
    """Trains `steps` steps over as many epochs as these take; `optimizer(model)` makes the
    optimiser and its scheduler. The last step of an epoch has the batches that are left."""
    model, losses, rates = plain_model(name), [], []
    batches = Batches(name, samples, accumulation_steps=accumulation, **more)
    optimizer, scheduler = optimizer(model)
    model.train()
    while len(losses) < steps:
        epoch = list(batches.loader)
        for start in range(0, len(epoch), accumulation):
            total = 0.0
            for data, plan in epoch[start : start + accumulation]:
                loss = batches.loss(model, data, plan)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            rates += scheduler.get_last_lr()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            if len(losses) == steps:
                break
    batches.loader.close()
    return Trained(losses, [p.detach().numpy() for p in model.parameters()], rates, model)


def check(got: Trained, wanted: Trained) -> None:
    """Compares losses (of the last steps, if a run was resumed), weights and learning rates."""
    losses = wanted.losses[-len(got.losses) :]
    np.testing.assert_allclose(got.losses, losses, rtol=LOSSES)
    for found, expected in zip(got.weights, wanted.weights, strict=True):
        assert abs(found - expected).max() <= WEIGHTS * abs(expected).max()
    if got.rates:
        np.testing.assert_allclose(got.rates, wanted.rates[-len(got.rates) :], rtol=1e-6)

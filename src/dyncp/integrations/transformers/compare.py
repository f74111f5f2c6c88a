"""Compares a model under dyncp with its own attention, for architectures that nobody has tried.

One long document with the model's own loss, auxiliary ones included, and several documents in one
batch, on virtual ranks of this process. Documents are longer than the windows of layers. Weights
are changed for it and given back: at first they are often so small that attention is a mean, and
positions do not matter.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dyncp.blocks import Batch
from dyncp.dataloader import local_data
from dyncp.executor import DCPExecutor
from dyncp.integrations.transformers.layers import LayerMask, needs_largest_position
from dyncp.integrations.transformers.other_layers import COEFFICIENT
from dyncp.masks import causal
from dyncp.plan import Layout
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

# Measured on the 70 architectures of Transformers 5.22 that run: at most 1.2e-6 in fp32. A layer
# that sees the rows of one rank alone is wrong by more than 1e-2.
TOLERANCE, TOLERANCE_16_BIT = 1e-4, 5e-2
RANKS = 2


def compare(model: Any, layers: tuple[LayerMask, ...], begin: Callable[[], Any]) -> Any:
    """What `begin` gives, which attaches the model; raises ValueError, with the model as it was, if
    it then gives something else than before."""
    if any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(
            "%s has no weights yet, and was not compared with its own attention: attach a small "
            "model of the same class, with weights and untested=True, before",
            type(model).__name__,
        )
        return begin()
    with _lively(model):
        trial = Trial(model, layers)
        attached = begin()
        try:
            trial.check(attached.masks)
        except BaseException:
            attached.detach()
            raise
    return attached


class Trial:
    """What a model gives with its own attention; `check` compares once it is attached."""

    def __init__(self, model: Any, layers: tuple[LayerMask, ...]) -> None:
        self.model = model
        longest = max(96, *(5 * (layer.size or 0) // 4 for layer in layers))
        self.block_size = max(16, longest // 8)
        random = torch.Generator().manual_seed(0)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        # RoPE with a factor from the largest position makes documents depend on each other.
        lengths = (longest,) if needs_largest_position(model) else (longest, 33, 5)
        self.documents = [torch.randint(vocabulary, (n,), generator=random) for n in lengths]
        self.options = {"output_router_logits": True} if hasattr(model, COEFFICIENT) else {}
        self.wanted = [self._alone(ids) for ids in self.documents]

    def _alone(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs and loss of one document."""
        ids = ids.to(self.model.device)[None]
        labels = {} if self.model.get_output_embeddings() is None else {"labels": ids}
        output = self.model(input_ids=ids, **labels, use_cache=False, **self.options)
        return _rows(output), output.get("loss")

    def check(self, masks: Callable[[Any], Callable[[Any], Any]]) -> None:
        """Raises ValueError if the model gives something else under dyncp."""
        mask_fn = masks(causal)
        with DCPExecutor(virtual_ranks=RANKS, device=self.model.device) as executor:
            found, _ = self._under_dyncp(self.documents, mask_fn, executor)
            _, loss = self._under_dyncp(self.documents[:1], mask_fn, executor)
        for got, (wanted, _) in zip(found, self.wanted, strict=True):
            self._compare("outputs", got, wanted)
        wanted_loss = self.wanted[0][1]
        if wanted_loss is not None:
            self._compare("losses", loss, wanted_loss)

    def _under_dyncp(
        self, documents: list[Tensor], mask_fn: Any, executor: DCPExecutor
    ) -> tuple[list[Tensor], Any]:
        samples = [{"input_ids": ids} for ids in documents]
        batch = Batch.of([mask_fn(sample) for sample in samples], range(len(samples)))
        layout = Layout(local_multiple=8)
        # Blocks anywhere: rows in order would hide positions that are counted on each rank.
        config = PlannerConfig(block_size=self.block_size, solver="random", layout=layout)
        plan = plan_batch(batch, Topology(1, RANKS), config=config)
        step = executor.prepare(plan)
        data = {
            name: value.to(self.model.device) if name != "batch_fingerprint" else value
            for name, value in local_data(samples, batch, plan).items()
        }
        output = self.model(**data, dyncp_step=step, **self.options)
        return step.gather(_rows(output)), output.get("loss")

    def _compare(self, what: str, got: Tensor | None, wanted: Tensor) -> None:
        wide = wanted.dtype in (torch.float32, torch.float64)
        allowed = TOLERANCE if wide else TOLERANCE_16_BIT
        by = "none at all"
        if got is not None:
            difference = ((got - wanted).abs().max() / wanted.abs().max()).item()
            if difference <= allowed:
                return
            by = f"by {difference:.1e} of the largest; at most {allowed:.0e} is allowed"
        raise ValueError(
            f"{type(self.model).__name__} gives other {what} under dyncp than with its own "
            f"attention ({by}): its layers do something that dyncp does not know of, and cannot "
            "run under it"
        )


def _rows(output: Any) -> Tensor:
    rows: Tensor = output["logits" if "logits" in output else "last_hidden_state"][0]
    return rows


@contextmanager
def _lively(model: Any) -> Iterator[None]:
    """Without gradients and dropout, and with weights for which scores are of order 1."""
    training = {module: module.training for module in model.modules()}
    weights = [p for p in model.parameters() if p.is_floating_point()]
    saved = [weight.detach().to("cpu", copy=True) for weight in weights]
    random = torch.Generator().manual_seed(0)
    model.eval()
    try:
        with torch.no_grad():
            for weight in weights:
                size = 0.6 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.1
                noise = torch.randn(weight.shape, generator=random) * size
                weight.add_(noise.to(weight.device, weight.dtype))
            yield
    finally:
        for module, value in training.items():
            module.training = value
        with torch.no_grad():
            for weight, value in zip(weights, saved, strict=True):
                weight.copy_(value)

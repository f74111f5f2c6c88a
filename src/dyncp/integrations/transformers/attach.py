"""`attach`: makes the attention layers of a Transformers model call dyncp.

With `untested=True`, the model is first compared with its own attention, on virtual ranks of this
process: one long document with the model's loss (including auxiliary losses), and several documents
in one batch. The first document is longer than the layers' windows. The comparison changes the
weights and restores them afterwards: initial weights are often so small that attention is a plain
mean and positions have no effect.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dyncp.blocks import AttentionShape, Batch
from dyncp.cost import ModelConfig
from dyncp.dataloader import DCPDataLoader
from dyncp.executor import DCPExecutor, Step
from dyncp.gradients import watch_loss
from dyncp.integrations import ROWS
from dyncp.integrations.transformers.adapters import without_adapters
from dyncp.integrations.transformers.functions import (
    COEFFICIENT,
    NAME,
    Call,
    attend,
    auxiliary_share,
    install_mixers,
    install_recorders,
    mask_marker,
    take_coefficient,
)
from dyncp.integrations.transformers.layers import (
    check_model,
    layer_masks,
    model_masks,
    needs_largest_position,
)
from dyncp.losses import next_token_loss
from dyncp.masks import causal
from dyncp.plan import Layout
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.samples import NO_TARGET, TARGET_FIELDS, make_local_data
from dyncp.topology import Topology

logger = logging.getLogger(__name__)

# Keywords that a model may be called with. Others are refused unless they are None or False.
KEYWORDS = frozenset({
    "batch_fingerprint", "dyncp_step", "input_ids", "inputs_embeds", "labels", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "shift_labels",
    *TARGET_FIELDS,
})  # fmt: skip
# Why some of these others are refused.
REASONS = {
    "attention_mask": "masks are part of the plan, and the loader removes padding",
    "output_attentions": "attention scores are not stored",
    "logits_to_keep": "the last rows of a rank are not the last tokens",
    "past_key_values": "cached tokens belong to no rank",
    "use_cache": "a rank has only the keys of parts of sequences",
}
# Largest relative differences allowed by the comparison. Measured on the 70 architectures of
# Transformers 5.22 that run: at most 1.2e-6 in fp32, and more than 1e-2 if a layer sees only the
# rows of one rank.
TOLERANCE, TOLERANCE_16_BIT = 1e-4, 5e-2
RANKS = 2


def attach(
    model: Any, *, dtype: str | torch.dtype | None = None, untested: bool = False
) -> "Attached":
    """Makes the attention layers of a Transformers model call dyncp.

    Call it before the model is wrapped or compiled, but after PEFT. Then call the model as
    `model(**local_data, dyncp_step=step)`, with the local data of a DCPDataLoader and the step of
    their plan. `dtype` is the dtype of q, k and v if it differs from that of the weights: under
    autocast, or FSDP's mixed precision. Models that dyncp does not support raise ValueError, here
    or in the first forward. `untested=True` allows an architecture that is not in the list of
    tested ones if, for a small batch on virtual ranks, its outputs and loss equal those of its own
    attention.
    """
    inner, caller = without_adapters(model)
    config = check_model(inner, untested=untested)
    attached = (_compared if untested else Attached)(inner, config, dtype)
    if caller is not inner:
        attached.listen(caller)
    return attached


class Attached:
    """A model under dyncp. `loader` makes the loader for it; `detach` restores the model."""

    def __init__(self, model: Any, config: Any, dtype: str | torch.dtype | None) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.model, self.config, self.dtype = model, config, dtype
        self.layers = layer_masks(config)
        self._needs_largest = needs_largest_position(model)
        self._before_attach = model.config._attn_implementation
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask_marker)
        model.set_attn_implementation(NAME)
        self._check_implementation()
        self._coefficient = take_coefficient(model)
        self._mixers = install_mixers(model, config)
        install_recorders(model)
        if model.get_output_embeddings() is not None and model.loss_type is None:
            model.loss_type = "ForCausalLM"  # the default, but without Transformers' warning
        self._hooks: tuple[Any, ...] = ()
        self.listen(model)

    def listen(self, module: Any) -> None:
        """Puts the checks before and after the forward of this module, instead of another one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = (
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        )

    def detach(self) -> None:
        """Restores the model's own attention, mixers and auxiliary loss."""
        for hook in self._hooks:
            hook.remove()
        for module in self._mixers:
            del module.forward  # the instance's attribute, which hides the method of its class
        self.model.set_attn_implementation(self._before_attach)
        if hasattr(self.model, COEFFICIENT):
            setattr(self.model, COEFFICIENT, self._coefficient)

    def masks(self, mask_fn: Any) -> Callable[[Any], Any]:
        """A mask function for DCPDataLoader that returns all masks that the layers need, by name.
        Windows and chunks are derived by position from the masks that `mask_fn` returns."""
        return model_masks(mask_fn, self.layers)

    def loader(self, dataset: Any, mask_fn: Any, **options: Any) -> DCPDataLoader:
        """A DCPDataLoader for this model, with the same options."""
        if "model" not in options:
            options["model"] = ModelConfig.of(self.model, self.dtype)
        options = {"local_multiple": ROWS} | options
        return DCPDataLoader(dataset, self.masks(mask_fn), **options)

    def shape(self, parts: int = 1) -> AttentionShape:
        """The attention shape of the layers on one rank, for loops that plan batches themselves.
        `parts` is the degree of tensor parallelism."""
        return ModelConfig.of(self.model, self.dtype).attention_shape().divided(parts)

    def _check_implementation(self) -> None:
        found = self.config._attn_implementation
        if found != NAME:
            raise ValueError(
                f"the attention of {type(self.model).__name__} is {found!r}, not {NAME!r}: attach "
                "had no effect on it, or another one was set after attach"
            )

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks the arguments of the model, and adds a row if it needs one."""
        self._check_implementation()
        step = _check_call(args, kwargs)
        batch = kwargs.pop("batch_fingerprint", None)
        rows = kwargs["position_ids"].shape[1]
        extra = 1 if self._needs_largest or rows == 0 else 0
        positions = torch.ops.dyncp.enter(
            step.number, kwargs["position_ids"], batch, extra, self._needs_largest
        )
        kwargs["position_ids"] = positions
        for name in ("input_ids", "inputs_embeds"):
            if kwargs.get(name) is not None:
                kwargs[name] = _with_rows(kwargs[name], extra, 0)
        listed = {name: kwargs.pop(name) for name in TARGET_FIELDS if name in kwargs}
        if listed:  # tokens with several targets, of which the model's own loss supports only one
            listed["num_items_in_batch"] = kwargs.pop("num_items_in_batch")
            kwargs["labels"] = kwargs["shift_labels"] = None
        if kwargs.get("shift_labels") is not None:
            targets = _with_rows(kwargs["shift_labels"], extra, NO_TARGET)
            kwargs["labels"] = kwargs["shift_labels"] = targets
        kwargs["dyncp_step"] = Call(step, self.layers, rows, extra, listed)
        return (), kwargs | {"use_cache": False}

    def _after(self, model: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Checks that all layers have called dyncp, completes the loss, and removes added rows."""
        call: Call = kwargs["dyncp_step"]
        missing = [number for number in range(len(self.layers)) if number not in call.seen]
        if missing:
            raise ValueError(
                f"layers {missing} of {type(model).__name__} did not call dyncp's attention; they "
                "saw only this rank's tokens"
            )
        if not isinstance(output, dict):  # Transformers' ModelOutput
            raise ValueError("the model returned a tuple; call it without return_dict=False")
        if call.listed:
            output["loss"] = next_token_loss(output["logits"], call.listed)
        router = output.get("router_logits")
        if router and output.get("loss") is not None:
            self._add_auxiliary(output, call.step, kwargs["position_ids"])
        for name in ("logits", "last_hidden_state", "hidden_states"):
            if call.extra and output.get(name) is not None:
                output[name] = _first_rows(output[name], call.rows)
        if output.get("loss") is not None:
            watch_loss(output["loss"])
        return output

    def _add_auxiliary(self, output: Any, step: Step, positions: Tensor) -> None:
        if not hasattr(self.model, COEFFICIENT):
            raise ValueError(
                f"{type(self.model).__name__} returned router_logits but has no {COEFFICIENT}, so "
                "dyncp does not know its auxiliary loss: call it without output_router_logits"
            )
        chosen = self.config.num_experts_per_tok
        share = auxiliary_share(output["router_logits"], chosen, step, positions)
        output["aux_loss"] = share
        output["loss"] = output["loss"] + self._coefficient * share


def _check_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    step = kwargs.get("dyncp_step")
    if args or not isinstance(step, Step):
        raise ValueError(
            "an attached model was called without its step, or with positional arguments; call "
            "model(**local_data, dyncp_step=executor.prepare(plan))"
        )
    for name, value in kwargs.items():
        if name not in KEYWORDS and value is not None and value is not False:
            reason = REASONS.get(name, "dyncp does not know its effect on parts of sequences")
            raise ValueError(f"an attached model was called with {name}: {reason}. Leave it out")
    if kwargs.get("position_ids") is None or kwargs["position_ids"].ndim != 2:
        raise ValueError(
            "an attached model needs position_ids [1, rows], because a token's row on its rank is "
            "not its position; the loader's local data have them"
        )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "the model got labels without shift_labels; it would shift them by one row of this "
            "rank, but the next row is often not the next token. The loader's local data have both"
        )
    if kwargs.get("shift_labels") is not None and kwargs.get("num_items_in_batch") is None:
        raise ValueError(
            "the model got labels without num_items_in_batch; its loss would be a mean over this "
            "rank's targets. The loader's local data have the number of targets of all ranks"
        )
    return step


def _with_rows(x: Tensor, extra: int, value: int) -> Tensor:
    """`[1, rows, ...]` with `extra` rows of `value` appended."""
    return pad(x, (0, 0) * (x.ndim - 2) + (0, extra), value=value) if extra else x


def _first_rows(value: Any, rows: int) -> Any:
    """The first `rows` rows of a tensor or a tuple of them: copies, because FSDP warns of views."""
    if isinstance(value, tuple):
        return tuple(_first_rows(x, rows) for x in value)
    return value if value.shape[1] == rows else value[:, :rows].clone()


def _compared(model: Any, config: Any, dtype: str | torch.dtype | None) -> Attached:
    """Attaches a model after comparing it with its own attention. If results differ, restores the
    model and raises ValueError."""
    if any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(
            "%s has no weights yet, so it was not compared with its own attention: first attach a "
            "small model of the same class that has weights, with untested=True",
            type(model).__name__,
        )
        return Attached(model, config, dtype)
    with _noisy_weights(model):
        documents = _documents(model, config)
        expected = [_run_alone(model, ids) for ids in documents]
        attached = Attached(model, config, dtype)
        try:
            _check_parity(attached, documents, expected)
        except BaseException:
            attached.detach()
            raise
    return attached


def _documents(model: Any, config: Any) -> list[Tensor]:
    """Random documents, of which the first is longer than any layer's window."""
    longest = max(96, *(5 * (layer.size or 0) // 4 for layer in layer_masks(config)))
    # RoPE that scales with the largest position makes documents depend on each other.
    lengths = (longest,) if needs_largest_position(model) else (longest, 33, 5)
    random = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (n,), generator=random) for n in lengths]


def _options(model: Any) -> dict[str, bool]:
    """Options that make a mixture of experts compute its auxiliary loss."""
    return {"output_router_logits": True} if hasattr(model, COEFFICIENT) else {}


def _run_alone(model: Any, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The outputs and the loss of one document with the model's own attention."""
    ids = ids.to(model.device)[None]
    labels = {} if model.get_output_embeddings() is None else {"labels": ids}
    output = model(input_ids=ids, **labels, use_cache=False, **_options(model))
    return _rows(output), output.get("loss")


def _run_planned(
    attached: Attached, documents: list[Tensor], executor: DCPExecutor
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs of every document and the loss of the batch, under dyncp."""
    model, mask_fn = attached.model, attached.masks(causal)
    samples = [{"input_ids": ids} for ids in documents]
    batch = Batch.of([mask_fn(sample) for sample in samples], range(len(samples)))
    # Random placement: if rows were in order, a model that counts rows as positions would pass.
    config = PlannerConfig(
        block_size=max(16, len(documents[0]) // 8),
        solver="random",
        layout=Layout(local_multiple=ROWS),
    )
    plan = plan_batch(batch, Topology(1, RANKS), planner=config)
    step = executor.prepare(plan)
    fields = make_local_data(samples, batch, plan).items()
    data = {name: value.to(model.device) for name, value in fields}
    output = model(**data, dyncp_step=step, **_options(model))
    return step.gather(_rows(output)), output.get("loss")


def _check_parity(
    attached: Attached, documents: list[Tensor], expected: list[tuple[Tensor, Tensor | None]]
) -> None:
    """Raises ValueError if outputs or losses under dyncp differ from `expected`."""
    with DCPExecutor(virtual_ranks=RANKS, device=attached.model.device) as executor:
        found, _ = _run_planned(attached, documents, executor)
        _, loss = _run_planned(attached, documents[:1], executor)
    pairs = [("outputs", rows, wanted) for rows, (wanted, _) in zip(found, expected, strict=True)]
    wanted_loss = expected[0][1]
    if wanted_loss is not None:
        pairs.append(("losses", wanted_loss * nan if loss is None else loss, wanted_loss))
    for what, got, wanted in pairs:
        allowed = TOLERANCE if wanted.dtype in (torch.float32, torch.float64) else TOLERANCE_16_BIT
        difference = ((got - wanted).abs().max() / wanted.abs().max()).item()
        if not difference <= allowed:
            raise ValueError(
                f"the {what} of {type(attached.model).__name__} under dyncp differ from those of "
                f"its own attention (relative difference {difference:.1e}; at most {allowed:.0e} "
                "is allowed): its layers do something that dyncp does not support"
            )


def _rows(output: Any) -> Tensor:
    """The logits `[rows, vocabulary]`, or the hidden states of a base model."""
    rows: Tensor = output["logits" if "logits" in output else "last_hidden_state"][0]
    return rows


@contextmanager
def _noisy_weights(model: Any) -> Iterator[None]:
    """Disables gradients and dropout, and adds noise to the weights so that attention scores are of
    order 1. Restores everything at the end."""
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

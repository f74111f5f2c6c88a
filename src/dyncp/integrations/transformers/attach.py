"""`attach`: makes the attention layers of a Transformers model call dyncp."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dyncp.blocks import AttentionShape
from dyncp.cost import ModelConfig
from dyncp.dataloader import DCPDataLoader
from dyncp.executor import DCPExecutor, Step
from dyncp.gradients import watch_loss
from dyncp.integrations import ROWS
from dyncp.integrations.transformers.adapters import without_adapters
from dyncp.integrations.transformers.compare import compare
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
    check_shape,
    layer_masks,
    model_masks,
    needs_largest_position,
    text_modules,
)
from dyncp.losses import next_token_loss
from dyncp.plan import Plan, RankPlan
from dyncp.samples import NO_TARGET, TARGET_FIELDS

logger = logging.getLogger(__name__)

# Keywords that a model may be called with. Others are refused unless they are None or False.
KEYWORDS = frozenset({
    "batch_fingerprint", "dyncp_step", "input_ids", "inputs_embeds", "labels", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "shift_labels",
    *TARGET_FIELDS,
})  # fmt: skip
CALL = "model(**local_data, dyncp_step=executor.prepare(plan))"
# Why some of these others are refused.
REASONS = {
    "attention_mask": "masks are part of the plan, and the loader removes padding",
    "output_attentions": "attention scores are not stored",
    "logits_to_keep": "the last rows of a rank are not the last tokens",
    "past_key_values": "cached tokens belong to no rank",
    "use_cache": "a rank has only the keys of parts of sequences",
}


def attach(
    model: Any, *, dtype: str | torch.dtype | None = None, untested: bool = False
) -> "Attached":
    """Makes the attention layers of a Transformers model call dyncp.

    Call it before the model is wrapped or compiled but after PEFT. Then call it as
    `model(**local_data, dyncp_step=step)`, with the local data of a DCPDataLoader and the step of
    their plan. `dtype` is the dtype of q, k and v that plans assume (default: that of the weights);
    under autocast another one only makes their estimates better. Models that dyncp does not support
    raise ValueError, here or in the first forward. `untested=True` allows an architecture that is
    not in the list of tested ones if, for small batches on virtual ranks, its outputs and loss
    equal those of its own attention. A model that is attached already stays so, and its `Attached`
    is returned again.
    """
    model, around = without_adapters(model)
    found = _attached_to(model)
    attached = _attach(model, dtype, untested=untested) if found is None else found._again(dtype)
    attached.listen_around(around)
    return attached


def _attach(model: Any, dtype: Any, *, untested: bool) -> "Attached":
    config = check_model(model, untested=untested)
    shape = _planned_shape(model, dtype)
    make = partial(Attached, model, config, dtype)
    if not untested:
        return make()
    if any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(
            "%s has no weights yet, so it was not compared with its own attention: first attach a "
            "small model of the same class that has weights, with untested=True",
            type(model).__name__,
        )
        return make()
    attached: Attached = compare(model, config, make, shape)
    return attached


def _planned_shape(model: Any, dtype: Any) -> AttentionShape:
    """What the loader plans for all layers; ValueError if a layer has another shape."""
    try:
        shape = ModelConfig.of(model, dtype).attention_shape()
    except ValueError:  # sizes by unusual names, which users give to the loader themselves
        return AttentionShape.assumed()
    check_shape(model, shape)
    return shape


def _attached_to(model: Any) -> "Attached | None":
    """The `Attached` of this very model, if it is attached. A copy of a model has a copy of it."""
    for hook in getattr(model, "_forward_pre_hooks", {}).values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Attached) and owner.model is model:
            return owner
    return None


def _refuse_step(model: Any, _: Any, kwargs: dict[str, Any]) -> None:
    """A hook of models that were detached. They would ignore a step, and see one rank's rows."""
    if kwargs.get("dyncp_step") is not None:
        raise ValueError(
            f"{type(model).__name__} was called with dyncp_step, but it was detached, or attach "
            "refused it: call attach(model) first"
        )


def _accept_steps(model: Any) -> None:
    """Removes the hook from a model that is attached again."""
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_step:
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]


class Attached:
    """A model under dyncp. `loader` makes the loader for it; `detach` restores the model."""

    def __init__(self, model: Any, config: Any, dtype: str | torch.dtype | None) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self.model, self.config, self.dtype = model, config, dtype
        self.layers = layer_masks(config)
        self._needs_largest = needs_largest_position(model)
        # What should be in train mode during training: the model and its attention layers.
        self._learning = [model, *(m for _, m in text_modules(model) if hasattr(m, "layer_idx"))]
        self._dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p]
        self._generates: int | None = None  # the thread in which `generate` is running
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, mask_marker)
        _accept_steps(model)
        self._begin()
        self._check_implementation()
        install_recorders(model)
        if model.get_output_embeddings() is not None and model.loss_type is None:
            model.loss_type = "ForCausalLM"  # the default, but without Transformers' warning
        self._hooks: list[Any] = []
        self._around: list[Any] = []  # PEFT's modules around the model
        self._listen(model)
        self._own_generate = vars(model).get("generate")  # of the instance, not of its class
        if hasattr(model, "generate"):
            model.generate = partial(self._generate, model.generate)

    def listen_around(self, module: Any) -> None:
        """Puts the checks around a module of PEFT: some of its versions call the `forward` of the
        model in it, past its hooks."""
        if module is not self.model and module not in self._around:
            self._around.append(module)
            self._listen(module)

    def _listen(self, module: Any) -> None:
        self._hooks += (
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, with_kwargs=True),
        )

    def _begin(self) -> None:
        """Selects dyncp's attention, mixers and auxiliary loss."""
        self._before_attach = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        self._coefficient = take_coefficient(self.model)
        self._mixers = install_mixers(self.model, self.config)

    def _end(self) -> None:
        """Restores the model's own attention, mixers and auxiliary loss."""
        for module in self._mixers:
            del module.forward  # the instance's attribute, which hides the method of its class
        self.model.set_attn_implementation(self._before_attach)
        if hasattr(self.model, COEFFICIENT):
            setattr(self.model, COEFFICIENT, self._coefficient)

    def detach(self) -> None:
        """Restores the model, which then refuses steps. Does nothing if it was detached before."""
        if _attached_to(self.model) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        self.model.register_forward_pre_hook(_refuse_step, with_kwargs=True)
        vars(self.model).pop("generate", None)
        if self._own_generate is not None:
            self.model.generate = self._own_generate
        self._end()

    def _again(self, dtype: str | torch.dtype | None) -> "Attached":
        """A second `attach` of the same model, which may name another dtype."""
        if layer_masks(self.config) != self.layers:
            raise ValueError(
                "the windows or chunks in the model's config have changed since attach: restore "
                "them, or call attached.detach() and then attach(model)"
            )
        self._check_implementation()
        self._needs_largest = needs_largest_position(self.model)
        self.dtype = dtype or self.dtype
        return self

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, with its own attention and caches."""
        if "dyncp_step" in kwargs:
            raise ValueError(
                "generate got dyncp_step, but it runs whole sequences with the model's own "
                "attention; leave it out"
            )
        with self._own_attention():
            return generate(*args, **kwargs)

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """Gives the model its own attention in this thread. Other threads are refused."""
        thread = threading.get_ident()
        if self._generates == thread:  # generation within generation
            yield
            return
        if self._generates is not None:
            raise ValueError(
                "an attached model generates in two threads at once; call attached.detach() first"
            )
        self._check_implementation()
        self._end()
        self._generates = thread
        try:
            yield
        finally:
            self._generates = None
            self._begin()

    def _runs_alone(self, kwargs: dict[str, Any]) -> bool:
        """Whether this forward is a part of generation. Nothing else runs without a step: not
        another thread, not a call with a step or with gradients."""
        if self._generates is None:
            return False
        if self._generates != threading.get_ident():
            raise ValueError("an attached model was called while it generates in another thread")
        if kwargs.get("dyncp_step") is not None or torch.is_grad_enabled():
            raise ValueError(
                "an attached model was called with a step or with gradients within generate, which "
                "runs whole sequences with the model's own attention"
            )
        return True

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
                "had no effect on it, or another one was set after attach; to set it again, call "
                "attached.detach() and attach(model)"
            )

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks the arguments of the model, and adds a row if it needs one."""
        given = kwargs.get("dyncp_step")
        if self._runs_alone(kwargs) or (isinstance(given, Call) and given.begun in self._around):
            return None
        self._check_implementation()
        step = _check_call(args, kwargs)
        batch = kwargs.pop("batch_fingerprint", None)
        rows = kwargs["position_ids"].shape[1]
        extra = 1 if self._needs_largest or rows == 0 else 0
        learns_in_eval = torch.is_grad_enabled() and not all(x.training for x in self._learning)
        positions = torch.ops.dyncp.enter(
            step.number,
            kwargs["position_ids"],
            batch,
            extra,
            self._needs_largest,
            learns_in_eval,
            any(dropout.training for dropout in self._dropouts),
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
        kwargs["dyncp_step"] = Call(step, self.layers, rows, extra, listed, module)
        return (), kwargs | {"use_cache": False}

    def _after(self, model: Any, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Checks that all layers have called dyncp, completes the loss, and removes added rows."""
        if self._runs_alone(kwargs):
            return output
        call: Call = kwargs["dyncp_step"]
        if call.begun is not model:
            return output  # completed around this model
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
        raise ValueError(f"{_without_step(args, step)}; call {CALL}")
    for name, value in kwargs.items():
        if name not in KEYWORDS and value is not None and value is not False:
            reason = REASONS.get(name, "dyncp does not know its effect on parts of sequences")
            raise ValueError(f"an attached model was called with {name}: {reason}. Leave it out")
    if kwargs.get("position_ids") is None or kwargs["position_ids"].ndim != 2:
        raise ValueError(
            "an attached model needs position_ids [1, rows], because a token's row on its rank is "
            "not its position; the loader's local data have them"
        )
    listed = "target_rows" in kwargs
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None and not listed:
        raise ValueError(
            "the model got labels without shift_labels; it would shift them by one row of this "
            "rank, but the next row is often not the next token. The loader's local data have both"
        )
    trained = listed or kwargs.get("shift_labels") is not None
    if trained and kwargs.get("num_items_in_batch") is None:
        raise ValueError(
            "the model got labels without num_items_in_batch; its loss would be a mean over this "
            "rank's targets. The loader's local data have the number of targets of all ranks"
        )
    return step


def _without_step(args: tuple[Any, ...], step: Any) -> str:
    """What is wrong with a call that has no step, or positional arguments."""
    if args:
        return "an attached model was called with positional arguments"
    if isinstance(step, Plan | RankPlan | DCPExecutor):
        return f"dyncp_step is {type(step).__name__}, not the step that prepare(plan) returns"
    if isinstance(step, Call):
        return (
            "a model is attached and a model around it as well: detach the inner one, attached."
            "detach()"
        )
    if step is not None:
        return f"dyncp_step is {type(step).__name__}; expected the step of executor.prepare(plan)"
    return (
        "an attached model was called without its step (only generate() runs without one; for "
        "other calls with the model's own attention, first call attached.detach())"
    )


def _with_rows(x: Tensor, extra: int, value: int) -> Tensor:
    """`[1, rows, ...]` with `extra` rows of `value` appended."""
    return pad(x, (0, 0) * (x.ndim - 2) + (0, extra), value=value) if extra else x


def _first_rows(value: Any, rows: int) -> Any:
    """The first `rows` rows of a tensor or a tuple of them: copies, because FSDP warns of views."""
    if isinstance(value, tuple):
        return tuple(_first_rows(x, rows) for x in value)
    return value if value.shape[1] == rows else value[:, :rows].clone()

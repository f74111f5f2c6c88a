"""An attached model with its own attention (generation), attached again, and called wrongly."""

import copy
import logging
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity_models import NAMES, make_model  # noqa: E402

from dyncp import DCPExecutor  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from dyncp.integrations.transformers.functions import warn_once  # noqa: E402
from hf_cases import planned, samples_of, virtual  # noqa: E402
from sizes import pick  # noqa: E402

pytestmark = pytest.mark.usefixtures("plans_here")

PROMPT = torch.tensor([[5, 17, 60, 2, 33, 8, 41]])
GENERATED = pick(("llama", "gpt_oss", "lfm2", "qwen3_next"), NAMES)


def generated(model):
    return model.generate(PROMPT, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("name", GENERATED)
def test_an_attached_model_generates_as_before_and_trains_as_before(name):
    model = make_model(name).eval()
    wanted = generated(model)
    attached = attach(model)
    data, step = virtual(model.config)
    with torch.no_grad():
        loss = model(**data, dyncp_step=step).loss
        assert torch.equal(generated(model), wanted)
        assert torch.equal(model(**data, dyncp_step=step).loss, loss)
    attached.detach()
    assert torch.equal(generated(model), wanted)
    assert "generate" not in vars(model)


@pytest.fixture
def llama():
    model = make_model("llama")
    return model, attach(model), *virtual(model.config)


def test_only_generate_runs_without_a_step(llama):
    model, _, data, _ = llama
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="without its step"):
            model(input_ids=data["input_ids"])
    generated(model)
    with torch.no_grad(), pytest.raises(ValueError, match="without its step"):
        model(input_ids=PROMPT)
    with pytest.raises(ValueError, match="without its step"):  # past attach's generate
        type(model).generate(model, PROMPT, max_new_tokens=2)


class Within(transformers.LogitsProcessor):
    """Calls a function while the model generates."""

    def __init__(self, function):
        self.function = function

    def __call__(self, input_ids, scores):
        self.function()
        return scores


def test_training_and_other_threads_within_generation_are_refused(llama):
    model, _, data, step = llama
    found = []

    def elsewhere():
        with pytest.raises(ValueError, match="while it generates in another thread"):
            model(**data, dyncp_step=step)
        with pytest.raises(ValueError, match="generates in two threads"):
            generated(model)
        found.append("refused")

    def calls():
        with pytest.raises(ValueError, match="with a step or with gradients within generate"):
            model(**data, dyncp_step=step)
        with torch.enable_grad(), pytest.raises(ValueError, match="with a step or with gradients"):
            model(input_ids=PROMPT)
        generated(model)  # generation within generation
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    wanted = generated(model)
    got = model.generate(
        PROMPT, max_new_tokens=1, do_sample=False, logits_processor=[Within(calls)]
    )
    assert torch.equal(got, wanted[:, : got.shape[1]])
    assert found == ["refused"]
    with pytest.raises(ValueError, match="generate got dyncp_step"):
        model.generate(PROMPT, dyncp_step=step)


def test_a_failed_generation_leaves_the_model_attached(llama):
    model, _, data, step = llama

    def fail():
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        model.generate(PROMPT, max_new_tokens=2, logits_processor=[Within(fail)])
    assert model.config._attn_implementation == "dyncp"
    assert torch.isfinite(model(**data, dyncp_step=step).loss)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "lfm2"])
def test_a_model_may_be_attached_twice(name):
    model = make_model(name)
    first = attach(model)
    data, step = virtual(model.config)
    loss = model(**data, dyncp_step=step).loss
    assert attach(model) is first
    assert attach(model, untested=True, dtype="bf16") is first
    assert first.shape().dtype == "bf16"
    assert attach(model) is first
    assert first.shape().dtype == "bf16"  # not the default again
    assert torch.equal(model(**data, dyncp_step=step).loss, loss)
    first.detach()
    first.detach()
    with pytest.raises(ValueError, match="called with dyncp_step, but it was detached"):
        model(**data, dyncp_step=step)
    ids = samples_of(0)[0]["input_ids"][None]
    assert torch.equal(model(ids, labels=ids).loss, make_model(name)(ids, labels=ids).loss)
    attach(model)
    assert torch.equal(model(**data, dyncp_step=step).loss, loss)


def test_a_copy_of_an_attached_model_is_attached_by_itself(llama):
    model, attached, data, step = llama
    loss = model(**data, dyncp_step=step).loss
    other = copy.deepcopy(model)
    assert attach(other).model is other
    attached.detach()
    assert torch.equal(other(**data, dyncp_step=step).loss, loss)
    again = copy.deepcopy(model)  # of a detached model
    attach(again)
    assert torch.equal(again(**data, dyncp_step=step).loss, loss)
    with pytest.raises(ValueError, match="without its step"):
        other(input_ids=PROMPT)
    model(input_ids=PROMPT)


def test_changes_after_attach_that_attach_cannot_follow_are_refused(llama):
    model, _, data, step = llama
    inner = attach(model.model)
    with pytest.raises(ValueError, match="a model around it as well: detach the inner one"):
        model(**data, dyncp_step=step)
    inner.detach()
    mistral = make_model("mistral")
    attach(mistral)
    mistral.config.sliding_window = 7
    with pytest.raises(ValueError, match="windows or chunks in the model's config have changed"):
        attach(mistral)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="is 'eager', not 'dyncp'"):
        attach(model)
    with pytest.raises(ValueError, match="is 'eager', not 'dyncp'"):
        generated(model)


def test_what_is_not_a_step_is_named(llama):
    model, _, data, _ = llama
    _, _, plan = planned(model.config, 0, 4)
    for given, message in (
        (plan, r"dyncp_step is Plan, not the step .*=executor\.prepare\(plan\)"),
        (plan.parts[0], "dyncp_step is RankPlan, not the step that prepare"),
        (DCPExecutor(virtual_ranks=4), "dyncp_step is DCPExecutor, not the step"),
        (7, "dyncp_step is int; expected the step"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**data, dyncp_step=given)


def warnings_of(caplog, call):
    warn_once.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dyncp"):
        call()
        call()
    return [x.message for x in caplog.records if " mode " in x.message]


def test_learning_in_eval_mode_is_warned_of_once(llama, caplog):
    model, _, data, step = llama
    model.eval()

    def call():
        model(**data, dyncp_step=step)

    assert len(warnings_of(caplog, call)) == 1
    with torch.no_grad():
        assert not warnings_of(caplog, call)
    model.train()
    assert not warnings_of(caplog, call)
    model.model.layers[1].eval()  # only a part of it
    assert len(warnings_of(caplog, call)) == 1
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert len(warnings_of(caplog, lambda: compiled(**data, dyncp_step=step))) == 1
    plan = planned(model.config, 0, 4, forward_only=True)[2]  # for evaluation
    evaluation = DCPExecutor(virtual_ranks=4).prepare(plan)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    assert not warnings_of(caplog, lambda: model(**data, dyncp_step=evaluation))


def test_dropout_in_evaluation_is_warned_of_once(caplog):
    model = make_model("gpt2", resid_pdrop=0.1)
    attach(model)
    data, step = virtual(model.config, forward_only=True)

    def call():
        with torch.no_grad():
            model(**data, dyncp_step=step)

    assert "plan for evaluation: its dropout is on" in warnings_of(caplog, call)[0]
    model.eval()
    assert not warnings_of(caplog, call)

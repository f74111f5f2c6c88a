"""Transformers models under dyncp, on virtual ranks: their results, and what is refused."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity_models import NAMES, config_of, make_model  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from dyncp import DCPDataLoader, DCPExecutor, make_local_data, masks  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from hf_cases import plain_model, planned, samples_of, virtual, whole_loss  # noqa: E402
from sizes import full, pick  # noqa: E402

pytestmark = pytest.mark.usefixtures("plans_here")


def close(model, dense):
    """The largest difference of gradients, relative to the largest gradient."""
    pairs = [
        (got.grad, wanted.grad)
        for got, wanted in zip(model.parameters(), dense.parameters(), strict=True)
        if wanted.grad is not None
    ]
    largest = max(wanted.abs().max() for _, wanted in pairs)
    return max((got - wanted).abs().max() for got, wanted in pairs) / largest


@pytest.mark.parametrize("mask_fn", [masks.causal, full(masks.shared_question(answers=2))])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_are_those_of_one_process(name, mask_fn):
    model, dense = make_model(name), plain_model(name)
    attach(model)
    data, step = virtual(model.config, mask_fn=mask_fn)
    loss = model(**data, dyncp_step=step).loss
    wanted = whole_loss(dense, 0, mask_fn)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    loss.backward()
    wanted.backward()
    assert close(model, dense) < 1e-5


def test_a_model_with_local_layers_needs_their_masks_from_the_loader():
    model = make_model("gemma3")
    attached = attach(model)
    samples = samples_of(0)
    options = {"virtual_ranks": 2, "tokens_per_batch": 300}
    with DCPDataLoader(samples, masks.causal, **options) as loader:
        data, plan = next(iter(loader))
    step = DCPExecutor(virtual_ranks=2).prepare(plan)
    with pytest.raises(ValueError, match="layer 0 needs mask 'window_24', and the plan"):
        model(**data, dyncp_step=step)
    with attached.loader(samples, masks.causal, **options) as loader:
        data, plan = next(iter(loader))
    assert set(plan.parts[0].masks) == {"window_24", "default"}
    assert plan.parts[0].shape.exact
    step = DCPExecutor(virtual_ranks=2).prepare(plan)
    assert torch.isfinite(model(**data, dyncp_step=step).loss)


def test_masks_of_local_layers_are_derived_from_a_users_own_function_too():
    attached = attach(make_model("gemma3"))
    found = attached.masks(lambda sample: masks.shared_question(len(sample["input_ids"])))(
        {"input_ids": [0] * 90}
    )
    assert found["default"] == masks.shared_question(90)
    assert found["window_24"] == masks.within(masks.shared_question(90), window=24)
    by_name = masks.named(default=masks.causal, window_24=masks.sliding_window(window=24))
    assert attached.masks(by_name) is by_name
    with pytest.raises(ValueError, match="the model's layers also need window_24"):
        attached.masks(masks.named(default=masks.causal))
    with pytest.raises(ValueError, match="the model's layers also need window_24"):
        attached.masks(lambda sample: {"default": masks.causal(sample)})({"input_ids": [1, 2]})


REFUSED = {
    "softcap": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TINY)),
        r"softcap on attention scores \(attn_logit_softcapping=50.0\)",
    ),
    "linear attention": (
        lambda: transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**TINY)),
        "of type 'linear_attention', which needs whole sequences in order",
    ),
    "falcon": (
        lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        ),
        "FalconForCausalLM has its own attention code",
    ),
    "gpt-j": (
        lambda: transformers.GPTJForCausalLM(
            transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
        ),
        "GPTJForCausalLM has its own attention code",
    ),
    "bloom": (
        lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2)
        ),
        "BloomForCausalLM has its own attention code",
    ),
    "layerdrop": (lambda: make_model("opt", layerdrop=0.1), "layerdrop=0.1"),
    "another loss": (
        lambda: transformers.LlamaForSequenceClassification(config_of("llama")),
        "loss 'ForSequenceClassification'",
    ),
    "not tried": (
        lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**TINY)),
        r"has not been compared with one process; tested are .*llama",
    ),
    "no model": (lambda: torch.nn.Linear(2, 2), "attach got Linear"),
}
TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": None,
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_would_be_wrong_are_refused_at_attach(what):
    make, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        attach(make())


def test_an_untested_model_runs_if_its_user_says_so():
    config = transformers.Qwen2Config(**TINY | {"vocab_size": 97})
    model = transformers.Qwen2ForCausalLM(config)
    attach(model, untested=True)
    data, step = virtual(model.config)
    assert torch.isfinite(model(**data, dyncp_step=step).loss)


@pytest.fixture(scope="module")
def llama():
    model = make_model("llama")
    attach(model)
    return model, *virtual(model.config)


CALLS = {
    "attention_mask": (
        {"attention_mask": torch.ones(1, 3)},
        "called with attention_mask: masks are part of the plan, and the loader removes padding",
    ),
    "scores": ({"output_attentions": True}, "called with output_attentions: attention scores"),
    "cache": ({"use_cache": True}, "called with use_cache"),
    "last logits": ({"logits_to_keep": 1}, "the last rows of a rank are not the last tokens"),
    "unknown": ({"token_type_ids": torch.ones(1, 3)}, "called with token_type_ids"),
    "no positions": ({"position_ids": None}, r"needs position_ids \[1, rows\]"),
    "labels that it would shift": ({"shift_labels": None}, "labels without shift_labels"),
    "a mean of this rank": ({"num_items_in_batch": None}, "labels without num_items_in_batch"),
    "no fingerprint": ({"batch_fingerprint": None}, "called without batch_fingerprint"),
    "no step": ({"dyncp_step": None}, "without its step"),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_would_be_wrong_are_refused(llama, what):
    model, data, step = llama
    options, message = CALLS[what]
    with pytest.raises(ValueError, match=message):
        model(**data | {"dyncp_step": step} | options)


def test_local_data_of_another_batch_are_refused_also_with_as_many_rows(llama):
    model, data, step = llama
    other = data | {"batch_fingerprint": data["batch_fingerprint"] + 1}
    with pytest.raises(ValueError, match="local data and step are of different batches"):
        model(**other, dyncp_step=step)
    short = {name: value[:, :-8] if value.ndim == 2 else value for name, value in data.items()}
    with pytest.raises(ValueError, match="are of different batches, or of different ranks"):
        model(**short, dyncp_step=step)


def test_a_stale_step_is_refused(llama):
    model, _, step = llama
    data, _ = virtual(model.config, 1)
    with pytest.raises(ValueError, match="different batches"):
        model(**data, dyncp_step=step)


def test_positional_arguments_and_inner_models_are_refused(llama):
    model, data, step = llama
    with pytest.raises(ValueError, match="positional arguments"):
        model(data["input_ids"], dyncp_step=step)
    with pytest.raises(ValueError, match="on the model that was given to attach"):
        model.model(input_ids=data["input_ids"], dyncp_step=step)
    with pytest.raises(ValueError, match="without return_dict=False"):
        model(**data, dyncp_step=step, return_dict=False)


def test_another_attention_set_afterwards_is_noticed():
    model = make_model("llama")
    attach(model)
    data, step = virtual(model.config)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="is 'sdpa', not 'dyncp'"):
        model(**data, dyncp_step=step)


def test_a_layer_that_does_not_call_dyncp_is_named():
    model = make_model("llama")
    attach(model)
    data, step = virtual(model.config)
    layer = model.model.layers[1].self_attn
    layer.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"layers \[1\] of LlamaForCausalLM did not call"):
        model(**data, dyncp_step=step)


def test_attention_dropout_is_refused_in_training_only():
    model = make_model("llama", attention_dropout=0.1)
    attach(model)
    data, step = virtual(model.config)
    model.eval()
    model(**data, dyncp_step=step)
    model.train()
    with pytest.raises(ValueError, match=r"attention dropout is 0\.1 in training"):
        model(**data, dyncp_step=step)


def test_unsupported_attention_arguments_of_a_layer_are_refused():
    model = make_model("llama")
    attach(model)
    data, step = virtual(model.config)
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"softcap": 30.0}), with_kwargs=True
    )
    with pytest.raises(ValueError, match="LlamaAttention calls attention with softcap"):
        model(**data, dyncp_step=step)


def test_a_window_that_only_the_layer_knows_is_noticed():
    model = make_model("mistral")
    attach(model)
    data, step = virtual(model.config)
    model.config.sliding_window = 7
    with pytest.raises(ValueError, match="given mask 'dyncp 7' and window 7; according to"):
        model(**data, dyncp_step=step)


def test_a_batch_without_targets_has_loss_0():
    model = make_model("llama")
    attach(model)
    samples = [x | {"labels": torch.full_like(x["input_ids"], -100)} for x in samples_of(0)]
    _, batch, plan = planned(model.config, 0, 4)
    data = make_local_data(samples, batch, plan)
    loss = model(**data, dyncp_step=DCPExecutor(virtual_ranks=4).prepare(plan)).loss
    assert loss.item() == 0
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt_oss"])
def test_autocast_gives_attention_one_dtype_whatever_the_plan_assumes(name, dtype):
    model = make_model(name)
    attached = attach(model)
    executor = DCPExecutor(virtual_ranks=2)
    options = {"virtual_ranks": 2, "tokens_per_batch": 300, "executor": executor}
    with attached.loader(samples_of(0), masks.causal, **options) as loader:
        data, plan = next(iter(loader))
    assert plan.parts[0].shape == attached.shape()
    step = executor.prepare(plan)
    with torch.autocast("cpu", dtype=dtype):
        loss = model(**data, dyncp_step=step).loss
    loss.backward()
    attached.detach()
    assert loss.item() == pytest.approx(whole_loss(plain_model(name), 0).item(), rel=1e-2)
    with torch.autocast("cpu", dtype=dtype):
        whole = whole_loss(plain_model(name), 0)
    assert loss.item() == pytest.approx(whole.item(), rel=2e-3)


def test_autocast_leaves_attention_in_fp64_alone():
    model = make_model("llama").double()
    attach(model)
    data, step = virtual(model.config)
    loss = model(**data, dyncp_step=step).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(**data, dyncp_step=step).loss.item() == pytest.approx(loss.item(), rel=1e-9)


def test_the_auxiliary_loss_is_that_of_all_tokens_once():
    model, dense = make_model("qwen3_moe"), plain_model("qwen3_moe")
    attach(model)
    data, step = virtual(model.config)
    output = model(**data, dyncp_step=step)
    without = model(**data, dyncp_step=step, output_router_logits=False)
    wanted = whole_loss(dense, 0)
    assert output.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    coefficient = model.config.router_aux_loss_coef
    assert (output.loss - without.loss).item() == pytest.approx(
        coefficient * output.aux_loss.item(), rel=1e-3
    )


def test_detach_restores_the_model():
    model, dense = make_model("qwen3_moe"), make_model("qwen3_moe")
    attached = attach(model)
    attached.detach()
    ids = samples_of(0)[0]["input_ids"][None]
    got, wanted = (m(input_ids=ids, labels=ids).loss for m in (model, dense))
    assert torch.equal(got, wanted)


def test_a_saved_model_does_not_mention_dyncp(tmp_path):
    model = make_model("llama")
    attach(model)
    model.save_pretrained(tmp_path)
    assert "dyncp" not in (tmp_path / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


def test_only_the_first_two_of_many_batches_compile():
    torch._dynamo.reset()
    model, plain = make_model("gemma3"), make_model("gemma3")
    for each in (model, plain):
        attach(each)
    counter = CompileCounterWithBackend(pick("eager", "aot_eager"))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    graphs = []
    for number in range(pick(6, 50)):
        data, step = virtual(model.config, number % 3, ranks=2 + number % 5)
        with torch.set_grad_enabled(number < 4):
            loss = compiled(**data, dyncp_step=step).loss
        graphs.append(counter.frame_count)
        if number < 4:
            loss.backward()
            wanted = plain(**data, dyncp_step=step).loss
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert graphs[1] == graphs[3]
    assert graphs[4] == graphs[-1]  # one more compilation without gradients


def test_a_model_that_gives_router_logits_compiles_as_one_graph():
    torch._dynamo.reset()
    model = make_model("qwen3_moe")
    attach(model)
    data, step = virtual(model.config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    loss = compiled(**data, dyncp_step=step).loss
    assert loss.item() == pytest.approx(model(**data, dyncp_step=step).loss.item(), rel=1e-6)

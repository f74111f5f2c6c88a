"""Models inside PEFT's wrappers."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra transformers is not installed")

pytest.importorskip("peft")

from benchmarks.parity_models import documents, make_model  # noqa: E402
from peft import LoraConfig, PromptTuningConfig, get_peft_model  # noqa: E402
from peft.tuners.tuners_utils import BaseTuner  # noqa: E402

from dyncp import DCPExecutor, LoaderTuning, PlannerConfig, masks  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from dyncp.integrations.transformers.trainer import TrainerMixin  # noqa: E402
from hf_cases import virtual, whole_loss  # noqa: E402


def with_lora(name, task):
    """A model with noisy adapters. PEFT has wrappers by task, which call the model in different
    ways."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task
    )
    return get_peft_model(make_model(name), config)


class DynamicTrainer(TrainerMixin, transformers.Trainer):
    pass


@pytest.fixture(params=["forward", "call"])
def calls(request, monkeypatch):
    """PEFT's tuners call the model's `forward` (as 0.19 does), or the model (as 0.21 does)."""
    chosen = {
        "forward": lambda self, *args, **kwargs: self.model.forward(*args, **kwargs),
        "call": lambda self, *args, **kwargs: self.model(*args, **kwargs),
    }
    monkeypatch.setattr(BaseTuner, "forward", chosen[request.param])
    return request.param


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])
def test_a_wrapped_model_has_the_loss_and_gradients_of_its_own_attention(task, calls):
    wrapped, plain = with_lora("gemma3", task), with_lora("gemma3", task)
    attached = attach(wrapped)
    assert attach(wrapped) is attach(attached.model) is attached
    data, step = virtual(attached.model.config)
    loss, wanted = wrapped(**data, dyncp_step=step).loss, whole_loss(plain, 0)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    loss.backward()
    wanted.backward()
    for got, expected in zip(wrapped.parameters(), plain.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(got.grad, expected.grad, rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="called without its step"):
        wrapped(**data)
    ids = data["input_ids"][:, :5]
    assert wrapped.generate(input_ids=ids, max_new_tokens=2, do_sample=False).shape == (1, 7)
    attached.detach()
    assert torch.isfinite(wrapped(input_ids=ids).logits).all()


def test_a_model_that_peft_wraps_after_attach_is_attached_once_more(calls):
    model = make_model("llama")
    attached = attach(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
    if calls == "forward":
        data, step = virtual(model.config)
        with pytest.raises(ValueError, match="bypass its hooks"):
            wrapped(**data, dyncp_step=step)
    assert attach(wrapped) is attached
    data, step = virtual(model.config)
    wanted = whole_loss(make_model("llama"), 0)  # a new adapter changes nothing
    assert wrapped(**data, dyncp_step=step).loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_adapters_that_add_tokens_are_refused():
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = get_peft_model(make_model("llama"), config)
    with pytest.raises(ValueError, match=r"adapter 'default' .* PROMPT_TUNING, which puts tokens"):
        attach(wrapped)


def test_trainer_takes_a_wrapped_model(tmp_path):
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    options = {
        "tokens_per_batch": 300,
        "shuffle": False,
        "planner": PlannerConfig(block_size=16),
        "tuning": LoaderTuning(num_planners=0),
    }
    samples = documents(5)
    wrapped, plain = with_lora("llama", "CAUSAL_LM"), with_lora("llama", "CAUSAL_LM")
    trainer = DynamicTrainer(
        wrapped, args, train_dataset=samples, mask_fn=masks.causal, loader_options=options
    )
    trainer.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    executor, batches = DCPExecutor(), attach(plain).loader(samples, masks.causal, **options)
    with batches:
        for _, (data, plan) in zip(range(2), batches, strict=False):
            plain(**data, dyncp_step=executor.prepare(plan)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(wrapped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)

"""Models inside PEFT's wrapper, which calls their `forward` past their hooks."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
pytest.importorskip("accelerate", reason="the extra transformers is not installed")

from types import SimpleNamespace  # noqa: E402

from benchmarks.parity_models import documents, make_model  # noqa: E402
from torch import nn  # noqa: E402

from dyncp import DCPExecutor, LoaderTuning, PlannerConfig, masks  # noqa: E402
from dyncp.integrations.transformers import attach  # noqa: E402
from dyncp.integrations.transformers.trainer import TrainerMixin  # noqa: E402
from hf_cases import virtual, whole_loss  # noqa: E402


class Tuner(nn.Module):
    """Calls the model as PEFT's tuners do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class Wrapped(nn.Module):
    """What of a PeftModelForCausalLM concerns its caller; PEFT is not among the dependencies."""

    def __init__(self, model, **options):
        super().__init__()
        self.base_model, self.config = Tuner(model), model.config
        adapter = {"is_prompt_learning": False, "peft_type": "LORA"} | options
        self.peft_config = {"default": SimpleNamespace(**adapter)}

    def get_base_model(self):
        return self.base_model.model

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None, **more):
        given = {"attention_mask": attention_mask, "labels": labels, "return_dict": return_dict}
        return self.base_model(input_ids=input_ids, **given, **more)


class DynamicTrainer(TrainerMixin, transformers.Trainer):
    pass


def test_a_wrapped_model_has_the_loss_of_its_own_attention():
    model = make_model("gemma3")
    wanted = whole_loss(model, 0)
    wrapped = Wrapped(model)
    attached = attach(wrapped)
    data, step = virtual(model.config)
    assert wrapped(**data, dyncp_step=step).loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    with pytest.raises(ValueError, match="called without its step"):
        wrapped(**data)
    attached.detach()
    assert torch.isfinite(wrapped(input_ids=data["input_ids"]).logits).all()


def test_adapters_that_add_tokens_are_refused():
    wrapped = Wrapped(make_model("llama"), is_prompt_learning=True, peft_type="PREFIX_TUNING")
    with pytest.raises(
        ValueError, match="'default' of Wrapped is PREFIX_TUNING, which puts tokens"
    ):
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
    samples, wrapped, plain = documents(5), Wrapped(make_model("llama")), make_model("llama")
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

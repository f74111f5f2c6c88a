"""Transformers models on a GPU, on virtual ranks, against Transformers' own attention."""

import pytest

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity_models import make_model
from gpu_cases import GPU

from dyncp import DCPExecutor, make_local_data, masks
from dyncp.integrations.transformers import attach
from hf_cases import plain_model, planned, whole_loss

WIDE = {"hidden_size": 64}  # head dim 16
NARROW = {"head_dim": 16}
MODELS = {
    "llama": WIDE,
    "qwen3_moe": NARROW,
    "gemma3": NARROW,  # windows by layer, own scale
    "gpt_oss": NARROW,  # sinks
    "lfm2": WIDE,  # convolutions
}


@pytest.mark.parametrize("mask_fn", [masks.causal, masks.shared_question(answers=2)])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_one_process(name, mask_fn):
    if name == "lfm2":
        pytest.importorskip("transformers", "5.22", reason="layers get the step from 5.22 on")
    model, dense = make_model(name, **MODELS[name]), plain_model(name, **MODELS[name])
    attach(model.to(GPU))
    samples, batch, plan = planned(model.config, 0, 4, mask_fn)
    data = {field: rows.to(GPU) for field, rows in make_local_data(samples, batch, plan).items()}
    step = DCPExecutor(virtual_ranks=4, device=GPU).prepare(plan)
    wanted = whole_loss(dense, 0, mask_fn)
    wanted.backward()
    for _ in range(3):  # launched, captured, replayed
        model.zero_grad()
        loss = model(**data, dyncp_step=step).loss
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        loss.backward()
        assert difference(model, dense) < 1e-4


def difference(model, dense) -> float:
    """The largest difference of gradients, relative to the largest gradient."""
    pairs = [
        (got.grad.cpu(), expected.grad)
        for got, expected in zip(model.parameters(), dense.parameters(), strict=True)
        if expected.grad is not None
    ]
    largest = max(expected.abs().max() for _, expected in pairs)
    return float(max((got - expected).abs().max() for got, expected in pairs) / largest)

"""A custom model under dyncp gives the results of one process."""

from functools import partial

import pytest
import torch
from benchmarks.decoder import token_losses
from decoders import attend_under, dense_attend, new_decoder, one_batch, random_documents

from dyncp import (
    DCPAttn,
    DCPDataLoader,
    DCPExecutor,
    PlannerConfig,
    masks,
    next_token_loss,
    sum_gradients,
    sum_over_ranks,
)
from processes import run_ranks

pytestmark = pytest.mark.usefixtures("plans_here")

MASKS = {
    "causal": masks.causal,
    "sliding_window": masks.sliding_window(window=9),
    "lambda_shaped": masks.lambda_shaped(sinks=3, window=7),
    "shared_question": masks.shared_question(answers=3),
    "masked": masks.own_labels(masks.full),
}


def loss_and_gradients(decoder, data, attend):
    logits = decoder(data, attend)
    loss = next_token_loss(logits, data)
    decoder.zero_grad()
    loss.backward()
    return logits.detach(), loss.item(), {n: p.grad for n, p in decoder.named_parameters()}


@pytest.mark.parametrize("solver", ["owner_computes", "zigzag", "random"])
@pytest.mark.parametrize("name", MASKS)
def test_three_ranks_give_the_logits_and_gradients_of_the_dense_run(name, solver):
    documents, decoder = random_documents(61, 5, 30, 1, 17), new_decoder()
    if name == "masked":
        documents = [one | {"labels": one["input_ids"].flip(0)} for one in documents]
    data, step = one_batch(documents, MASKS[name], 3, solver)
    logits, loss, gradients = loss_and_gradients(decoder, data, attend_under(step))
    dense_data, _ = one_batch(documents, MASKS[name], 1, "uncut")
    attend = dense_attend(documents, MASKS[name])
    dense_logits, dense_loss, dense_gradients = loss_and_gradients(decoder, dense_data, attend)

    torch.testing.assert_close(torch.cat(step.gather(logits)), dense_logits, rtol=0, atol=1e-10)
    assert abs(loss - dense_loss) < 1e-10
    for parameter, expected in dense_gradients.items():
        torch.testing.assert_close(gradients[parameter], expected, rtol=0, atol=1e-10)
        assert expected.abs().max() > 1e-6, f"{parameter} has no gradient to compare"


def test_a_rank_without_tokens_has_zero_loss_and_zero_gradients():
    decoder, none = new_decoder(), torch.zeros(1, 0, dtype=torch.int64)
    data = {"input_ids": none, "position_ids": none, "shift_labels": none}
    data["num_items_in_batch"] = torch.tensor(7)

    def attend(q, kv):  # reads q, k and v, as attention does
        return q + kv.sum(dim=1).repeat_interleave(2, dim=1)

    _, loss, gradients = loss_and_gradients(decoder, data, attend)
    assert loss == 0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def gradients_of_rank(rank):
    """Loss and summed gradients of one document of 2 tokens on two ranks."""
    decoder = new_decoder()
    ((data, plan),) = DCPDataLoader(
        random_documents(2), masks.causal, tokens_per_batch=8, planner=PlannerConfig(block_size=2)
    )
    step = DCPExecutor(timeout=30).prepare(plan)
    loss = next_token_loss(decoder(data, partial(DCPAttn.apply, step)), data)
    loss.backward()
    sum_gradients(decoder)
    gradients = [p.grad.numpy() for p in decoder.parameters()]
    return data["input_ids"].numel(), sum_over_ranks(loss.detach()).item(), gradients


def test_gradients_are_summed_with_those_of_a_process_without_tokens():
    (some, loss, gradients), (none, other_loss, other_gradients) = run_ranks(gradients_of_rank, 2)
    assert sorted([some, none]) == [0, 2]
    decoder = new_decoder()
    data, _ = one_batch(random_documents(2), masks.causal, 1, "uncut")
    attend = dense_attend(random_documents(2), masks.causal)
    _, expected, dense = loss_and_gradients(decoder, data, attend)
    assert abs(loss - expected) < 1e-10
    assert loss == other_loss
    for a, b, c in zip(gradients, other_gradients, dense.values(), strict=True):
        assert (a == b).all()
        torch.testing.assert_close(torch.from_numpy(a), c, rtol=0, atol=1e-10)


def test_the_loss_is_the_mean_over_targets():
    documents, decoder = random_documents(9, 4), new_decoder()
    data, step = one_batch(documents, masks.causal, 2, "random")
    logits = decoder(data, attend_under(step))
    losses = token_losses(logits, data)
    targets = data["shift_labels"].flatten() != -100
    assert targets.sum() == 8 + 3
    torch.testing.assert_close(next_token_loss(logits, data), losses[targets].mean())
    assert not losses[~targets].any()

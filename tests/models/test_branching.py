"""Branches that share a question train as if each were a separate sequence."""

import pytest
import torch
from benchmarks.decoder import token_losses
from decoders import attend_under, dense_attend, new_decoder, one_batch, random_documents

from dyncp import masks

QUESTION, ANSWERS = 13, (11, 1, 24, 6)


def branch_losses(tokens):
    """Per-token losses of one sequence with dense attention."""
    data, _ = one_batch([{"input_ids": tokens}], masks.causal, 1, "uncut")
    logits = new_decoder()(data, dense_attend([{"input_ids": tokens}], masks.causal))
    return token_losses(logits, data).detach()


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_branch_has_the_losses_of_its_own_sequence(ranks):
    tokens = random_documents(QUESTION + sum(ANSWERS))[0]["input_ids"]
    mask = masks.shared_question(answers=list(ANSWERS))
    data, step = one_batch([{"input_ids": tokens}], mask, ranks, "random")
    (losses,) = step.gather(token_losses(new_decoder()(data, attend_under(step)), data).detach())

    question, *answers = torch.split(tokens, [QUESTION, *ANSWERS])
    shared, *branches = torch.split(losses, [QUESTION, *ANSWERS])
    for answer, branch in zip(answers, branches, strict=True):
        alone = branch_losses(torch.cat([question, answer]))
        # With several answers, the last token of the question has no target.
        torch.testing.assert_close(shared[:-1], alone[: QUESTION - 1], rtol=0, atol=1e-10)
        torch.testing.assert_close(branch, alone[QUESTION:], rtol=0, atol=1e-10)
    assert shared[-1] == 0
    assert (losses != 0).sum() == QUESTION - 1 + sum(ANSWERS) - len(ANSWERS)


def test_a_single_answer_trains_on_its_first_token():
    tokens = random_documents(20)[0]["input_ids"]
    data, step = one_batch(
        [{"input_ids": tokens}], masks.shared_question(answers=[12]), 2, "random"
    )
    (losses,) = step.gather(token_losses(new_decoder()(data, attend_under(step)), data).detach())
    torch.testing.assert_close(losses, branch_losses(tokens), rtol=0, atol=1e-10)

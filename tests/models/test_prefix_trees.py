"""A prefix tree has the loss and gradients of its paths as separate sequences."""

import pytest
import torch
from decoders import attend_under, dense_attend, new_decoder, one_batch, random_documents

from dyncp import masks, next_token_loss

PARENTS = [-1, 0, 1, 1, 0, 4, 4, 4, 0]
LENGTHS = [13, 5, 11, 1, 7, 3, 24, 6, 2]


def paths():
    """For every leaf, the nodes from the root to it."""
    for node in range(len(PARENTS)):
        if node not in PARENTS:
            path = [node]
            while PARENTS[path[0]] >= 0:
                path.insert(0, PARENTS[path[0]])
            yield path


def gradients(decoder):
    return {name: p.grad for name, p in decoder.named_parameters()}


def unrolled(tokens):
    """Mean loss over all targets of all paths, and its gradients."""
    nodes = torch.split(tokens, LENGTHS)
    samples = [{"input_ids": torch.cat([nodes[i] for i in path])} for path in paths()]
    data, _ = one_batch(samples, masks.causal, 1, "uncut")
    decoder = new_decoder()
    loss = next_token_loss(decoder(data, dense_attend(samples, masks.causal)), data)
    loss.backward()
    return loss.detach(), gradients(decoder)


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_weights_by_leaf_a_tree_is_its_unrolled_paths(ranks):
    tokens = random_documents(sum(LENGTHS))[0]["input_ids"]
    mask = masks.prefix_tree(parents=PARENTS, lengths=LENGTHS, weights="leaf")
    data, step = one_batch([{"input_ids": tokens}], mask, ranks, "random")
    decoder = new_decoder()
    loss = next_token_loss(decoder(data, attend_under(step)), data)
    loss.backward()
    expected, expected_gradients = unrolled(tokens)
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=1e-10)
    for name, gradient in gradients(decoder).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-9)


def test_every_target_counts_once_without_weights():
    tokens = random_documents(sum(LENGTHS))[0]["input_ids"]
    mask = masks.prefix_tree(parents=PARENTS, lengths=LENGTHS)
    data, _ = one_batch([{"input_ids": tokens}], mask, 2, "random")
    assert int(data["num_items_in_batch"]) == sum(LENGTHS) - 1
    assert torch.equal(tokens[data["target_tokens"]], data["target_labels"])
    assert data["target_tokens"].sort().values.tolist() == [list(range(1, sum(LENGTHS)))]


def test_labels_that_are_not_trained_stay_out_of_the_list():
    tokens = random_documents(sum(LENGTHS))[0]["input_ids"]
    labels = tokens.clone()
    labels[: LENGTHS[0]] = -100  # the prompt
    mask = masks.prefix_tree(parents=PARENTS, lengths=LENGTHS)
    data, _ = one_batch([{"input_ids": tokens, "labels": labels}], mask, 2, "random")
    assert int(data["num_items_in_batch"]) == sum(LENGTHS[1:])
    assert data["target_weights"].sum() == sum(LENGTHS[1:])

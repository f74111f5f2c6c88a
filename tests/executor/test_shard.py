"""`step.shard` and `step.gather`: per-token tensors of a batch to ranks' rows and back."""

import pytest
import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Layout,
    PlannerConfig,
    Topology,
    make_local_data,
    masks,
    plan_batch,
    target_log_probs,
)
from processes import run_ranks

LENGTHS = (37, 5, 61, 12)
SHAPE = AttentionShape(2, 1, 8, "fp64")


def make_plan(ranks, multiple=1):
    config = PlannerConfig(solver="random", block_size=8, layout=Layout(local_multiple=multiple))
    batch = Batch.of([masks.causal(length) for length in LENGTHS])
    return plan_batch(batch, Topology(1, ranks), SHAPE, config)


def values(width=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(LENGTHS), width, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("multiple", [1, 16])
def test_what_is_sharded_comes_back_in_the_order_of_the_batch(multiple):
    step = DCPExecutor(virtual_ranks=3).prepare(make_plan(3, multiple))
    for given in (values(), list(values().split(LENGTHS))):
        rows = step.shard(given, fill=-7.0)
        assert len(rows) == step.num_rows
        assert (rows == -7.0).all(dim=1).sum() == step.num_rows - sum(LENGTHS)
        assert torch.equal(torch.cat(step.gather(rows)), values())


def test_gradients_of_sharded_tensors_are_those_of_their_rows():
    step = DCPExecutor(virtual_ranks=3).prepare(make_plan(3))
    whole = values().requires_grad_()
    weights = torch.randn(step.num_rows, 3, dtype=torch.float64)
    (step.shard(whole) * weights).sum().backward()
    assert torch.equal(whole.grad, torch.cat(step.gather(weights)))


TREE = masks.prefix_tree(parents=[-1, 0, 0, 2], lengths=[20, 7, 9, 1])


def make_targets(ranks, mask=TREE):
    """Two sequences whose targets are listed: local data of every rank, and the plan."""
    samples = [{"input_ids": torch.arange(100, 137)}, {"input_ids": torch.arange(5)}]
    batch = Batch.of([mask(37), masks.causal(5)])
    config = PlannerConfig(solver="random", block_size=4)
    plan = plan_batch(batch, Topology(1, ranks), SHAPE, config)
    data = [make_local_data(samples, batch, part, list_targets=True) for part in plan.parts]
    return data, plan, make_local_data(samples, batch, plan, list_targets=True)


@pytest.mark.parametrize("mask", [TREE, masks.causal])
def test_what_belongs_to_predicted_tokens_goes_by_target_and_back(mask):
    _, plan, data = make_targets(3, mask)
    step = DCPExecutor(virtual_ranks=3).prepare(plan)
    whole = [torch.arange(100.0, 137), torch.arange(5.0)]
    found = step.shard_targets(whole, data)
    assert found.tolist() == data["target_labels"][0].tolist()
    back = step.gather_targets(found, data)
    assert [x.tolist() for x in back] == [[0.0, *range(101, 137)], [0.0, *range(1, 5)]]


def target_gradients(rank, loss):
    data, plan, _ = make_targets(2)
    step = DCPExecutor().prepare(plan.parts[rank])
    mine = data[rank]
    values = (mine["target_labels"][0] * 0.1).double().requires_grad_()
    sequences = step.gather_targets(values, mine, loss=loss)
    terms = [x.sum() ** 3 + (x**2).sum() for x in sequences]
    (sum(terms) if loss == "replicated" else terms[rank]).backward()
    return [x.tolist() for x in step.gather_targets(values.grad, mine)]


@pytest.mark.parametrize("loss", ["replicated", "summed"])
def test_gradients_of_gathered_targets_flow_back_to_their_ranks(loss):
    whole = torch.cat([torch.arange(100.0, 137), torch.arange(5.0)]).double() * 0.1
    whole[[0, 37]] = 0  # nothing predicts the first token
    whole.requires_grad_()
    sum(x.sum() ** 3 + (x**2).sum() for x in whole.split([37, 5])).backward()
    expected = whole.grad.clone()
    expected[[0, 37]] = 0
    for found in run_ranks(target_gradients, 2, loss):
        torch.testing.assert_close(
            torch.tensor([x for one in found for x in one]).double(), expected
        )


def test_targets_that_are_not_listed_or_of_another_batch_are_refused():
    _, plan, data = make_targets(2)
    step = DCPExecutor(virtual_ranks=2).prepare(plan)
    other = DCPExecutor(virtual_ranks=2).prepare(make_plan(2))
    with pytest.raises(ValueError, match="of different batches"):
        other.shard_targets(values(), data)
    plain = {name: value for name, value in data.items() if not name.startswith("target")}
    with pytest.raises(ValueError, match="do not list their targets"):
        step.shard_targets(torch.zeros(42), plain)
    with pytest.raises(ValueError, match="do not list their targets"):
        target_log_probs(torch.zeros(42, 9), plain)
    with pytest.raises(ValueError, match=r"shape \(3,\); these local data have 40 targets"):
        step.gather_targets(torch.zeros(3), data)


def test_other_sizes_are_refused_with_both():
    step = DCPExecutor(virtual_ranks=2).prepare(make_plan(2))
    with pytest.raises(ValueError, match=r"shape \(3, 2\); the batch has 115 tokens"):
        step.shard(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"of \[37, 5\] tokens; the sequences of the batch"):
        step.shard([torch.zeros(37), torch.zeros(5)])
    with pytest.raises(ValueError, match="what shard got is int; expected a tensor"):
        step.shard(5)


def loss_of(rows, step, loss, rank):
    """A function of whole sequences; with "summed" each rank computes some of its terms."""
    sequences = step.gather(rows, loss=loss)
    terms = torch.stack([(x.sum() ** 3 + (x**2).sum()) for x in sequences])
    return terms.sum() if loss == "replicated" else terms[rank::2].sum()


def rank_gradients(rank, loss):
    plan = make_plan(2)
    step = DCPExecutor().prepare(plan.parts[rank])
    rows = step.shard(values()).requires_grad_()
    loss_of(rows, step, loss, rank).backward()
    return torch.cat(step.gather(rows.grad)).numpy()


@pytest.mark.parametrize("loss", ["replicated", "summed"])
def test_gradients_flow_back_to_the_ranks_that_own_rows(loss):
    whole = values().requires_grad_()
    sum(x.sum() ** 3 + (x**2).sum() for x in whole.split(LENGTHS)).backward()
    for found in run_ranks(rank_gradients, 2, loss):
        torch.testing.assert_close(torch.from_numpy(found), whole.grad, rtol=0, atol=1e-9)


def gather_without_a_word(rank):
    step = DCPExecutor().prepare(make_plan(2).parts[rank])
    rows = step.shard(values()).requires_grad_()
    with pytest.raises(ValueError, match="loss='replicated' if every rank computes the same loss"):
        step.gather(rows)
    with pytest.raises(ValueError, match="choose one of replicated, summed"):
        step.gather(rows, loss="mean")
    return len(step.gather(rows.detach()))


def test_rows_with_gradients_need_the_kind_of_loss():
    assert run_ranks(gather_without_a_word, 2) == [len(LENGTHS)] * 2

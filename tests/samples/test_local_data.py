"""A rank's part of a batch: tokens, positions, labels and targets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dyncp import Batch, PlannerConfig, Topology, make_local_data, masks, plan_batch
from dyncp.plan import Layout
from dyncp.samples import NO_TARGET, count_targets
from sizes import draws


def make(samples, mask=masks.causal, num_ranks=3, **options):
    batch = Batch.of([mask(sample) for sample in samples])
    layout = Layout(local_multiple=options.pop("local_multiple", 1))
    config = PlannerConfig("random", block_size=4, layout=layout)
    plan = plan_batch(batch, Topology(1, num_ranks), planner=config)
    data = [make_local_data(samples, batch, part, **options) for part in plan.parts]
    return plan, data


def to_samples(plan, data, name):
    return [rows.tolist() for rows in plan.gather([part[name][0] for part in data])]


def test_labels_are_shifted_before_blocks_are_cut():
    samples = [{"input_ids": [10, 11, 12, 13, 14]}, {"input_ids": torch.tensor([20, 21, 22])}]
    plan, data = make(samples)
    assert to_samples(plan, data, "input_ids") == [[10, 11, 12, 13, 14], [20, 21, 22]]
    assert to_samples(plan, data, "labels") == [[10, 11, 12, 13, 14], [20, 21, 22]]
    assert to_samples(plan, data, "shift_labels") == [
        [11, 12, 13, 14, NO_TARGET],
        [21, 22, NO_TARGET],
    ]
    assert to_samples(plan, data, "position_ids") == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert all(part["num_items_in_batch"] == 6 for part in data)
    assert all(part["input_ids"].shape[0] == 1 for part in data)


def test_a_samples_own_labels_and_positions_win():
    sample = {
        "input_ids": [1, 2, 3, 4],
        "labels": [NO_TARGET, NO_TARGET, 3, 4],
        "position_ids": [7, 8, 9, 10],
    }
    plan, data = make([sample])
    assert to_samples(plan, data, "shift_labels") == [[NO_TARGET, 3, 4, NO_TARGET]]
    assert to_samples(plan, data, "position_ids") == [[7, 8, 9, 10]]
    assert data[0]["num_items_in_batch"] == 2


def test_packed_documents_restart_positions_and_never_predict_across():
    sample = {"input_ids": [1, 2, 3, 4, 5], "document_lengths": [3, 2]}
    plan, data = make([sample], masks.document_packed)
    assert to_samples(plan, data, "position_ids") == [[0, 1, 2, 0, 1]]
    assert to_samples(plan, data, "shift_labels") == [[2, 3, NO_TARGET, 5, NO_TARGET]]


def test_branching_masks_say_positions_and_targets():
    sample = {"input_ids": list(range(10))}
    mask = masks.shared_question(answers=2, question=4)
    plan, data = make([sample], mask)
    assert to_samples(plan, data, "position_ids") == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]]
    none = NO_TARGET
    assert to_samples(plan, data, "shift_labels") == [[1, 2, 3, none, 5, 6, none, 8, 9, none]]


def test_declared_token_fields_travel_along():
    samples = [
        {
            "input_ids": list(range(n)),
            "grid": torch.arange(3 * n).view(3, n),
            "embeds": torch.arange(2.0 * n).view(n, 2),
        }
        for n in (6, 5)
    ]
    plan, data = make(samples, token_fields={"grid": 1, "embeds": 0})
    for part, rank in zip(data, plan.parts, strict=True):
        assert part["grid"].shape == (3, 1, rank.local_rows)
        assert part["embeds"].shape == (1, rank.local_rows, 2)
    grid = plan.gather([part["grid"][:, 0].T for part in data])
    assert all((s["grid"] == g.T).all() for g, s in zip(grid, samples, strict=True))
    embeds = plan.gather([part["embeds"][0] for part in data])
    assert all((e == s["embeds"]).all() for e, s in zip(embeds, samples, strict=True))


def test_three_dimensional_positions_may_replace_the_plain_ones():
    sample = {"input_ids": list(range(6)), "position_ids": torch.arange(18).view(3, 6)}
    plan, data = make([sample], token_fields={"position_ids": 1})
    gathered = plan.gather([part["position_ids"][:, 0].T for part in data])
    assert (sample["position_ids"] == gathered[0].T).all()


def test_padding_rows_have_no_target():
    samples = [{"input_ids": list(range(1, n + 1))} for n in (5, 6)]
    plan, data = make(samples, local_multiple=8)
    for part, rank in zip(data, plan.parts, strict=True):
        assert part["input_ids"].shape == (1, rank.local_rows)
        assert (part["input_ids"][0, rank.local_tokens :] == 0).all()
        for name in ("labels", "shift_labels"):
            assert (part[name][0, rank.local_tokens :] == NO_TARGET).all()


@draws(40)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), num_ranks=st.integers(1, 5))
def test_targets_of_all_ranks_add_up_to_the_number_of_items(lengths, num_ranks):
    samples = [{"input_ids": list(range(n))} for n in lengths]
    _, data = make(samples, num_ranks=num_ranks)
    found = sum(int((part["shift_labels"] != NO_TARGET).sum()) for part in data)
    assert found == sum(lengths) - len(lengths)
    assert data[0]["num_items_in_batch"] == max(1, found)


def test_virtual_ranks_get_the_rows_of_all_ranks():
    samples = [{"input_ids": list(range(9))}]
    batch = Batch.of([masks.causal(9)])
    plan = plan_batch(batch, Topology(1, 3), planner=PlannerConfig("random", block_size=2))
    whole = make_local_data(samples, batch, plan)
    parts = [make_local_data(samples, batch, part) for part in plan.parts]
    assert torch.equal(whole["input_ids"], torch.cat([p["input_ids"] for p in parts], dim=1))


def test_the_number_of_items_may_span_several_batches():
    samples = [{"input_ids": [1, 2, 3]}]
    _, data = make(samples, num_items_in_batch=17)
    assert data[0]["num_items_in_batch"] == 17
    assert count_targets(samples, Batch.of([masks.causal(3)])) == 2


@pytest.mark.parametrize(
    ("sample", "fields", "message"),
    [
        ({"tokens": [1]}, {}, r"sample 0 is \['tokens'\]; expected a dict with .*input_ids"),
        ({"input_ids": [[1]]}, {}, r"has shape \(1, 1\); expected \[tokens\]"),
        ({"input_ids": []}, {}, "at least one token"),
        ({"input_ids": [1.5]}, {}, "expected integers"),
        ({"input_ids": [True, False]}, {}, "is torch.bool; expected integers"),
        (
            {"input_ids": None},
            {},
            "input_ids of sample 0 is NoneType, which cannot be",
        ),
        (
            {"input_ids": "ab"},
            {},
            "input_ids of sample 0 is str, which cannot be",
        ),
        (
            {"input_ids": [1, None]},
            {},
            "input_ids of sample 0 is list, which cannot be",
        ),
        ({"input_ids": [1, 2], "labels": None}, {}, "labels of sample 0 is NoneType, which cannot"),
        (
            {"input_ids": [1, 2], "labels": [1.0, 2.0]},
            {},
            "labels of sample 0 is torch.float32; ex",
        ),
        (
            {"input_ids": [1, 2], "labels": [1, float("nan")]},
            {},
            "torch.float32; expected integers",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, {}, "field 'labels' of sample 0 has shape"),
        ({"input_ids": [1, 2]}, {"x": 0}, "sample 0 has no field 'x'"),
        ({"input_ids": [1, 2], "x": [[1, 2]]}, {"x": 0}, "2 tokens along dimension 0"),
        ({"input_ids": [1, 2, 3]}, {}, "sample 0 has 3 tokens; the batch's sequence has 2"),
    ],
)
def test_samples_that_do_not_fit_are_named(sample, fields, message):
    batch = Batch.of([masks.causal(2)])
    plan = plan_batch(batch, Topology())
    with pytest.raises(ValueError, match=message):
        make_local_data([sample], batch, plan, token_fields=fields)


def test_the_plan_of_another_batch_is_refused():
    plan = plan_batch(Batch.of([masks.causal(2)]), Topology())
    with pytest.raises(ValueError, match=r"plan is for batch .* but this is batch"):
        make_local_data([{"input_ids": [1, 2]}], Batch.of([masks.full(2)]), plan)

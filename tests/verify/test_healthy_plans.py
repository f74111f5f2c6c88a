"""Plans that the planner makes keep every invariant, and compute dense attention."""

import numpy as np
import pytest
from hypothesis import given
from verify_plans import dense, equal, inputs_of, planned_batches, rich_batch, rich_plan, run

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.placement import Limits
from dyncp.verify import PlanError, check_plan, interpret, verify_plan
from sizes import draws
from strategies import ALWAYS_THERE


@draws(120)
@given(planned_batches())
def test_plans_of_any_batch_have_no_violations(case: tuple[Batch, Plan]) -> None:
    batch, plan = case
    assert verify_plan(plan, batch) == []


@draws(80)
@given(planned_batches())
def test_the_interpreter_gives_dense_attention_and_gradients(case: tuple[Batch, Plan]) -> None:
    batch, plan = case
    x = inputs_of(plan)
    for name in batch.masks:
        assert equal(run(plan, name, x), dense(batch, name, x))


@pytest.mark.parametrize("solver", ALWAYS_THERE)
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_every_solver_is_verified_on_a_batch_with_several_masks(solver: str, ranks: int) -> None:
    batch = rich_batch()
    config = PlannerConfig(solver=solver, block_size=5, limits=Limits(0.1, 0.1))
    plan = plan_batch(batch, Topology(1, ranks), AttentionShape(4, 2, 3, "fp64"), config)
    check_plan(plan, batch)
    x = inputs_of(plan)
    assert equal(run(plan, "local", x, scale=0.7), dense(batch, "local", x, scale=0.7))


def test_ranks_without_tokens_are_fine() -> None:
    batch = Batch.of([masks.causal(1), masks.causal(1)])
    plan = plan_batch(batch, Topology(1, 5), AttentionShape(2, 1, 3, "fp64"))
    assert (plan.parts[0].tokens_per_rank == 0).any()
    check_plan(plan, batch)
    x = inputs_of(plan)
    assert equal(run(plan, "default", x), dense(batch, "default", x))


def test_plans_for_evaluation_need_no_backward() -> None:
    config = PlannerConfig(solver="random", block_size=3, forward_only=True)
    batch = Batch.of([masks.causal(14)])
    plan = plan_batch(batch, Topology(1, 3), AttentionShape(2, 1, 3, "fp64"), config)
    check_plan(plan, batch)
    x = inputs_of(plan)
    result = run(plan, "default", x)
    assert result.dq is None
    assert equal(result, dense(batch, "default", x))


def test_rows_that_attend_nothing_give_zero_and_minus_infinity() -> None:
    batch = Batch.of([masks.Mask([[[0, 0]], [[0, 1]], [[0, 0]]])])
    plan = plan_batch(
        batch, Topology(1, 2), AttentionShape(2, 1, 3, "fp64"), PlannerConfig("random", 1)
    )
    check_plan(plan, batch)
    result = run(plan, "default", inputs_of(plan))
    assert not result.out[[0, 2]].any()
    assert np.isneginf(result.lse[[0, 2]]).all()
    assert not result.dq[[0, 2]].any()


def test_a_plan_for_an_assumed_shape_runs_with_any_head_counts() -> None:
    batch = Batch.of([masks.causal(12)])
    plan = plan_batch(batch, Topology(1, 2), None, PlannerConfig("random", 3))
    check_plan(plan, batch)
    rng = np.random.default_rng(0)
    q, kv = rng.normal(size=(12, 6, 3)), rng.normal(size=(12, 2, 3))
    assert interpret(plan, "default", q, kv, kv).out.shape == (12, 6, 3)


def test_another_batch_than_the_planned_one_is_reported() -> None:
    plan, batch = rich_plan(), rich_batch()
    longer = Batch.of([{name: masks.causal(30) for name in batch.masks}])
    renamed = Batch.of([{"other": masks.causal(n)} for n in batch.lengths])
    other_masks = Batch.of([dict.fromkeys(batch.masks, masks.full(n)) for n in batch.lengths])
    for other, word in ((longer, "lengths"), (renamed, "masks"), (other_masks, "key ranges")):
        violations = verify_plan(plan, other)
        assert {v.invariant for v in violations} >= {1, 8}
        assert any(word in v.sentence for v in violations)


def test_check_plan_raises_with_every_sentence() -> None:
    plan, batch = rich_plan(), Batch.of([masks.causal(3)])
    with pytest.raises(PlanError) as error:
        check_plan(plan, batch)
    for violation in verify_plan(plan, batch):
        assert violation.sentence in str(error.value)


def test_inputs_that_do_not_fit_the_plan_are_refused() -> None:
    plan = rich_plan()
    x = inputs_of(plan)
    with pytest.raises(ValueError, match="51 tokens"):
        interpret(plan, "default", x.q[1:], x.k, x.v)
    with pytest.raises(ValueError, match="heads"):
        interpret(plan, "default", x.q[:, :2], x.k, x.v)
    with pytest.raises(ValueError, match="'other'"):
        interpret(plan, "other", x.q, x.k, x.v)

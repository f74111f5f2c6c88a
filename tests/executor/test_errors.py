"""Bad input gets a ValueError that says what was given and what is allowed."""

import pytest
import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.transport import InProcess, Null

SHAPE = AttentionShape(4, 2, 8, "fp32")
PLAN = plan_batch(Batch.of([masks.causal(12)]), Topology(1, 2), SHAPE)


@pytest.fixture
def step():
    return DCPExecutor(virtual_ranks=2).prepare(PLAN)


def rows(tokens=12, heads=4, dim=8, dtype=torch.float32):
    return torch.zeros(tokens, heads, dim, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (rows(11), rows(11, 2), rows(11, 2), "q has 11 tokens; this plan gives these ranks 12"),
        (rows(heads=8), rows(heads=2), rows(heads=2), "8 q heads, 2 kv heads.*made for 4 q heads"),
        (rows(heads=4), rows(heads=3), rows(heads=3), "3 heads, which do not divide the 4 heads"),
        (rows(), rows(heads=2), rows(heads=1), "do not fit together"),
        (rows(), rows(8, 2), rows(8, 2), "do not fit together"),
        (rows(dim=8), rows(heads=2, dim=4), rows(heads=2, dim=4), "do not fit together"),
        (rows(), rows(heads=2).double(), rows(heads=2), "k is torch.float64"),
        (rows(dtype=torch.int32), *[rows(heads=2, dtype=torch.int32)] * 2, "q is torch.int32"),
        (rows(dim=4), *[rows(heads=2, dim=4)] * 2, "head_dim 4, .*; the plan was made for .* 8,"),
        (rows()[0], rows(heads=2), rows(heads=2), r"q has shape \(4, 8\); expected \[tokens"),
        (rows().to("meta"), *[rows(heads=2).to("meta")] * 2, "q is on meta; .* prepared for cpu"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused(step, q, k, v, message):
    with pytest.raises(ValueError, match=message):
        attention(step, q, k, v)


def test_packed_kv_of_another_shape_is_refused(step):
    with pytest.raises(ValueError, match=r"kv has shape .*expected \[tokens, 2, kv_heads"):
        DCPAttn.apply(step, rows(), rows(heads=2))


def test_an_unknown_mask_name_lists_the_plans_masks(step):
    with pytest.raises(ValueError, match="mask 'local' is not in this plan; it has default"):
        attention(step, rows(), rows(heads=2), rows(heads=2), mask="local")


def test_a_sink_of_another_shape_is_refused(step):
    with pytest.raises(ValueError, match=r"sink has shape \(2,\); expected \[4\]"):
        attention(step, rows(), rows(heads=2), rows(heads=2), sink=torch.zeros(2))


def test_attention_before_prepare_says_what_to_call():
    with pytest.raises(ValueError, match="attention before prepare"):
        attention(DCPExecutor(), rows(), rows(heads=2), rows(heads=2))
    with pytest.raises(ValueError, match="expected the handle"):
        attention(PLAN, rows(), rows(heads=2), rows(heads=2))


@pytest.mark.parametrize("name", ["prepared", "number", "parts", "plan", "new"])
def test_a_step_cannot_be_changed(step, name):
    with pytest.raises(AttributeError):
        setattr(step, name, None)


def test_a_plan_for_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="plan is for 2 ranks; this executor's group has 3"):
        DCPExecutor(virtual_ranks=3).prepare(PLAN)


def test_the_part_of_another_rank_is_refused():
    executor = DCPExecutor(transport=Null(rank=0, num_ranks=2))
    with pytest.raises(ValueError, match="part of rank 1; this process runs rank 0"):
        executor.prepare(PLAN.parts[1])
    with pytest.raises(ValueError, match="pass the whole Plan"):
        DCPExecutor(virtual_ranks=2).prepare(PLAN.parts[1])


def test_executor_options_are_checked():
    with pytest.raises(ValueError, match="pass only one of group="):
        DCPExecutor(transport=InProcess(2), virtual_ranks=2)
    with pytest.raises(
        ValueError, match="kernel is 'fast'; choose one of auto, cpu, flash4, triton, reference"
    ):
        DCPExecutor(kernel="fast")
    for name in ("triton", "flash4"):
        with pytest.raises(
            ValueError, match=f"kernel '{name}' is not available on cpu: it runs on"
        ):
            DCPExecutor(kernel=name)
    with pytest.raises(ValueError, match="number of virtual ranks is 0; at least 1"):
        DCPExecutor(virtual_ranks=0)
    with pytest.raises(ValueError, match="rank=2 of 2"):
        Null(2, 2)


def test_the_null_transport_counts_the_plans_bytes_without_peers():
    plan = plan_batch(
        Batch.of([masks.causal(40)]), Topology(1, 3), SHAPE, PlannerConfig("random", block_size=4)
    )
    total = 0
    for part in plan.parts:
        transport = Null(part.rank, 3)
        step = DCPExecutor(transport=transport).prepare(part)
        q = rows(step.num_rows).requires_grad_()
        out = attention(step, q, rows(step.num_rows, 2), rows(step.num_rows, 2))
        out.sum().backward()
        total += transport.bytes_sent
    assert total == sum(plan.parts[0].declared_bytes["default"])

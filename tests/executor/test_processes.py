"""The same plans on real processes: gloo ranks on loopback."""

import os
import signal
import time

import numpy as np
import pytest
import torch

from cases import Case, Results, Tensors, assert_equal, run_dense, run_step, run_virtual
from dyncp import (
    AttentionShape,
    Batch,
    DCPAttn,
    DCPExecutor,
    Layout,
    PlannerConfig,
    Topology,
    TransportError,
    masks,
    plan_batch,
)
from dyncp.plan import batch_order
from processes import end_together, run_ranks

LENGTHS = [(33, 5, 1, 40), (70,), (3, 2, 1), (17, 29, 8, 8, 1)]
MASKS = [masks.causal, masks.lambda_shaped(sinks=2, window=9), masks.shared_question, masks.full]
SOLVERS = ["random", "zigzag", "owner_computes"]


def make_case(index: int, num_ranks: int, dtype: str = "fp64") -> Case:
    """One of 12 combinations of lengths, masks, solvers and head groups."""
    lengths = LENGTHS[index % len(LENGTHS)]
    batch = Batch.of([MASKS[(index + i) % len(MASKS)](n) for i, n in enumerate(lengths)])
    shape = AttentionShape(4, 2, 8, dtype)
    config = PlannerConfig(
        SOLVERS[index % 3],
        block_size=None if index % 4 == 3 else 5,
        head_groups=1 + index % 2,
        divisions=2 + index % 3,
        seed=index,
        layout=Layout(8, 1 + 3 * (index % 2)),
    )
    return Case(batch, plan_batch(batch, Topology(1, num_ranks), shape, config), shape, index)


def run_cases(rank: int, num_ranks: int, dtypes: list[str]) -> list[list[np.ndarray]]:
    executor = DCPExecutor(timeout=60)
    results = []
    for index in range(12):
        case = make_case(index, num_ranks, dtypes[index % len(dtypes)])
        step = executor.prepare(case.plan.parts[rank])
        rows = run_step(step, case, "default", Tensors.draw(case))
        results.append(
            [
                value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
                for value in rows
            ]
        )
    return results


def join(case: Case, ranks: list[list[np.ndarray]]) -> Results:
    order = batch_order(case.plan.parts[0])
    joined = (np.concatenate([rank[i] for rank in ranks])[order] for i in range(4))
    return Results(*map(torch.from_numpy, joined))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gloo_ranks_compute_dense_attention_and_the_bits_of_virtual_ranks(num_ranks):
    dtypes = ["fp64", "fp64", "fp32", "bf16"]
    by_rank = run_ranks(run_cases, num_ranks, num_ranks, dtypes)
    for index in range(12):
        case = make_case(index, num_ranks, dtypes[index % len(dtypes)])
        tensors = Tensors.draw(case)
        given = join(case, [rank[index] for rank in by_rank])
        if case.shape.dtype == "fp64":
            assert_equal(given, run_dense(case, "default", tensors, torch.float64), 1e-12)
        virtual = run_virtual(case, "default", tensors)
        for name, value in virtual.tensors().items():
            assert torch.equal(given.tensors()[name].to(value.dtype), value), (index, name)


def prepare_own_seed(rank: int) -> str:
    case = make_case(0, 3)
    seed = 1 if rank == 1 else 0
    batch = case.batch if rank < 2 else Batch.of([masks.full(4)])
    plan = plan_batch(batch, Topology(1, 3), case.shape, PlannerConfig("random", seed=seed))
    with pytest.raises(ValueError, match="ranks hold different") as caught:
        DCPExecutor(timeout=60).prepare(plan.parts[rank])
    return str(caught.value)


def test_ranks_with_different_plans_get_an_error_that_names_them():
    messages = run_ranks(prepare_own_seed, 3)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks hold different batches: rank 0: batch ")
    assert "; rank 1: batch " in messages[0]
    assert "; rank 2: batch " in messages[0]


def prepare_two_plans_of_one_batch(rank: int) -> str:
    case = make_case(0, 2)
    plan = plan_batch(
        case.batch, Topology(1, 2), case.shape, PlannerConfig("random", seed=rank, block_size=5)
    )
    with pytest.raises(ValueError, match="different plans of the same batch") as caught:
        DCPExecutor(timeout=60).prepare(plan.parts[rank])
    return str(caught.value)


def test_two_plans_of_the_same_batch_are_told_apart():
    messages = run_ranks(prepare_two_plans_of_one_batch, 2)
    assert "rank 0: batch" in messages[0]
    assert "rank 1: batch" in messages[0]


def leave_before_attention(rank: int, how: str) -> tuple[str, float]:
    case = make_case(0, 3)
    executor = DCPExecutor(timeout=3)
    step = executor.prepare(case.plan.parts[rank])
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        end_together(0, 1, 2)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(TransportError, match="last finished") as caught:
        run_step(step, case, "default", Tensors.draw(case))
    seconds = time.monotonic() - start
    end_together(0, *[1] * (how == "hang"), 2)
    return str(caught.value), seconds


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_rank_that_is_gone_or_hangs_does_not_leave_the_others_waiting(how):
    first, _, last = run_ranks(leave_before_attention, 3, how)
    for message, seconds in (first, last):
        # gloo closes all connections of a rank that lost one, so either survivor may be named
        assert "rank 1" in message or how == "die"
        assert "[forward, at WAIT" in message or "[forward, at LAUNCH" in message
        assert seconds < 20


def hang_before_prepare(rank: int) -> tuple[str, float]:
    executor = DCPExecutor(timeout=2)
    if rank == 1:
        end_together(0, 1)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(TransportError, match="while agreeing on the plan") as caught:
        executor.prepare(make_case(0, 2).plan.parts[rank])
    seconds = time.monotonic() - start
    end_together(0, 1)
    return str(caught.value), seconds


def test_a_rank_that_never_prepares_is_reported_within_the_timeout():
    (message, seconds), _ = run_ranks(hang_before_prepare, 2)
    assert message.startswith("rank 0 of 2")
    assert seconds < 10


def gather_positions(rank: int) -> list[list[int]]:
    case = make_case(3, 3)
    part = case.plan.parts[rank]
    step = DCPExecutor(timeout=60).prepare(part)
    rows = torch.full((part.local_rows,), -1)
    rows[: part.local_tokens] = torch.from_numpy(part.local_coordinates)
    return [sample.tolist() for sample in step.gather(rows)]


def test_gather_brings_per_token_results_back_to_samples_on_every_rank():
    batch = make_case(3, 3).batch
    expected = [
        list(range(batch.offsets[i], batch.offsets[i + 1])) for i in range(len(batch.lengths))
    ]
    assert run_ranks(gather_positions, 3) == [expected] * 3


def run_on_half(rank: int) -> int:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    case = make_case(1, 2)
    executor = DCPExecutor(group=mesh["cp"], timeout=60)
    step = executor.prepare(case.plan.parts[mesh.get_local_rank("cp")])
    run_step(step, case, "default", Tensors.draw(case))
    return executor.transport.bytes_sent


def test_a_dimension_of_a_device_mesh_is_a_group():
    sent = run_ranks(run_on_half, 4)
    assert sent[:2] == sent[2:]
    assert sum(sent[:2]) == sum(make_case(1, 2).plan.parts[0].declared_bytes["default"])


def attend_with_zero_tokens(rank: int) -> tuple[int, ...]:
    batch = Batch.of([masks.causal(6)])
    whole = PlannerConfig(block_size=6)
    plan = plan_batch(batch, Topology(1, 2), AttentionShape(2, 1, 4, "fp32"), whole)
    step = DCPExecutor(timeout=60).prepare(plan.parts[rank])
    q = torch.randn(step.num_rows, 2, 4, requires_grad=True)
    kv = torch.randn(step.num_rows, 2, 1, 4, requires_grad=True)
    DCPAttn.apply(step, q, kv).sum().backward()
    return tuple(q.grad.shape)


def test_ranks_without_tokens_take_part():
    shapes = run_ranks(attend_with_zero_tokens, 2)
    assert sorted(shapes) == [(0, 2, 4), (6, 2, 4)]

"""Arguments of the public API that make no sense: a ValueError that names them."""

from dataclasses import replace

import numpy as np
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
    make_local_data,
    masks,
    plan_batch,
)
from dyncp.masks import Mask
from dyncp.plan import Plan, load_plan, save_plan
from dyncp.verify import verify_plan

BATCH = Batch.of([masks.causal(8)])
PLAN = plan_batch(BATCH, Topology(1, 2))
Q, KV = torch.randn(8, 4, 8), torch.randn(8, 2, 2, 8)
NAN = float("nan")
PACKED = masks.document_packed(6, documents=[3, 3])


def step():
    return DCPExecutor(virtual_ranks=2).prepare(PLAN)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Batch.of([masks.causal(3)], sample_ids=[1, 2]), "2 sample_ids for 1 sequences"),
        (lambda: Batch.of([masks.causal(3)], sample_ids=["a"]), "a sample id is 'a'"),
        (lambda: Batch.of(None), "masks is NoneType; expected a list"),
        (lambda: Batch.of(masks.causal(3)), "masks is Mask; expected a list"),
        (lambda: Batch.of([masks.causal]), "entry 0 of a batch is masks.causal; expected a Mask"),
        (lambda: Batch.of([{"default": 3}]), "expected a Mask"),
        (
            lambda: Batch((3.5,), {"default": (masks.causal(3),)}),
            "a sequence length is 3.5; expected",
        ),
        (lambda: masks.causal(2**31), "length of a sequence is 2147483648; at most"),
        (lambda: AttentionShape(8, 2, 1.5), "head_dim is 1.5; expected an integer"),
        (lambda: AttentionShape("8", 2), "q_heads is '8'; expected an integer"),
        (lambda: AttentionShape(True, 1), "q_heads is True; expected an integer"),
        (lambda: AttentionShape(8, 2, 10**30), "head_dim is 1000.*; at most 16,384"),
        (lambda: AttentionShape(8, 2, dtype=[]), "dtype is \\[\\]; choose one of"),
        (lambda: Topology(1.5, 2), "Topology.nodes is 1.5; expected an integer"),
        (lambda: Topology(2**16, 2), "131072 ranks; at most 65,536"),
        (lambda: Topology(1, 2, speeds=("a", "b")), "Topology.speeds is 'a'; a finite number"),
        (lambda: Topology(1, 2, speeds=3), "Topology.speeds is int"),
        (lambda: PlannerConfig(block_size=1.5), "block_size is 1.5; expected an integer"),
        (lambda: PlannerConfig(divisions=10**6), "divisions is 1000000; at most 1,024"),
        (lambda: PlannerConfig(solver=None), "solver is NoneType"),
        (lambda: PlannerConfig(solver_seconds="x"), "solver_seconds is str"),
        (lambda: plan_batch(None, Topology()), "batch is NoneType; expected Batch"),
        (lambda: plan_batch(BATCH, 4), "topology is int; expected Topology"),
        (
            lambda: plan_batch(BATCH, Topology(), None, "owner_computes"),
            "planner is str; expected Planner",
        ),
        (lambda: DCPExecutor(virtual_ranks=1.5), "virtual ranks is 1.5; expected an integer"),
        (lambda: DCPExecutor(device="moon"), "device is 'moon', which is not available"),
        (lambda: DCPExecutor(kernel=3), "kernel is int; expected a dyncp.kernels.Kernel"),
        (lambda: DCPExecutor(transport="tcp"), "transport is str; expected a Transport"),
        (lambda: DCPExecutor(timeout=NAN), "timeout is nan; a finite number"),
        (lambda: DCPExecutor().prepare(None), "prepare.. is NoneType; expected a Plan"),
        (lambda: DCPExecutor().prepare(PLAN.parts), "prepare.. is tuple; expected a Plan"),
        (lambda: DCPExecutor().reserve([None]), "reserve.. is NoneType; expected a Plan"),
        (lambda: DCPExecutor().warm_up(None), "shape is NoneType; expected an AttentionShape"),
        (lambda: DCPAttn.apply(step(), Q.numpy(), KV), "q is ndarray; expected a torch tensor"),
        (lambda: DCPAttn.apply(step(), Q, None), "kv is NoneType; expected a torch tensor"),
        (lambda: DCPAttn.apply(step(), Q, KV[:, :, :0]), "at least one head and one entry"),
        (lambda: DCPAttn.apply(step(), Q[..., :0], KV[..., :0]), "at least one head and one entry"),
        (lambda: attention(step(), Q, *KV.unbind(1), mask=[]), "mask is list; expected the name"),
        (
            lambda: attention(step(), Q, *KV.unbind(1), sink=torch.zeros(4).int()),
            "sink is torch.int32 on cpu; expected floating point",
        ),
        (lambda: step().gather(np.zeros(8)), "gather got is ndarray; expected a torch tensor"),
        (lambda: step().gather(torch.zeros(())), "gather got shape \\(\\); this step has 8 rows"),
        (lambda: verify_plan(None, BATCH), "plan to verify is NoneType; expected a Plan with"),
        (lambda: verify_plan(PLAN.parts[0], BATCH), "plan to verify is RankPlan"),
        (lambda: verify_plan(PLAN, None), "its batch is NoneType"),
    ],
)
def test_arguments_that_make_no_sense_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_value_error():
    with pytest.raises(ValueError, match="device is 'cuda', which is not available"):
        DCPExecutor(device="cuda")


def test_numbers_of_numpy_are_numbers():
    shape = AttentionShape(np.int64(4), np.int32(2), np.int16(8), "fp32")
    topology = Topology(np.int64(1), np.int64(2))
    plan = plan_batch(BATCH, topology, shape, PlannerConfig(block_size=np.int64(4)))
    assert Plan.decode(plan.encode()) == plan


@pytest.mark.parametrize("field", ["compute_max_over_mean", "tokens_max_over_mean", "reason"])
def test_a_balance_of_the_wrong_types_is_a_violation_and_can_not_be_loaded(field, tmp_path):
    balance = replace(PLAN.parts[0].balance, **{field: ["much"]})
    broken = replace(PLAN, parts=tuple(replace(part, balance=balance) for part in PLAN.parts))
    assert [violation.invariant for violation in verify_plan(broken, BATCH)] == [5, 5]
    save_plan(tmp_path / "broken.plan", broken, BATCH)
    with pytest.raises(ValueError, match="malformed"):
        load_plan(tmp_path / "broken.plan")


def test_masks_of_one_sequence_that_disagree_about_positions_or_targets_are_refused():
    other = Mask(masks.causal(6).ranges, positions=[0, 1, 2, 3, 0, 1])
    with pytest.raises(ValueError, match="sequence 1 of a batch: two masks disagree about posit"):
        Batch.of([{"a": masks.causal(3), "b": masks.causal(3)}, {"a": PACKED, "b": other}])


def test_masks_that_set_positions_and_targets_apart_are_both_heard():
    ranges = masks.causal(6).ranges
    some = {
        "positions": Mask(ranges, positions=[0, 1, 2, 0, 1, 2]),
        "targets": Mask(ranges, targets=[1, 2, -1, 4, 5, -1]),
    }
    batch = Batch.of([some])
    data = make_local_data([{"input_ids": list(range(6))}], batch, plan_batch(batch, Topology()))
    assert data["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert data["shift_labels"].tolist() == [[1, 2, -100, 4, 5, -100]]

"""Layers around a rank: the stack's attention is the plan's, plain documents have its pairs, and
busy time counts overlapping kernels once."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import baselines, layer_stack, layers_times
from benchmarks.attention_times import rank_pairs
from benchmarks.baselines import WholeDocuments, attend_whole, equal_pairs
from benchmarks.layer_stack import (
    Kernels,
    LayerStack,
    Steady,
    pass_queries,
    rotate,
    rotation_of,
    summarise,
    time_steady,
    union_seconds,
)
from benchmarks.layers_times import (
    LayersSetting,
    StackSetting,
    bench_layers,
    describe_stack,
    named_ranks,
    num_messages,
    rank_cases,
    spread_ranks,
    stack_run,
)
from hypothesis import given
from hypothesis import strategies as st

from dense import dense_attention, relative_error
from dyncp import AttentionShape, Batch, DCPExecutor, Topology, attention, masks, plan_batch
from dyncp.calibrate import Repeats
from dyncp.calibrate.calls import Unavailable
from dyncp.calibrate.timing import KernelRun
from dyncp.cost import CostModel, ModelConfig, find_profile
from dyncp.planner import PlannerConfig, Task

CPU = torch.device("cpu")
MODEL = ModelConfig(hidden=24, layers=2, ffn=40, vocab=64, heads=4, kv_heads=2, head_dim=8)
SHAPE = replace(MODEL, dtype="fp32").attention_shape()
COST = CostModel(find_profile("cpu_gloo"), SHAPE)
BATCH = Batch.of([masks.lambda_shaped(160, sinks=4, window=32), masks.causal(90)])


def pairs_of(tokens: int, length: int) -> int:
    """Pairs of documents of one length, the last one cut."""
    lengths = [min(length, tokens - first) for first in range(0, tokens, length)]
    return sum(n * (n + 1) // 2 for n in lengths)


@given(tokens=st.integers(1, 60), share=st.floats(0, 1))
def test_baselines_have_the_tokens_and_no_others_are_nearer_in_pairs(tokens, share):
    pairs = round(share * tokens * (tokens + 1) / 2)
    found = equal_pairs(tokens, pairs)
    assert found.tokens == tokens
    assert found.before == 0
    assert found.pairs == sum(n * (n + 1) // 2 for n in found.lengths)
    nearest = min(abs(pairs_of(tokens, n) - pairs) for n in range(1, tokens + 1))
    assert abs(found.pairs - pairs) == nearest
    assert nearest <= max(tokens, tokens - pairs)


@given(tokens=st.integers(1, 5000), more=st.integers(0, 10**9))
def test_more_pairs_than_baselines_have_come_from_keys_before(tokens, more):
    pairs = tokens * (tokens + 1) // 2 + more
    found = equal_pairs(tokens, pairs)
    assert found.lengths == (tokens,)
    assert abs(found.pairs - pairs) <= tokens / 2
    mask = np.tril(np.ones((5, 12)), 7)  # 5 rows after 7 keys
    assert WholeDocuments((5,), 7).pairs == mask.sum()


def test_documents_are_written_as_what_they_are():
    assert equal_pairs(8, 24) == WholeDocuments((6, 2))
    assert str(equal_pairs(8, 24)) == "1 × 6 + 2"
    assert str(equal_pairs(8, 8)) == "8 × 1"
    assert str(equal_pairs(8, 52)) == "8 after 2"
    with pytest.raises(ValueError, match="tokens are 0 and pairs 3"):
        equal_pairs(0, 3)


def test_plain_attention_is_causal_in_every_document():
    documents = WholeDocuments((30, 30, 7))
    torch.manual_seed(0)
    q, k, v = (torch.randn(67, heads, 8) for heads in (4, 2, 2))
    batch = Batch.of([masks.causal(n) for n in documents.lengths])
    expected = dense_attention(batch, "default", q, k, v, 8**-0.5)
    assert relative_error(attend_whole(documents, SHAPE, CPU)(q, k, v), expected) < 1e-5


def test_rows_after_others_attend_these_and_their_own_up_to_themselves():
    attend = attend_whole(WholeDocuments((67,), 45), SHAPE, CPU)
    q, k, v = torch.zeros(67, 4, 8), torch.zeros(67, 2, 8), torch.zeros(67, 2, 8)
    before = attend(q, k, v)  # of 45 made-up values and 0, 1, ... zeros: a mean
    assert torch.allclose(before, before[:1] * (46 / torch.arange(46, 113))[:, None, None])
    v[-1] = 112.0
    after = attend(q, k, v)
    assert torch.equal(after[:-1], before[:-1])
    assert torch.allclose(after[-1], before[-1] + 1.0)


@pytest.mark.parametrize(
    ("documents", "rows", "keys"),
    [
        (WholeDocuments((30, 30, 7)), [0, 30, 60, 67], [0, 30, 60, 67]),
        (WholeDocuments((67,), 45), [0, 67], [0, 112]),
    ],
)
def test_flash_attn_4_gets_rows_and_keys_as_offsets(monkeypatch, documents, rows, keys):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=0, max_seqlen_k=0, causal=False
    ):
        assert cu_seqlens_q.tolist() == rows
        assert cu_seqlens_k.tolist() == keys
        assert (max_seqlen_q, max_seqlen_k) == (rows[1], keys[1])
        assert causal
        assert len(k) == len(v) == keys[-1]
        return q * k[-len(q) :].repeat_interleave(2, dim=1), None

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setattr(baselines, "find_flash_attn_4", lambda _: module)
    assert baselines.plain_attention(CPU) == "flash_attn_4"
    q, k = torch.randn(67, 4, 8), torch.randn(67, 2, 8)
    out = attend_whole(documents, SHAPE, CPU)(q, k, k)
    assert torch.equal(out, q * k.repeat_interleave(2, dim=1))


def test_busy_time_counts_overlapping_and_nested_kernels_once_and_gaps_never():
    assert union_seconds([]) == 0
    assert union_seconds([(0, 2), (1, 3), (5, 6)]) == 4
    assert union_seconds([(5, 6), (0, 10), (2, 3), (10, 11)]) == 11
    assert union_seconds([(1, 2), (1, 2), (4, 4)]) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_busy_time_is_that_in_which_anything_runs(drawn):
    kernels = [KernelRun("attend_tiles", length, start) for start, length in drawn]
    ticks = {tick for start, length in drawn for tick in range(start, start + length)}
    found = summarise(kernels, 2)
    assert found.busy_seconds == len(ticks) / 2
    assert found.count == len(drawn) / 2
    assert found.seconds == found.attention_seconds == sum(length for _, length in drawn) / 2


def test_shares_are_of_the_wall_time_without_the_profiler():
    timed, kernels = Steady(0.10, 0.11, 0.03), Kernels(50.0, 0.12, 0.02, 0.09)
    found = describe_stack(timed, kernels, Steady(0.08, 0.08, 0.01))
    assert found["busy_share"] == pytest.approx(0.9)
    assert found["host_share"] == pytest.approx(0.3)
    assert found["wall_over_kernels"] == pytest.approx(0.10 / 0.12)
    assert found["wall_over_plain"] == pytest.approx(1.25)
    assert set(describe_stack(None, None, None).values()) == {None}


def test_iterations_follow_one_another_after_some_that_warm_up():
    calls = []
    timed = time_steady(lambda: calls.append(1), CPU, Repeats(4, 3))
    assert len(calls) == 7
    assert timed.seconds == timed.host_seconds > 0


def test_rotation_turns_pairs_by_the_angle_of_their_position():
    heads = torch.randn(5, 3, 8, dtype=torch.float64)
    rotation = rotation_of(torch.arange(5), 8, torch.float64)
    turned = rotate(heads, rotation)
    first, second = (torch.complex(*x.chunk(2, -1)) for x in (heads, turned))
    angle = torch.arange(5).double()[:, None] * 500_000.0 ** -(torch.arange(0, 8, 2) / 8).double()
    expected = first * torch.polar(torch.ones_like(angle), angle)[:, None]
    assert torch.allclose(second, expected)
    with pytest.raises(ValueError, match="head_dim is 7"):
        rotation_of(torch.arange(5), 7, torch.float64)


def one_rank_stack(dtype: torch.dtype, mlp_matrices: int = 3) -> tuple[LayerStack, torch.Tensor]:
    torch.manual_seed(1)
    model = ModelConfig(24, 2, 40, 64, 4, 2, 8, mlp_matrices=mlp_matrices)
    stack = LayerStack(model, 2, dtype, CPU)
    for weight in stack.parameters():  # large enough for attention to matter
        weight.data *= 8 if weight.ndim > 1 else 1
    return stack, torch.randn(BATCH.num_tokens, 24, dtype=dtype)


@pytest.mark.parametrize("mlp_matrices", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "kernel", "tolerance"),
    [(torch.float64, "reference", 1e-11), (torch.float32, "cpu", 1e-4)],
)
def test_the_stacks_attention_is_the_plans(dtype, kernel, tolerance, mlp_matrices):
    stack, x = one_rank_stack(dtype, mlp_matrices)
    named = "fp64" if dtype == torch.float64 else "fp32"
    plan = plan_batch(BATCH, Topology(), AttentionShape(4, 2, 8, named))
    step = DCPExecutor(virtual_ranks=1, kernel=kernel).prepare(plan)
    rotation = rotation_of(layers_times.positions_of(plan.parts[0], BATCH), 8, dtype)

    def dense(q, k, v):
        return dense_attention(BATCH, "default", q, k, v, 8**-0.5)

    found = []
    for attend in (partial(attention, step), dense, pass_queries):
        stack.zero_grad()
        out = stack(x, rotation, attend)
        out.backward(torch.ones_like(out))
        grads = [weight.grad for weight in stack.parameters()]
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads)
        found.append([out.detach(), *grads])
    for ours, expected, without in zip(*found, strict=True):
        assert relative_error(ours, expected) < tolerance
        assert relative_error(without, expected) > 1e-2  # attention does matter


def test_every_run_has_fresh_gradients_of_all_weights():
    stack, _ = one_rank_stack(torch.float32)
    run = stack_run(stack, torch.arange(9), pass_queries)
    run()
    first = [weight.grad.clone() for weight in stack.parameters()]
    run()
    for weight, grad in zip(stack.parameters(), first, strict=True):
        assert torch.equal(weight.grad, grad)


def test_ranks_that_stand_for_all_differ_and_have_tokens(caplog):
    shape = AttentionShape(4, 2, 8, "fp32")
    batch = Batch.of([masks.causal(n) for n in (700, 300, 90, 40)])
    plan = plan_batch(batch, Topology(2, 4), shape, PlannerConfig(solver="bisection"))
    pairs = rank_pairs(plan, CostModel(find_profile("cpu_gloo"), shape))
    found = spread_ranks(plan, pairs)
    assert list(found.values()) == ["most pairs", "fewest pairs", "most messages", "middle"]
    ranks = list(found)
    assert pairs[ranks[0]] == pairs.max()
    assert pairs[ranks[1]] == pairs.min()
    others = [num_messages(part) for part in plan.parts if part.rank not in ranks[:2]]
    assert num_messages(plan.parts[ranks[2]]) == max(others)
    lonely = plan_batch(Batch.of([masks.causal(40)]), Topology(1, 2), shape,
                        PlannerConfig(solver="zigzag/cp1"))  # fmt: skip
    busy = int(np.flatnonzero(lonely.parts[0].tokens_per_rank)[0])
    assert list(spread_ranks(lonely, np.ones(2))) == [busy]
    assert named_ranks(lonely, [0, 1]) == {busy: "requested"}
    assert f"rank {1 - busy} has no tokens in the plan by zigzag/cp1" in caplog.text
    with pytest.raises(ValueError, match="rank is 9; the plan has ranks 0 to 7"):
        named_ranks(plan, [0, 9])


def test_positions_are_those_in_the_sequence():
    plan = plan_batch(BATCH, Topology(1, 3), SHAPE, PlannerConfig(solver="bisection"))
    for case in rank_cases(("s", "m"), BATCH, plan, COST, (0, 1, 2)):
        start = np.where(case.part.local_coordinates < 160, 0, 160)
        held = case.positions[: case.part.local_tokens]
        assert held.tolist() == (case.part.local_coordinates - start).tolist()
        assert abs(case.documents.pairs - case.pairs) <= max(case.rows, case.rows - case.pairs)


def test_graphs_are_what_was_asked_for():
    stack = StackSetting(MODEL, 1, SHAPE, "cpu", CPU, graphs="off")
    assert not stack.executor(0, 2).engine.graphs.wanted
    stack = StackSetting(MODEL, 1, SHAPE, "cpu", CPU, graphs="on")
    with pytest.raises(Unavailable, match="graphs need a CUDA GPU"):
        stack.executor(0, 2)


def test_plain_attention_that_fails_is_left_out_with_its_reason(monkeypatch):
    def failing(*_):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(layers_times, "attend_whole", failing)
    task = Task.of(BATCH, Topology(1, 2), SHAPE, None, COST, MODEL)
    stack = StackSetting(MODEL, 1, SHAPE, "cpu", CPU)
    found = bench_layers(LayersSetting({("s", "m"): task}, stack, (0,), Repeats(2, 1)))
    measured = found["rows"][0]["attention"]
    assert measured["plain"]["reason"] == "RuntimeError: no such kernel"
    assert measured["plain"]["wall_seconds"] is None
    assert measured["dyncp"]["wall_seconds"] > 0 < measured["none"]["wall_seconds"]
    assert measured["dyncp"]["wall_over_plain"] is None


def test_kernels_are_profiled_after_all_times_are_taken(monkeypatch):
    order = []

    def profiled(run, _device):
        order.append("kernels")
        run()
        return [KernelRun("flash", 1.0, 0.0), KernelRun("gemm", 2.0, 0.5)] * 3

    def timed(run, device, repeats):
        order.append("time")
        return time_steady(run, device, repeats)

    monkeypatch.setattr(layers_times, "has_profiler", lambda _: True)
    monkeypatch.setattr(layers_times, "time_steady", timed)
    monkeypatch.setattr(layer_stack, "profiled_kernels", profiled)
    task = Task.of(BATCH, Topology(1, 2), SHAPE, None, COST, MODEL)
    stack = StackSetting(MODEL, 1, SHAPE, "cpu", CPU)
    found = bench_layers(LayersSetting({("s", "m"): task}, stack, None, Repeats(2, 1)))
    assert len(found["rows"]) == 2
    assert order == sorted(order, reverse=True)
    for row in found["rows"]:
        for measured in row["attention"].values():
            assert measured["kernels"] == 2
            assert measured["kernel_seconds"] == 3
            assert measured["attention_kernel_seconds"] == 1
            assert measured["busy_share"] == pytest.approx(2.5 / 3 / measured["wall_seconds"])
    summary = found["summary"][0]["attention"]["dyncp"]
    shares = [row["attention"]["dyncp"]["busy_share"] for row in found["rows"]]
    assert summary["busy_share"] == {"worst": min(shares), "mean": pytest.approx(np.mean(shares))}

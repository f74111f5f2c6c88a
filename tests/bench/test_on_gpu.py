"""The same measurements on a GPU; left out where there is none."""

import json

import pytest
import torch
from benchmarks import baselines
from benchmarks.baselines import WholeDocuments, dense_attention, mask_case
from benchmarks.kernels import profile

from dyncp import AttentionShape, Topology, plan_batch
from dyncp.calibrate import Repeats, Tools
from dyncp.calibrate.calls import MASKS, Unavailable, make_inputs, relative_errors, results_of
from dyncp.calibrate.rates import beside_copies
from dyncp.calibrate.timing import (
    add_kernels,
    plan_work,
    profiled_kernels,
    time_call,
    time_calls,
)
from dyncp.cli import main
from dyncp.cost import CostModel, find_profile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda:0")
SHAPE = AttentionShape(4, 2, 128, "bf16")


def test_a_call_is_timed_on_the_host_and_again_on_the_device():
    x, calls = torch.randn(1024, 1024, device=GPU, dtype=torch.bfloat16), []

    def run() -> None:
        calls.append(1)
        x @ x

    timed = time_call(run, GPU, Repeats(timed=3, warm_up=2))
    assert len(calls) == 2 + 3 + 3
    assert timed.seconds > 0 < timed.host_seconds


@pytest.mark.parametrize("name", baselines.BASELINES)
@pytest.mark.parametrize("mask", MASKS)
def test_other_implementations_are_dense_attention(name, mask):
    case = mask_case(mask, 1024)
    try:
        attend = baselines.BASELINES[name](case, GPU)
    except Unavailable as reason:
        pytest.skip(str(reason))
    inputs = make_inputs(1024, SHAPE, GPU)
    errors = relative_errors(results_of(attend, inputs), dense_attention(case.batch, inputs))
    assert max(errors.values()) < 2e-2


def test_the_profiler_finds_attention_kernels():
    inputs, case = make_inputs(2048, SHAPE, GPU), mask_case("causal", 2048)
    attend = baselines.BASELINES["sdpa_flash"](case, GPU)
    seconds, by_name = profile(lambda: attend(*inputs.qkv), GPU)
    assert 0 < max(by_name.values()) <= seconds


def test_profiled_kernels_come_in_order():
    inputs, case = make_inputs(2048, SHAPE, GPU), mask_case("causal", 2048)
    attend = baselines.BASELINES["sdpa_flash"](case, GPU)

    def run() -> None:
        inputs.qkv[0].exp()
        for _ in range(2):
            attend(*inputs.qkv)

    run()
    kernels = profiled_kernels(run, GPU)
    assert not kernels[0].is_attention
    assert sum(kernel.is_attention for kernel in kernels) == 2


@pytest.mark.parametrize("kernel", ["auto", "triton"])
def test_every_call_of_a_rank_has_its_attention_kernels(kernel, caplog):
    cost = CostModel(find_profile("h200"), SHAPE)
    case = mask_case("lambda_shaped", 4096)
    plan = plan_batch(case.batch, Topology(1, 2), SHAPE, cost=cost)
    tools = Tools(SHAPE, kernel, GPU, Repeats(3, 2))
    times = add_kernels(time_calls(plan.parts[0], tools), plan.parts[0], tools)
    assert "equal share" not in caplog.text
    for direction, measured in times.items():
        divisions = {x.division for x in plan_work(plan, direction, cost) if x.rank == 0}
        assert set(measured.division_seconds.nonzero()[0]) == divisions
        assert measured.kernel_seconds > 0 < measured.other_seconds


def test_attention_is_timed_beside_copies_from_the_host_and_on_the_device():
    inputs, case = make_inputs(8192, SHAPE, GPU), mask_case("causal", 8192)
    attend = baselines.BASELINES["sdpa_flash"](case, GPU)
    overlaps = beside_copies(lambda: attend(*inputs.qkv), GPU, Repeats(3, 1))
    assert [overlap.kind for overlap in overlaps] == ["host", "device"]
    assert all(overlap.beside_seconds > 0 and overlap.slowdown >= 1 for overlap in overlaps)


def test_the_doctor_is_content(capsys):
    assert main(["doctor"]) == 0
    assert "All is well." in capsys.readouterr().out


def test_rows_after_others_are_those_of_dense_attention():
    """flash-attn-4's causal documents end with their last key, however many rows they have."""
    if baselines.plain_attention(GPU) != "flash_attn_4":
        pytest.skip("needs flash-attn-4")
    rows, before = 700, 333
    inputs = make_inputs(rows + before, SHAPE, GPU)
    flash = baselines.find_flash_attn_4(GPU)
    attend = baselines.varlen(flash.flash_attn_varlen_func, (0, rows), (0, rows + before), GPU)
    exact = baselines.sdpa_after_keys(WholeDocuments((rows,), before), GPU)
    results = []
    for function in (attend, exact):
        out = function(inputs.q[before:], inputs.k, inputs.v)
        grads = torch.autograd.grad(out, inputs.qkv, inputs.dout[before:])
        results.append([out, *grads])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("sample", ["ldc:0", "uniform:256"])
def test_layers_have_kernels_and_a_busy_share_on_a_gpu(capsys, sample):
    words = ["--sample", sample, "--tokens", "16384", "--virtual-ranks", "4", "--layers", "1"]
    words += ["--masks", "causal", "--rank", "1", "--repeats", "3", "--json"]
    assert main(["bench", "layers", *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    for measured in row["attention"].values():
        assert not measured["reason"]
        assert measured["host_share"] > 0
        assert measured["busy_share"] > 0
        assert measured["kernels"] > 20
        assert measured["kernel_seconds"] > 0
    ours, plain, none = row["attention"].values()
    assert none["attention_kernel_seconds"] == 0 < plain["attention_kernel_seconds"]
    assert none["kernels"] < ours["kernels"]

"""Rows that attend nothing, with sinks of −∞ and without: outputs and gradients are 0, not NaN."""

import math

import numpy as np
import pytest
import torch
from flash4_emulated import import_flash4

from dense import dense_attention, relative_error
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Layout,
    PlannerConfig,
    Step,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.kernels import CpuKernel, Kernel, ReferenceKernel
from dyncp.plan import DEFAULT_MASK, batch_order
from interpreted import needs_interpreter
from kernel_styles import CollectingReference, RoundingKernel
from sizes import pick

NONE = -math.inf
SINKS = {
    "no sinks": None,
    "all −∞": (NONE, NONE, NONE, NONE),
    "some −∞": (NONE, 0.5, NONE, 2.0),
    "huge": (70000.0, -70000.0, 1e30, -1e30),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}


def with_holes(length: int) -> masks.Mask:
    """A window in which every third token attends nothing. On ranks with other keys of a row's
    sequence, the row attends nothing, either."""
    ranges = np.zeros((length, 1, 2), np.int32)
    for i in range(length):
        ranges[i, 0] = (max(0, i - 20), i + 1) if i % 3 else (0, 0)
    return masks.Mask(ranges)


def nothing(length: int) -> masks.Mask:
    return masks.Mask(np.zeros((length, 1, 2), np.int32))


BATCH = Batch.of([with_holes(pick(40, 150)), nothing(20), masks.causal(30), nothing(1)])
EMPTY = torch.cat([torch.from_numpy(~mask.dense().any(1)) for mask in BATCH.masks[DEFAULT_MASK]])


def triton_kernel() -> Kernel:
    from dyncp.kernels.triton_kernel import TritonKernel

    return TritonKernel()


def compare(kernel: Kernel, dtype: str, most: float, sinks: str, *, traced: bool = False) -> None:
    shape = AttentionShape(4, 2, 16, dtype)
    config = PlannerConfig("random", block_size=16, divisions=3, layout=Layout(128, 1))
    plan = plan_batch(BATCH, Topology(1, 3), shape, config)
    step = DCPExecutor(virtual_ranks=3, kernel=kernel).prepare(plan)
    rng = torch.Generator().manual_seed(0)
    drawn = [torch.randn(BATCH.num_tokens, n, 16, generator=rng).double() for n in (4, 2, 2, 4)]
    *inputs, dout = (x.to(DTYPES[dtype]) for x in drawn)
    given = SINKS[sinks]
    sink = [] if given is None else [torch.tensor(given, requires_grad=True)]
    order = torch.from_numpy(batch_order(plan.parts[0]))
    rows = [x[torch.argsort(order)].requires_grad_() for x in inputs]
    out = call(step, *rows, *sink, traced=traced)
    results = [out, *torch.autograd.grad(out, [*rows, *sink], dout[torch.argsort(order)])]
    results[:4] = [x[order] for x in results[:4]]
    leaves = [x.double().detach().requires_grad_() for x in (*inputs, *sink)]
    dense = dense_attention(BATCH, DEFAULT_MASK, *leaves[:3], 0.25, *leaves[3:])
    expected = [dense, *torch.autograd.grad(dense, leaves, dout.double())]
    for ours, theirs in zip(results, expected, strict=True):
        assert relative_error(ours, theirs) < most
    assert not any(x[EMPTY].any() for x in results[:2])
    assert not any(x[sink[0] == NONE].any() for x in results[4:])


def call(
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    traced: bool,
) -> torch.Tensor:
    """Attention; if `traced`, what graphs of torch.compile call."""
    if not traced:
        return attention(step, q, k, v, sink=sink)
    options = (DEFAULT_MASK, 0.25, False)
    out: torch.Tensor = torch.ops.dyncp.attention(step.number, q, k, v, sink, *options)[0]
    return out


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize(
    ("kernel", "dtype", "most"),
    [
        (ReferenceKernel(8), "fp64", 1e-6),  # sinks are in fp32
        (CpuKernel(), "fp32", 1e-5),
        (CpuKernel(), "fp16", 3e-3),
        (RoundingKernel(), "fp32", 1e-5),
        (CollectingReference(), "fp32", 1e-5),
    ],
    ids=["reference", "cpu", "cpu in fp16", "rounding", "collecting"],
)
def test_rows_that_attend_nothing_are_zero_with_any_sink(kernel, dtype, most, sinks):
    compare(kernel, dtype, most, sinks)


def test_they_are_in_compiled_graphs_too():
    compare(CpuKernel(), "fp32", 1e-5, "some −∞", traced=True)


@needs_interpreter
@pytest.mark.parametrize("kernel", ["triton", "flash4", "flash4, deterministic"])
def test_they_are_on_gpu_kernels_too(kernel):
    if kernel == "triton":
        compare(triton_kernel(), "fp32", 1e-5, "some −∞")
    else:
        made = import_flash4().Flash4Kernel(deterministic="deterministic" in kernel)
        compare(made, "fp16", 3e-3, "some −∞")


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (
            torch.tensor([0.0, math.inf, 0, 0]),
            "sink is inf for q head 1; a sink is a number, or −∞",
        ),
        (torch.tensor([0.0, 0, 0, math.nan]), "sink is nan for q head 3"),
        (torch.tensor([70000.0, 0, 0, 0]).half(), "sink is inf for q head 0; .* infinite in fp16"),
        (torch.tensor([0, 0, 1e300, 0]).double(), "sink is inf for q head 2"),  # in fp32
    ],
)
def test_a_sink_that_no_softmax_can_have_is_refused(sink, message):
    plan = plan_batch(Batch.of([masks.causal(4)]), Topology(1, 1))
    step = DCPExecutor(kernel="cpu").prepare(plan)
    q, kv = torch.ones(4, 4, 8), torch.ones(4, 2, 8)
    with pytest.raises(ValueError, match=message):
        attention(step, q, kv, kv, sink=sink)

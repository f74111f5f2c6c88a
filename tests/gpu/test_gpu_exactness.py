"""Whole plans against dense attention: any mask and placement, relays, heads, dims and dtypes."""

import pytest
import torch
from gpu_cases import (
    LENGTHS,
    MASKS,
    MORE_MASKS,
    SHAPE,
    assert_as_good,
    check,
    dense_with_sinks,
    each_choice,
    each_kernel,
    has_relays,
    only_triton,
    plan_of,
    prepare,
    reference_of,
    run_on_tokens,
)

from dyncp import (
    AttentionShape,
    Batch,
    Layout,
)

SOLVERS = ("owner_computes", "bisection", "zigzag", "uncut")  # tests of masks use random
# In blocks that end with kernel tiles, rows of these have one range: there is less to compile.
SHORT = (1100, 300)


@each_choice
@pytest.mark.parametrize("mask", MASKS)
def test_any_mask_is_exact(kernel, deterministic, mask):
    reference = reference_of(mask)
    plan = plan_of(reference.batch, "random")
    assert has_relays(plan)
    check(prepare(plan, kernel, deterministic), reference)


@each_kernel
@pytest.mark.parametrize("mask", MORE_MASKS)
def test_masks_of_many_ranges_are_exact(kernel, deterministic, mask):
    reference = reference_of(mask)
    check(prepare(plan_of(reference.batch, "random"), kernel, deterministic), reference)


@each_kernel
def test_layers_choose_among_masks_by_name(kernel, deterministic):
    """Alternating, so that each is launched, captured and replayed."""
    references = {"default": reference_of("causal"), "local": reference_of("window")}
    of_samples = zip(*(x.batch.masks["default"] for x in references.values()), strict=True)
    batch = Batch.of([dict(zip(references, found, strict=True)) for found in of_samples])
    step = prepare(plan_of(batch, "random"), kernel, deterministic)
    for name in list(references) * 3:
        check(step, references[name], mask=name)


@each_kernel
def test_sinks_and_scales_are_exact(kernel, deterministic):
    reference = reference_of("lambda")
    step = prepare(plan_of(reference.batch, "random"), kernel, deterministic)
    sink = torch.linspace(-2, 3, SHAPE.q_heads, device="cuda").requires_grad_()
    given = run_on_tokens(step, reference.inputs, scale=0.07, sink=sink)
    plain, exact = (
        dense_with_sinks(reference.batch, inputs, sink.to(inputs[0].dtype), 0.07)
        for inputs in (reference.inputs, [x.double() for x in reference.inputs])
    )
    names = ("out", "dq", "dk", "dv", "dsink")
    for name, *found in zip(names, given, plain, exact, strict=True):
        assert_as_good(name, *found)


@each_kernel
@pytest.mark.parametrize("solver", SOLVERS)
def test_any_placement_is_exact(kernel, deterministic, solver):
    reference = reference_of("causal")
    plan = plan_of(reference.batch, solver)
    check(prepare(plan, kernel, deterministic), reference)


@each_kernel
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [("causal", LENGTHS), ("causal", (1900,)), ("lambda", LENGTHS)],
    ids=["sequences", "sequence", "lambda"],
)
def test_one_rank_is_exact(kernel, deterministic, mask, lengths):
    reference = reference_of(mask, lengths=lengths)
    plan = plan_of(reference.batch, "random", ranks=1)
    check(prepare(plan, kernel, deterministic), reference)


@each_kernel
def test_head_groups_on_their_own_ranks_are_exact(kernel, deterministic):
    reference = reference_of("causal")
    plan = plan_of(reference.batch, "random", head_groups=2)
    check(prepare(plan, kernel, deterministic), reference)


def check_shape(shape, kernel, deterministic):
    reference = reference_of("causal", shape, SHORT)
    plan = plan_of(reference.batch, "owner_computes", shape, block_size=256)
    check(prepare(plan, kernel, deterministic), reference)


@each_kernel
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(4, 4, 64, "bf16"), AttentionShape(6, 2, 96, "fp16")],
    ids=["ungrouped", "fp16"],
)
def test_heads_and_dtypes_are_exact(kernel, deterministic, shape):
    check_shape(shape, kernel, deterministic)


@only_triton
@pytest.mark.parametrize(
    "shape",
    [AttentionShape(4, 2, 256, "bf16"), AttentionShape(4, 2, 72, "fp32")],
    ids=["large", "fp32"],
)
def test_other_dims_and_fp32_are_exact(kernel, shape):
    check_shape(shape, kernel, True)


def test_row_operations_are_exact_in_fp32_under_the_reference_kernel():
    shape = AttentionShape(8, 2, 64, "fp32")
    reference = reference_of("causal", shape, (700, 61, 300, 5))
    plan = plan_of(reference.batch, "random", shape)
    assert has_relays(plan)
    check(prepare(plan, "reference"), reference)


def test_slots_that_do_not_start_on_kernel_tiles_are_refused_by_flash4():
    plan = plan_of(reference_of("causal").batch, "random", layout=Layout(8))
    with pytest.raises(ValueError, match="needs multiples of 128"):
        prepare(plan, "flash4")

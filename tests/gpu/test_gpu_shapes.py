"""Every head dim that `flash4` takes, with every kind of heads, on every path, in both modes; and
head dims that only `triton` takes. A case compiles some ten kernels: several processes with
`-k` share them out in minutes."""

import pytest
import torch
from gpu_cases import GPU, check, plan_of, prepare, reference_of

from dyncp import AttentionShape, attention
from dyncp.kernels import why_not

HEADS = [(4, 4), (4, 2), (6, 1)]  # one kv head per q head, grouped, a single kv head
DIMS = range(16, 128 + 1, 8)
# flash-attn-4's path for one causal sequence, that for several, and lists of tiles.
PATHS = {"causal": (1, (700,)), "sequences": (1, (300, 129, 250)), "lists": (4, (1100, 300))}


def check_path(shape, kernel, deterministic, path):
    ranks, lengths = PATHS[path]
    reference = reference_of("causal", shape, lengths)
    plan = plan_of(reference.batch, "owner_computes", shape, ranks=ranks, block_size=256)
    step = prepare(plan, kernel, deterministic)
    for _ in range(3 if ranks > 1 else 1):  # launched, captured, replayed
        check(step, reference)


def dtype_of(dim, heads):
    """A dtype such that each dim and each kind of heads is tested with both dtypes."""
    return ("bf16", "fp16")[(dim // 8 + HEADS.index(heads)) % 2]


@pytest.mark.parametrize("heads", HEADS, ids=["plain", "grouped", "single"])
@pytest.mark.parametrize("dim", DIMS)
def test_flash4_is_exact_for_every_shape(dim, heads):
    shape = AttentionShape(*heads, dim, dtype_of(dim, heads))
    for path in PATHS:
        check_path(shape, "flash4", False, path)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_usual_dims_are_exact_in_both_modes_and_dtypes(dim, dtype):
    for heads in HEADS:
        for deterministic in (False, True):
            for path in PATHS:
                check_path(AttentionShape(*heads, dim, dtype), "flash4", deterministic, path)


@pytest.mark.parametrize("heads", HEADS, ids=["plain", "grouped", "single"])
@pytest.mark.parametrize("dim", [16, 40, 80, 136, 192, 256])
def test_the_deterministic_backward_is_exact_for_every_shape(dim, heads):
    shape = AttentionShape(*heads, dim, dtype_of(dim, heads))
    for path in PATHS:
        check_path(shape, "triton" if dim > 128 else "flash4", True, path)


@pytest.mark.parametrize("dim", [24, 64])
def test_triton_is_exact_in_fp32(dim):
    for path in PATHS:
        check_path(AttentionShape(4, 2, dim, "fp32"), "triton", True, path)


@pytest.mark.parametrize(
    "shape", [(4, 2, 136, "bf16"), (4, 2, 8, "bf16"), (4, 2, 20, "fp16"), (4, 2, 64, "fp32")]
)
def test_what_is_not_tested_is_refused_by_name(shape):
    shape = AttentionShape(*shape)
    plan = plan_of(reference_of("causal", shape, (300,)).batch, "owner_computes", shape, ranks=1)
    step = prepare(plan, "flash4")
    q, k = (torch.zeros(step.num_rows, h, shape.head_dim, device=GPU) for h in (4, 2))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    with pytest.raises(ValueError, match="kernel 'flash4' takes"):
        attention(step, q.to(dtype), k.to(dtype), k.to(dtype))


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_panels_are_what_flash_attn_4_makes_of_its_sums(dim):
    """Compares with flash-attn-4's own kernel, which is correct for multiples of 32."""
    missing = why_not("flash4", GPU)
    if missing:
        pytest.skip(missing)
    from flash_attn.cute import interface

    from dyncp.kernels.row_ops import panels_to_rows

    given = []
    original = interface._bwd_postprocess_convert

    def record(sums, grad, scale, *rest, **options):
        original(sums, grad, scale, *rest, **options)
        given.append((sums.clone(), grad.clone(), scale))

    record.compile_cache = original.compile_cache
    interface._bwd_postprocess_convert = record
    try:
        q, k, v, out, dout = (
            torch.randn(1, 512, h, dim, device=GPU).bfloat16() for h in (4, 2, 2, 4, 4)
        )
        lse = torch.randn(1, 4, 512, device=GPU)
        interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=True)
    finally:
        interface._bwd_postprocess_convert = original
    assert len(given) == 3
    for sums, grad, scale in given:
        rows = panels_to_rows(sums[0].view(grad.shape[2], 512, dim))
        ours = (rows * scale).to(grad.dtype).transpose(0, 1)
        assert torch.equal(ours, grad[0])

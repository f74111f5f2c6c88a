"""Everything that is timed computes the same attention."""

import numpy as np
import pytest
import torch
from benchmarks import baselines
from benchmarks.baselines import dense_attention, mask_case

from dense import dense_attention as plain_dense
from dyncp import AttentionShape, Batch, masks
from dyncp.calibrate.calls import (
    MASKS,
    Noise,
    OutAndGrads,
    Unavailable,
    executor_options,
    make_executor,
    make_inputs,
    one_rank_attention,
    relative_errors,
    results_of,
)

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, "fp32")


@pytest.mark.parametrize("chunk", [1 << 26, 5000])
def test_dense_attention_is_that_of_autograd_however_rows_are_cut(monkeypatch, chunk):
    monkeypatch.setattr(baselines, "CHUNK_SCORES", chunk)
    some_rows_empty = masks.Mask([[[0, 0]], *[[[0, i]] for i in range(1, 60)]])
    batch = Batch.of([masks.lambda_shaped(90, sinks=4, window=16), some_rows_empty])
    inputs = make_inputs(batch.num_tokens, AttentionShape(4, 2, 16, "fp64"), CPU)
    expected = plain_dense(batch, "default", *inputs.qkv, 16**-0.5)
    grads = torch.autograd.grad(expected, inputs.qkv, inputs.dout)
    errors = relative_errors(dense_attention(batch, inputs), OutAndGrads(expected.detach(), *grads))
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("mask", MASKS)
def test_ours_and_torchs_attention_are_dense_attention(mask):
    case = mask_case(mask, 300)
    inputs = make_inputs(300, SHAPE, CPU)
    expected = dense_attention(case.batch, inputs)
    theirs = baselines.BASELINES["sdpa_flash" if mask in baselines.PLAIN else "sdpa_mask"]
    builds = [theirs(case, CPU), one_rank_attention(case.batch, SHAPE, "cpu", CPU)]
    for attend in builds:
        errors = relative_errors(results_of(attend, inputs), expected)
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("mask", MASKS)
def test_masks_for_flex_attention_allow_the_same_pairs(mask):
    case = mask_case(mask, 300)
    if mask == "full":
        return
    allowed = np.zeros((300, 300), np.bool_)
    for sequence, first in zip(case.batch.masks["default"], case.batch.offsets, strict=False):
        rows = slice(first, first + sequence.length)
        allowed[rows, rows] = sequence.dense()
    token = torch.arange(300)
    found = baselines.mask_mod(case, CPU)(None, None, token[:, None], token[None, :])
    assert np.array_equal(found.numpy(), allowed)
    assert case.num_pairs == allowed.sum()


def test_documents_and_windows_are_short_in_short_batches():
    assert len(mask_case("document_causal", 1024).batch.lengths) > 1
    assert mask_case("lambda_shaped", 1024).num_pairs < mask_case("causal", 1024).num_pairs


def test_flash_attn_4_gets_documents_as_offsets():
    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, causal=False):
        assert cu_seqlens_q.tolist() == case.batch.offsets.tolist() == cu_seqlens_k.tolist()
        assert causal
        assert max_seqlen_q == max(case.batch.lengths)
        return q, None

    case = mask_case("document_causal", 1024)
    q, offsets = torch.zeros(1024, 4, 16), case.batch.offsets.tolist()
    assert baselines.varlen(varlen, offsets, offsets, CPU)(q, q, q) is q


@pytest.mark.parametrize(
    ("name", "mask", "reason"),
    [
        ("sdpa_cudnn", "causal", "CUDA"),
        ("sdpa_flash", "lambda_shaped", "only causal and full"),
        ("sdpa_mask", "causal", "need no matrix"),
        ("flex", "causal", "no backward on CPUs"),
        ("flash_attn_4", "causal", "CUDA GPUs only"),
    ],
)
def test_what_cannot_run_here_says_why(name, mask, reason):
    with pytest.raises(Unavailable, match=reason):
        baselines.BASELINES[name](mask_case(mask, 64), CPU)


def test_kernels_are_chosen_by_name_and_order():
    assert executor_options("flash4:fast") == {"kernel": "flash4", "deterministic": False}
    assert executor_options("flash4:deterministic")["deterministic"] is True
    assert executor_options("cpu") == {"kernel": "cpu"}
    with pytest.raises(ValueError, match="'cpu:slow'; write NAME or NAME:deterministic or"):
        executor_options("cpu:slow")
    with pytest.raises(Unavailable, match="abacus"):
        make_executor("abacus", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_of_magnitude_one_in_every_dtype(dtype):
    buffer = torch.zeros(8192, dtype=torch.uint8)
    channel = Noise(0, 2).open()[0]
    channel.launch(0, {}, {1: buffer})
    numbers = buffer.view(dtype).double()
    assert numbers.isfinite().all()
    assert 0.3 < numbers.abs().median() < 3
    assert numbers.abs().max() < 100

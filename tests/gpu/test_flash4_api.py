"""The parts of flash-attn-4 that kernel flash4 uses still have the same names and argument order.
The emulation in tests/kernels cannot detect a change; kernels are called by position."""

import inspect

import pytest

pytest.importorskip("flash_attn.cute")
from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90, interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.tile_scheduler import SingleTileScheduler
from flash_attn.cute.utils import AuxData

from dyncp.kernels.flash4_mask import FirstTilesFirst, RangeMask

OVER_LISTS = {"mask_mod", "aux_tensors", "block_sparse_tensors"}
VARLEN = {"causal", "cu_seqlens_q", "cu_seqlens_k"}


def names(function) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_ordinary_calls_take_what_we_give_and_keep_their_compiled_kernels():
    forward, backward = interface._flash_attn_fwd, interface._flash_attn_bwd
    assert {"softmax_scale", "return_lse", "out", "lse"} | OVER_LISTS | VARLEN <= {*names(forward)}
    assert {*names(backward)} >= OVER_LISTS | VARLEN
    assert names(forward)[:3] == ["q", "k", "v"]
    assert names(backward)[:6] == ["q", "k", "v", "out", "dout", "lse"]
    for function in (forward, backward):
        assert hasattr(function, "compile_cache")


@pytest.mark.parametrize(
    ("kernel", "places", "count"),
    [
        (
            flash_fwd_sm90.FlashAttentionForwardSm90,
            {"mLSE": 4, "softmax_scale": 5, "mCuSeqlensQ": 6, "mCuSeqlensK": 7,
             "blocksparse_tensors": 14, "aux_data": 15, "stream": 18},
            19,
        ),
        (
            flash_bwd_sm90.FlashAttentionBackwardSm90,
            {"mdO": 3, "mLSE": 4, "mdPsum": 5, "mdQaccum": 6, "mdK": 7, "mdV": 8,
             "softmax_scale": 9, "mCuSeqlensQ": 10, "mCuSeqlensK": 11, "aux_data": 19,
             "blocksparse_tensors": 20, "stream": 22},
            23,
        ),
    ],
    ids=["forward", "backward"],
)  # fmt: skip
def test_compiled_kernels_take_their_arguments_in_our_order(kernel, places, count):
    found = names(kernel.__call__)[1:]
    assert len(found) == count
    assert {name: found.index(name) for name in places} == places


def test_what_we_replace_is_asked_for_the_same_things():
    assert names(RangeMask.apply_mask) == names(AttentionMask.apply_mask)
    for method in ("create", "get_grid_shape", "get_current_work"):
        ours, theirs = getattr(FirstTilesFirst, method), getattr(SingleTileScheduler, method)
        assert names(ours) == names(theirs), method
    for module in (flash_fwd_sm90, flash_bwd_sm90):
        assert module.AttentionMask is AttentionMask
        assert module.SingleTileScheduler is SingleTileScheduler


def test_lists_and_auxiliary_data_have_our_fields():
    assert names(BlockSparseTensorsTorch)[:4] == [
        "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx",
    ]  # fmt: skip
    assert "block_size" in names(BlockSparseTensorsTorch)
    assert len(names(AuxData)) == 2

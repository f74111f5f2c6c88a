"""Samplers follow their distributions; files with junk say where."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.samplers import (
    DOCUMENT_TOKENS,
    NAMES,
    Sample,
    parse_sample,
    read_lengths,
    sample_lengths,
)

TOTAL = 131072
LDC = [
    3533, 2527, 6898, 3438, 1495, 4800, 16343, 10276, 1202, 579, 1334, 3166, 256, 2257, 594, 1158,
    1479, 1989, 5123, 11633, 2538, 17726, 1263, 4738, 9710, 3390, 1141, 905, 1655, 3994, 807, 2286,
    839,
]  # fmt: skip
LDC_X2 = [
    7065, 5053, 13795, 6877, 2990, 9601, 32686, 20552, 2403, 1158, 2668, 6331, 292, 4515, 1188,
    2316, 2957, 3977, 4648,
]  # fmt: skip
ALL = [name.replace(":N", ":1000") for name in NAMES]


def many(name: str, tokens: int = 20_000_000) -> np.ndarray:
    return np.array(sample_lengths(name, tokens, seed=1)[:-1])  # the last one is cut


def test_ldc_reproduces_the_lists_of_the_published_comparison() -> None:
    assert sample_lengths("ldc", TOTAL, seed=0) == LDC
    assert sample_lengths("ldc_x2", TOTAL, seed=0) == LDC_X2
    halves = sample_lengths("ldc_x0.5", TOTAL, seed=0)
    assert halves[:13] == [1766, 1263, 3449, 1719, 748, 2400, 8172, 5138, 601, 290, 667, 1583, 256]
    assert halves[-1] == 3801
    assert len(halves) == 48


@pytest.mark.parametrize("name", ALL)
@given(total=st.integers(1, 50_000), seed=st.integers(0, 2**32))
def test_lengths_add_up_and_depend_on_the_seed_only(name: str, total: int, seed: int) -> None:
    lengths = sample_lengths(name, total, seed)
    assert sum(lengths) == total
    assert min(lengths) >= 1
    assert lengths == sample_lengths(name, total, seed)


def test_uniform_and_single_are_what_they_say() -> None:
    assert sample_lengths("uniform", TOTAL) == [8192] * 16
    assert sample_lengths("uniform:1000", 2500) == [1000, 1000, 500]
    assert sample_lengths("single", TOTAL) == [TOTAL]


def test_training_documents_follow_the_table() -> None:
    lengths = many("training_documents", 60_000_000)
    for most, percent in DOCUMENT_TOKENS:
        assert (lengths <= most).mean() * 100 == pytest.approx(percent, abs=0.8)
    squares = lengths.astype(float) ** 2
    assert squares[lengths > 32768].sum() / squares.sum() == pytest.approx(0.85, abs=0.08)


def test_ldc_has_its_median_and_spread() -> None:
    lengths = many("ldc")
    assert np.median(lengths) == pytest.approx(3000, rel=0.1)
    assert np.log(np.quantile(lengths, 0.8413) / 3000) == pytest.approx(1.3, abs=0.1)
    assert lengths.min() == 256
    assert np.median(many("ldc_x4")) == pytest.approx(12000, rel=0.1)


def test_longalign_is_uniform_in_the_logarithm() -> None:
    lengths = many("longalign")
    assert lengths.min() >= 8192
    assert lengths.max() <= 65536
    assert np.median(lengths) == pytest.approx(np.sqrt(8192 * 65536), rel=0.1)


def test_the_sft_mixture_has_its_two_means() -> None:
    lengths = many("sft_mixture", 60_000_000)
    is_long = lengths >= 16384  # exp(-16) of the short ones
    assert is_long.mean() == pytest.approx(0.0011 * 6 / 7, rel=0.3)
    assert lengths[~is_long].mean() == pytest.approx(1024, rel=0.05)
    assert lengths[is_long].mean() == pytest.approx(16384 * 2.5, rel=0.1)


def test_a_sample_is_a_name_and_a_seed() -> None:
    assert parse_sample("ldc:3") == Sample("ldc", 3)
    assert parse_sample("ldc_x0.5") == Sample("ldc_x0.5", 0)
    assert parse_sample("uniform:8192") == Sample("uniform:8192", 0)
    assert parse_sample("uniform:8192:3") == Sample("uniform:8192", 3)


@pytest.mark.parametrize("text", ["", "ldc:", "ldc:x", "ldc:1:2", "lcd", "ldc_x", "uniform:0"])
def test_a_wrong_sample_names_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="one of training_documents, ldc, longalign"):
        parse_sample(text)


def test_a_batch_needs_tokens() -> None:
    with pytest.raises(ValueError, match="total_tokens is 0; at least 1"):
        sample_lengths("ldc", 0)


@pytest.mark.parametrize("text", ["3\n14\n\n 15 \n", "[3, 14, 15]", " [3,\n14,\n15]"])
def test_lengths_are_read_from_lines_or_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    assert read_lengths(tmp_path / "lengths") == [3, 14, 15]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3\nlong\n", "line 2: 'long' is not a length; lengths must be positive integers"),
        ("3\n\n-5", "line 3: '-5' is not a length"),
        ("0", "line 1: 0 is not a length"),
        ("3.5", "line 1: '3.5' is not a length"),
        ("[3, 4.5]", "entry 2: 4.5 is not a length"),
        ('["3"]', "entry 1: '3' is not a length"),
        ("[3, true]", "entry 2: True is not a length"),
        ("[3,\n 4", "line 2: not a JSON list"),
        ("", "has no lengths; at least one is needed"),
        ("[]", "has no lengths"),
    ],
)
def test_junk_in_a_lengths_file_is_found(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_lengths(tmp_path / "lengths")


def test_a_lengths_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.txt cannot be read"):
        read_lengths(tmp_path / "none.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="bytes is not text"):
        read_lengths(tmp_path / "bytes")

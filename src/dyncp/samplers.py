"""Sequence lengths to plan for: samples of known distributions, or lengths read from a file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dyncp.checks import parse_json, whole_number

# Share (%) of 13.46 million training documents that have at most this many tokens.
DOCUMENT_TOKENS = (
    (100, 8.33),
    (200, 18.56),
    (500, 46.75),
    (1024, 71.38),
    (2048, 87.03),
    (4096, 94.37),
    (8192, 97.42),
    (16384, 98.71),
    (32768, 99.56),
    (65536, 99.70),
    (131072, 99.86),
    (196608, 100.0),
)
LDC_MEDIAN, LDC_SIGMA, LDC_SHORTEST = 3000, 1.3, 256
LONGALIGN_RANGE = 8192, 65536
SFT_LONG_SHARE, SFT_SHORT_MEAN, SFT_LONG_RANGE = 0.0011, 1024, (8192, 65536)

# Draws the length of one sequence, given the number of tokens in the batch.
Distribution = Callable[[np.random.Generator, int], int]


def training_documents(rng: np.random.Generator, _total: int) -> int:
    """Lengths by the table above, uniform inside each bin."""
    most, share = zip(*DOCUMENT_TOKENS, strict=True)
    row = int(np.searchsorted(share, 100 * rng.random()))
    return int(rng.integers(most[row - 1] + 1 if row else 1, most[row] + 1))


def ldc(scale: float) -> Distribution:
    """Long-tailed pre-training mix: lognormal times a scale, then clipped to [256, total]."""

    def draw(rng: np.random.Generator, total: int) -> int:
        length = rng.lognormal(np.log(LDC_MEDIAN), LDC_SIGMA) * scale
        return round(min(max(length, LDC_SHORTEST), total))

    return draw


def longalign(rng: np.random.Generator, _total: int) -> int:
    """Log-uniform from 8K to 64K: an assumption about LongAlign."""
    return int(np.rint(np.exp(rng.uniform(*np.log(LONGALIGN_RANGE)))))


def sft_mixture(rng: np.random.Generator, _total: int) -> int:
    """99.89 % short samples with a mean of about 1K, 0.11 % long ones with a mean of about 37K.

    The shapes are assumptions: exponential, and uniform from 8K to 64K.
    """
    if rng.random() < SFT_LONG_SHARE:
        return int(rng.integers(*SFT_LONG_RANGE, endpoint=True))
    return 1 + int(rng.exponential(SFT_SHORT_MEAN))


def uniform(length: int) -> Distribution:
    """Every sequence has the same length."""
    return lambda _rng, _total: length


def single(_rng: np.random.Generator, total: int) -> int:
    """One sequence with all tokens."""
    return total


PLAIN: dict[str, Distribution] = {
    "training_documents": training_documents,
    "ldc": ldc(1.0),
    "longalign": longalign,
    "sft_mixture": sft_mixture,
    "uniform": uniform(8192),
    "single": single,
}
# Names to choose from: `ldc_x` takes any scale, `uniform:` any length (`uniform` is 8192).
NAMES = (*PLAIN, "ldc_x0.5", "ldc_x2", "ldc_x4", "uniform:N")


class Sample(NamedTuple):
    """A distribution's name and the seed of the draw."""

    name: str
    seed: int


def parse_sample(text: str) -> Sample:
    """ "ldc:3" is ldc with seed 3, "ldc" has seed 0; "uniform:8192" has seed 0, "uniform:8192:3"
    has seed 3."""
    match = re.fullmatch(r"(uniform:\d+|[^:]+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(
            f"sample is {text!r}; write NAME or NAME:SEED, with NAME one of {', '.join(NAMES)}"
        )
    find_distribution(match[1])
    return Sample(match[1], int(match[2] or 0))


def find_distribution(name: str) -> Distribution:
    """The distribution called `name`. A ValueError lists the known names."""
    if name in PLAIN:
        return PLAIN[name]
    scale = re.fullmatch(r"ldc_x(\d+(?:\.\d+)?)", name)
    if scale and float(scale[1]) > 0:
        return ldc(float(scale[1]))
    length = re.fullmatch(r"uniform:(\d+)", name)
    if length and int(length[1]) > 0:
        return uniform(int(length[1]))
    raise ValueError(f"length distribution is {name!r}; choose one of {', '.join(NAMES)}")


def sample_lengths(name: str, total_tokens: int, seed: int = 0) -> list[int]:
    """Draws lengths until they add up to `total_tokens`, and cuts the last one.

    "ldc" with 131,072 tokens and seed 0 starts 3533, 2527, 6898.
    """
    total_tokens = whole_number("total_tokens", total_tokens, 1)
    draw, rng = find_distribution(name), np.random.default_rng(seed)
    left, lengths = total_tokens, []
    while left:
        lengths.append(min(draw(rng, total_tokens), left))
        left -= lengths[-1]
    return lengths


def read_lengths(path: str | Path) -> list[int]:
    """Reads lengths from a text file with one integer per line, or from a JSON list of integers.

    Empty lines are skipped. For anything else, a ValueError names the line or entry.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"lengths file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"lengths file {path} is not text: {error.reason}") from error
    lengths = _read_json(text, path) if text.lstrip().startswith("[") else _read_lines(text, path)
    if not lengths:
        raise ValueError(f"lengths file {path} has no lengths; at least one is needed")
    return lengths


def _read_lines(text: str, path: str | Path) -> list[int]:
    lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), start=1))
    return [_length(_number(line), f"{path}, line {n}") for n, line in lines if line]


def _number(line: str) -> int | str:
    return int(line) if line.isascii() and line.isdigit() else line


def _read_json(text: str, path: str | Path) -> list[int]:
    try:
        values = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"lengths file {path}, line {error.lineno}: not a JSON list: {error.msg}"
        ) from error
    except ValueError as error:
        raise ValueError(f"lengths file {path}: not a JSON list: {error}") from error
    return [_length(value, f"{path}, entry {n}") for n, value in enumerate(values, start=1)]


def _length(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:  # `type`, since a bool is an int, too
        raise ValueError(
            f"lengths file {where}: {value!r} is not a length; lengths must be positive integers"
        )
    return value

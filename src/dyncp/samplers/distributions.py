"""Distributions of sequence lengths. Each draws one length at a time."""

from collections.abc import Callable, Iterator

import numpy as np

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

Lengths = Iterator[int]
Distribution = Callable[[np.random.Generator, int], Lengths]


def training_documents(rng: np.random.Generator, _total: int) -> Lengths:
    """The table above, uniform inside a bin."""
    most, share = np.array([0, *(m for m, _ in DOCUMENT_TOKENS)]), [s for _, s in DOCUMENT_TOKENS]
    while True:
        row = int(np.searchsorted(share, 100 * rng.random()))
        yield int(rng.integers(most[row] + 1, most[row + 1] + 1))


def ldc(scale: float) -> Distribution:
    """Long-tailed pre-training mix: lognormal times a scale, then clipped to [256, total]."""

    def draw(rng: np.random.Generator, total: int) -> Lengths:
        while True:
            length = rng.lognormal(np.log(LDC_MEDIAN), LDC_SIGMA) * scale
            yield round(min(max(length, LDC_SHORTEST), total))

    return draw


def longalign(rng: np.random.Generator, _total: int) -> Lengths:
    """Log-uniform from 8K to 64K: an assumption about LongAlign."""
    while True:
        yield round(np.exp(rng.uniform(*np.log(LONGALIGN_RANGE))))


def sft_mixture(rng: np.random.Generator, _total: int) -> Lengths:
    """99.89 % short samples with a mean of about 1K, 0.11 % long ones with a mean of about 37K.

    The shapes are assumptions: exponential, and uniform from 8K to 64K.
    """
    while True:
        if rng.random() < SFT_LONG_SHARE:
            yield int(rng.integers(*SFT_LONG_RANGE, endpoint=True))
        else:
            yield 1 + int(rng.exponential(SFT_SHORT_MEAN))


def uniform(length: int) -> Distribution:
    """Every sequence has the same length."""

    def draw(_rng: np.random.Generator, _total: int) -> Lengths:
        while True:
            yield length

    return draw


def single(_rng: np.random.Generator, total: int) -> Lengths:
    """One sequence with all tokens."""
    yield total

"""Draws the lengths of a batch by the name of a distribution."""

import re
from typing import NamedTuple

import numpy as np

from dyncp.checks import whole_number
from dyncp.samplers import distributions
from dyncp.samplers.distributions import Distribution

PLAIN: dict[str, Distribution] = {
    "training_documents": distributions.training_documents,
    "ldc": distributions.ldc(1.0),
    "longalign": distributions.longalign,
    "sft_mixture": distributions.sft_mixture,
    "uniform": distributions.uniform(8192),
    "single": distributions.single,
}
# What may be asked for: `ldc_x` takes any scale, `uniform:` any length (8192 without).
NAMES = (*PLAIN, "ldc_x0.5", "ldc_x2", "ldc_x4", "uniform:N")

_NUMBER = r"(\d+(?:\.\d+)?)"


class Sample(NamedTuple):
    """A distribution's name and the seed of the draw."""

    name: str
    seed: int


def parse_sample(text: str) -> Sample:
    """ "ldc:3" is ldc with seed 3, "ldc" has seed 0; "uniform:8192" is a name, "uniform:8192:3" too
    has a seed."""
    match = re.fullmatch(r"(uniform:\d+|[^:]+)(?::(\d+))?", text)
    if match is None:
        raise ValueError(
            f"sample is {text!r}; write NAME or NAME:SEED, with NAME one of {', '.join(NAMES)}"
        )
    find_distribution(match[1])
    return Sample(match[1], int(match[2] or 0))


def find_distribution(name: str) -> Distribution:
    """The distribution called `name`; raises ValueError that lists the names."""
    if name in PLAIN:
        return PLAIN[name]
    scale = re.fullmatch("ldc_x" + _NUMBER, name)
    if scale and float(scale[1]) > 0:
        return distributions.ldc(float(scale[1]))
    length = re.fullmatch(r"uniform:(\d+)", name)
    if length and int(length[1]) > 0:
        return distributions.uniform(int(length[1]))
    raise ValueError(f"length distribution is {name!r}; choose one of {', '.join(NAMES)}")


def sample_lengths(name: str, total_tokens: int, seed: int = 0) -> list[int]:
    """Lengths that add up to `total_tokens`: drawn until they reach it, the last one cut.

    "ldc" with 131,072 tokens and seed 0 starts 3533, 2527, 6898.
    """
    total_tokens = whole_number("total_tokens", total_tokens, 1)
    left, lengths = total_tokens, []
    for length in find_distribution(name)(np.random.default_rng(seed), total_tokens):
        lengths.append(min(length, left))
        left -= lengths[-1]
        if left == 0:
            break
    return lengths

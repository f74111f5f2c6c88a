"""Sequence lengths to plan for: known distributions, and a user's own file."""

from dyncp.samplers.read import read_lengths
from dyncp.samplers.sample import NAMES, Sample, parse_sample, sample_lengths

__all__ = ["NAMES", "Sample", "parse_sample", "read_lengths", "sample_lengths"]

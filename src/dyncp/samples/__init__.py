"""Samples of datasets in an order that repeats exactly, and the rows of them that a rank holds."""

from dyncp.samples.checks import SampleLimits
from dyncp.samples.fields import NO_TARGET, SampleError, digest_of, input_ids_of, sample_bytes
from dyncp.samples.local_data import LocalData, make_local_data
from dyncp.samples.order import SamplePosition, describe_sampler
from dyncp.samples.reading import SeededRandom
from dyncp.samples.source import (
    IndexedSource,
    SampleEntry,
    SampleOptions,
    SampleSource,
    open_source,
)
from dyncp.samples.targets import TARGET_FIELDS, count_targets, num_targets

"""Samples of datasets in an order that repeats exactly, and the rows of them that a rank holds."""

from dyncp.samples.fields import NO_TARGET, SampleError, digest_of, input_ids_of, sample_bytes
from dyncp.samples.local_data import TARGET_FIELDS, count_targets, make_local_data, num_targets
from dyncp.samples.order import SamplePosition, describe_sampler
from dyncp.samples.reading import SeededRandom
from dyncp.samples.source import (
    IndexedSource,
    SampleEntry,
    SampleOptions,
    SampleSource,
    open_source,
)

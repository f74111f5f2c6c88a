"""Documents and plans for the tests of framework integrations."""

import numpy as np
import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    PlannerConfig,
    Topology,
    make_local_data,
    masks,
    plan_batch,
)

VOCAB = 96
LENGTHS = (150, 9, 31, 4, 180, 12, 40, 60, 77, 5, 3, 100)
DOCUMENTS = [
    torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS
]
SAMPLES = [{"input_ids": tokens} for tokens in DOCUMENTS]
SHAPE = AttentionShape(4, 2, 8, "fp32")


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def planned(ranks, numbers=(0, 1, 2), shape=SHAPE):
    """Local data and step of virtual ranks."""
    samples = [SAMPLES[number] for number in numbers]
    batch = Batch.of([masks.causal(len(sample["input_ids"])) for sample in samples])
    plan = plan_batch(batch, Topology(1, ranks), shape, PlannerConfig(block_size=16))
    step = DCPExecutor(virtual_ranks=ranks).prepare(plan)
    return make_local_data(samples, batch, plan), step


def documents_of(plan):
    """The indices of a plan's documents in DOCUMENTS; none for a filler batch."""
    return [LENGTHS.index(n) for n in plan.lengths if not plan.filler]


def most_owners(plan):
    """The largest number of ranks that own tokens of one document."""
    pairs = np.unique(np.stack([plan.blocks.sequence, plan.blocks.owner]), axis=1)
    return int(np.unique(pairs[0], return_counts=True)[1].max())

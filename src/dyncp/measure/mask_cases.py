"""The masks that kernels are measured with, as batches of one length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dyncp import masks
from dyncp.arrays import Int32
from dyncp.blocks import DEFAULT_MASK, Batch
from dyncp.samplers import sample_lengths

# Windows of 4,096 tokens, less in short sequences, which else would be causal.
WINDOW, WINDOW_SHARE = 4096, 4
# Documents of a long-tailed mix, shorter in short batches.
DOCUMENTS, WHOLE_DOCUMENTS = "ldc_x{scale:.4f}", 16384


@dataclass(frozen=True, eq=False)
class MaskCase:
    """A batch to attend over, and the name of its mask. `documents` is True where every sequence
    is causal, `plain` where it is one sequence, causal or full: what other kernels have built in.
    """

    name: str
    batch: Batch
    documents: bool = False
    plain: bool = False

    @property
    def tokens(self) -> int:
        return self.batch.num_tokens

    @property
    def causal(self) -> bool:
        return self.documents or self.name == "causal"

    @cached_property
    def num_pairs(self) -> int:
        return sum(mask.num_pairs for mask in self.batch.masks[DEFAULT_MASK])

    def ranges(self) -> Int32:
        """Key ranges of every token of the batch as coordinates, int32[tokens, R, 2]."""
        every = self.batch.masks[DEFAULT_MASK]
        ranges = np.zeros((self.tokens, max(mask.ranges.shape[1] for mask in every), 2), np.int32)
        for mask, first in zip(every, self.batch.offsets[:-1].tolist(), strict=True):
            rows = slice(first, first + mask.length)
            ranges[rows, : mask.ranges.shape[1]] = mask.ranges + first
        return ranges


def _window(length: int) -> int:
    return max(1, min(WINDOW, length // WINDOW_SHARE))


def _documents(tokens: int) -> list[int]:
    name = DOCUMENTS.format(scale=min(1.0, tokens / WHOLE_DOCUMENTS))
    return sample_lengths(name, tokens)


def _one(mask: masks.Mask) -> Batch:
    return Batch.of([mask])


BUILDERS: dict[str, Callable[[int], MaskCase]] = {
    "causal": lambda n: MaskCase("causal", _one(masks.causal(n)), plain=True),
    "full": lambda n: MaskCase("full", _one(masks.full(n)), plain=True),
    "document_causal": lambda n: MaskCase(
        "document_causal",
        Batch.of([masks.causal(length) for length in _documents(n)]),
        documents=True,
    ),
    "lambda_shaped": lambda n: MaskCase(
        "lambda_shaped", _one(masks.lambda_shaped(n, window=_window(n)))
    ),
    "shared_question": lambda n: MaskCase("shared_question", _one(masks.shared_question(n))),
    "causal_blockwise": lambda n: MaskCase("causal_blockwise", _one(masks.causal_blockwise(n))),
    "sliding_window": lambda n: MaskCase(
        "sliding_window", _one(masks.sliding_window(n, window=_window(n)))
    ),
}


def mask_case(name: str, length: int) -> MaskCase:
    """The case called `name` over `length` tokens."""
    if name not in BUILDERS:
        raise ValueError(f"mask is {name!r}; choose from {', '.join(BUILDERS)}")
    return BUILDERS[name](length)

"""Several documents packed into one sequence; none of them attends another."""

from collections.abc import Sequence

import numpy as np

from dyncp.masks.function import from_sample, lengths_of, mask_function
from dyncp.masks.mask import Marks, Mask, interval_mask


@mask_function
def document_packed(
    length: int,
    documents: Sequence[int] = from_sample("document_lengths"),
    causal: bool = True,
) -> Mask:
    """Every token attends its own document: up to itself, or all of it if `causal` is False.

    `documents` lists the documents' lengths, which must add up to `length` (default: the sample's
    `document_lengths`). Positions restart at 0 in every document, and the last token of each
    document has no target.

    document_packed(5, documents=[2, 3])      position    target
    █····                                     0           1
    ██···                                     1           none
    ··█··                                     0           3
    ··██·                                     1           4
    ··███                                     2           none
    """
    lengths = lengths_of("document_packed", "documents", documents)
    if lengths.sum() != length:
        raise ValueError(
            f"masks.document_packed: documents add up to {lengths.sum()} tokens; they must add "
            f"up to the length of the sequence, {length}"
        )
    ends = np.cumsum(lengths, dtype=np.int32)
    start, end = np.repeat(ends - lengths.astype(np.int32), lengths), np.repeat(ends, lengths)
    token = np.arange(length, dtype=np.int32)
    targets = np.where(token + 1 < end, token + 1, np.int32(-1))
    own = (start, token + 1 if causal else end)
    return interval_mask("document_packed", length, own, marks=Marks(token - start, targets))

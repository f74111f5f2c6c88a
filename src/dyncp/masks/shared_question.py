"""One question, several answers that do not see each other (preference and reward training)."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.masks.function import integer, lengths_of, mask_function
from dyncp.masks.mask import Marks, Mask, normal_mask
from dyncp.masks.prefix_tree import prefix_tree

MOST_EMPTY = 1024  # answers of a shorter sequence, most of them empty


@mask_function
def shared_question(
    length: int, answers: int | Sequence[int] = 4, question: int | None = None
) -> Mask:
    """The question is causal; an answer token attends the question and its own answer so far.

    `answers` is a number of answers of equal length, of which the last takes the remainder, or the
    length of each. `question` is the number of tokens before them: what the answers leave, or a
    fifth (rounded down) of the sequence if only their number is known.

    Every answer's positions go on from the question. The last token of an answer has no target.
    Nor has the last token of the question if several answers follow: it would have as many next
    tokens. Begin every answer with the same separator token to train on the first real ones.

    shared_question(6, answers=2, question=2)      position    target
    █·····                                         0           1
    ██····                                         1           none: 2 or 4
    ███···                                         2           3
    ████··                                         3           none
    ██··█·                                         2           5
    ██··██                                         3           none
    """
    question, lengths = _parts(length, answers, question)
    sizes = lengths[lengths > 0]
    parents = np.full(len(sizes), 0 if question else -1)
    if question:
        sizes, parents = np.append(question, sizes), np.append(-1, parents)
    tree = prefix_tree.builder(length, parents, sizes)
    return normal_mask(tree.ranges, Marks(tree.positions, tree.targets), "shared_question")


def _parts(length: int, answers: int | Sequence[int], question: int | None) -> tuple[int, Int64]:
    """Length of the question and of every answer."""
    if np.ndim(answers) == 0:
        number = integer("shared_question", "answers", answers, 1, max(length, MOST_EMPTY))
        chosen = length // 5 if question is None else question
        chosen = integer("shared_question", "question", chosen, 0, length)
        lengths = np.full(number, (length - chosen) // number)
        lengths[-1] += (length - chosen) % number
        return chosen, lengths
    lengths = lengths_of("shared_question", "answers", answers)
    left = length - int(lengths.sum())
    if left < 0 or question not in (None, left):
        raise ValueError(
            f"masks.shared_question: answers of {lengths.sum()} tokens and question {question} "
            f"must add up to the length of the sequence, {length}"
        )
    return left, lengths

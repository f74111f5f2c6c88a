"""One question and several answers that do not attend each other, as in preference training."""

from collections.abc import Sequence

import numpy as np

from dyncp.arrays import Int64
from dyncp.masks.function import integer, lengths_of, mask_function
from dyncp.masks.mask import Marks, Mask, normal_mask
from dyncp.masks.prefix_tree import prefix_tree

MOST_ANSWERS = 1024  # allowed even if the sequence has fewer tokens; most answers are then empty


@mask_function
def shared_question(
    length: int, answers: int | Sequence[int] = 4, question: int | None = None
) -> Mask:
    """The question is causal; an answer token attends the question and its own answer so far.

    `answers` is either the length of each answer or the number of answers, which then have equal
    lengths, except that the last takes the remainder. `question` is the number of tokens before
    the answers. It defaults to all tokens that the given answer lengths leave over, or to a fifth
    of the sequence (rounded down) if only the number of answers is given.

    The positions of every answer continue from the question. The last token of an answer has no
    target. If there are several answers, the last token of the question has no target either,
    because it has several next tokens. To train on the first real token of each answer, begin
    every answer with the same separator token.

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
    """The length of the question and the lengths of the answers."""
    if np.ndim(answers) == 0:
        number = integer("shared_question", "answers", answers, 1, max(length, MOST_ANSWERS))
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

"""Random masks for `drawn_cases`, each with an independent matrix of its allowed pairs.

The mask is made by dyncp, the matrix without any of its code.
"""

from typing import Any, NamedTuple

import numpy as np

from dyncp import masks
from dyncp.masks import Mask

Allowed = np.ndarray  # bool [queries, keys]
NAMES = (*sorted(masks.BUILTIN), "ranges", "union", "intersection")


class Drawn(NamedTuple):
    mask: Mask
    allowed: Allowed


def draw_mask(rng: np.random.Generator, length: int) -> Drawn:
    """A random mask of `length` tokens with the default positions and targets, which all masks of a
    sequence share."""
    name = str(rng.choice(NAMES))
    if name == "ranges":
        return _draw_ranges(rng, length)
    if name in ("union", "intersection"):
        left, right = draw_mask(rng, length), draw_mask(rng, length)
        if name == "union":
            return Drawn(left.mask | right.mask, left.allowed | right.allowed)
        return Drawn(left.mask & right.mask, left.allowed & right.allowed)
    parameters = _parameters(rng, name, length)
    made = masks.BUILTIN[name](length, **parameters)
    return Drawn(Mask(made.ranges, name=name), _allowed(name, length, parameters))


def _draw_ranges(rng: np.random.Generator, length: int) -> Drawn:
    """Up to 4 random ranges per token; some tokens attend nothing."""
    count = int(rng.integers(1, 5))
    borders = np.sort(rng.integers(0, length + 1, (length, 2 * count)), axis=1)
    ranges = borders.reshape(length, count, 2)
    ranges[rng.random(length) < rng.choice([0.0, 0.3, 1.0])] = 0
    allowed = np.zeros((length, length), np.bool_)
    for token in range(length):
        for start, end in ranges[token]:
            allowed[token, start:end] = True
    return Drawn(Mask(ranges, name="ranges"), allowed)


def _parameters(rng: np.random.Generator, name: str, length: int) -> dict[str, Any]:
    def some(least: int, most: int) -> int:
        return int(rng.integers(least, most + 1))

    cuts = np.sort(rng.integers(0, length + 1, some(0, 5)))
    documents = np.diff([0, *cuts.tolist(), length]).tolist()
    nodes = [tokens for tokens in documents if tokens]
    choices: dict[str, dict[str, Any]] = {
        "sliding_window": {"window": some(1, length + 2)},
        "lambda_shaped": {"sinks": some(0, length + 2), "window": some(1, length + 2)},
        "causal_blockwise": {
            "block": some(1, length + 2),
            "local": some(0, 3),
            "sink": some(0, 3),
        },
        "shared_question": {"answers": some(1, 5), "question": some(0, length)},
        "prefix_lm": {"prefix": some(0, length)},
        "document_packed": {"documents": documents, "causal": bool(some(0, 1))},
        "global_sliding": {
            "num_global": some(0, length + 2),
            "window": some(1, length + 2),
            "causal": bool(some(0, 1)),
        },
        "block_causal": {"chunk": some(1, length + 2)},
        "prefix_tree": {
            "parents": [some(-1, node - 1) for node in range(len(nodes))],
            "lengths": nodes,
        },
    }
    return choices.get(name, {})


def _allowed(name: str, length: int, given: dict[str, Any]) -> Allowed:
    """The matrix of a builtin mask, following the definition of pairs (i, j) in docs/masks.md."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    causal = given.get("causal", True)
    if name == "document_packed":
        document = np.repeat(np.arange(len(given["documents"])), given["documents"])
        allowed = document[:, None] == document[None, :]
    elif name == "shared_question":
        part = _answer_of(length, given["answers"], given["question"])
        allowed = (j < given["question"]) | (part[:, None] == part[None, :])
    elif name == "causal_blockwise":
        block = given["block"]
        near = (j < given["sink"] * block) | (j >= i - given["local"] * block)
        allowed = near | (i // block == (length - 1) // block)
    elif name in ("lambda_shaped", "sliding_window"):
        allowed = (j < given.get("sinks", 0)) | (i - j < given["window"])
    elif name == "global_sliding":
        number = given["num_global"]
        allowed = (i < number) | (j < number) | (abs(i - j) < given["window"])
    elif name == "prefix_lm":
        allowed, causal = (j <= i) | (j < given["prefix"]), False
    elif name == "prefix_tree":
        allowed = _above(given["parents"], given["lengths"])
    elif name == "block_causal":
        allowed, causal = j // given["chunk"] <= i // given["chunk"], False
    else:
        allowed, causal = np.ones((length, length), np.bool_), name == "causal"
    return np.logical_and(allowed, j <= i) if causal else allowed


def _above(parents: list[int], lengths: list[int]) -> Allowed:
    """Whether the node of one token is the same as, or an ancestor of, the node of another."""
    above = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return above.repeat(lengths, axis=0).repeat(lengths, axis=1)


def _answer_of(length: int, answers: int, question: int) -> np.ndarray:
    """The answer that each token belongs to, or -1 for the question. The last answer has the
    remainder."""
    each = (length - question) // answers
    part = np.full(length, -1)
    for token in range(question, length):
        part[token] = min((token - question) // each, answers - 1) if each else answers - 1
    return part

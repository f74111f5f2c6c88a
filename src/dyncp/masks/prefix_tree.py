"""Texts that share their beginnings: a prompt with many answers, turns that branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64
from dyncp.compiled import compiled
from dyncp.masks.function import MaskFunction, ParametricMask, from_sample, lengths_of
from dyncp.masks.mask import Mask, packed_mask

WEIGHTS = ("token", "leaf")
MOST_NUMBERS = 2**28  # of ranges: 1 GiB


class PrefixTree(ParametricMask):
    """`masks.prefix_tree`, which may also be called with the tree alone."""

    def __call__(  # type: ignore[override]
        self, subject: Any = None, lengths: Any = None, /, **parameters: Any
    ) -> Mask | MaskFunction:
        if not isinstance(subject, list | tuple | np.ndarray):
            if lengths is not None:
                parameters["lengths"] = lengths
            result: Mask | MaskFunction = super().__call__(subject, **parameters)
            return result
        lengths = parameters.pop("lengths", None) if lengths is None else lengths
        sizes = _lengths(lengths)
        tree = {"parents": subject, "lengths": sizes, **parameters}
        return self.with_parameters(tree).build(int(sizes.sum()), None)


@PrefixTree
def prefix_tree(
    length: int,
    parents: Sequence[int] = from_sample("parents"),
    lengths: Sequence[int] = from_sample("node_lengths"),
    weights: str = "token",
) -> Mask:
    """A token attends its own node up to itself, and all nodes above.

    Nodes lie in memory one after the other, each after its parent: `parents[i]` is the parent of
    node i, or -1 for a root, and `lengths[i]` its number of tokens. A sample may say its `parents`
    and `node_lengths`; `prefix_tree(parents, lengths)` is the mask of the tree itself. Positions go
    on from the parent. The last token of a node has the first token of every child as a target.
    `weights` says how often a target counts: "token", once; "leaf", once for every leaf below it,
    as if every path from a root to a leaf were a sequence of its own.

    prefix_tree([-1, 0, 1, 1, 0], [2, 1, 1, 1, 1])    position    targets
    █·····                                            0           1
    ██····                                            1           2 and 5
    ███···                                            2           3 and 4
    ████··                                            3           none
    ███·█·                                            3           none
    ██···█                                            2           none
    """
    parent, sizes = _tree(length, parents, lengths)
    if weights not in WEIGHTS:
        raise ValueError(f"masks.prefix_tree: weights is {weights!r}; choose token or leaf")
    ends = np.cumsum(sizes)
    starts = ends - sizes
    ranges = _ranges(parent, starts, ends)
    depth = _depths(parent, sizes)
    token = np.arange(length, dtype=np.int32)
    positions = token + np.repeat((depth - starts).astype(np.int32), sizes)
    targets, branches = _targets(parent, starts, ends)
    counted = None
    if weights == "leaf":
        leaves = _leaves(parent)
        counted = np.repeat(leaves.astype(np.int32), sizes) if leaves.max() > 1 else None
    return packed_mask(ranges, positions, targets, "prefix_tree", branches, counted)


def _lengths(lengths: npt.ArrayLike) -> Int64:
    sizes = lengths_of("prefix_tree", "lengths", lengths)
    if sizes.min() < 1:
        node = int(np.argmin(sizes))
        raise ValueError(
            f"masks.prefix_tree: lengths[{node}] is {sizes[node]}; every node needs at least one "
            "token: leave empty nodes out"
        )
    return sizes


def _tree(length: int, parents: npt.ArrayLike, lengths: npt.ArrayLike) -> tuple[Int64, Int64]:
    sizes, parent = _lengths(lengths), np.asarray(parents)
    if parent.shape != sizes.shape or not np.issubdtype(parent.dtype, np.integer):
        raise ValueError(
            f"masks.prefix_tree: parents is {parents!r} for {len(sizes)} nodes; it must be a list "
            "of as many integers as lengths"
        )
    wrong = (parent < -1) | (parent >= np.arange(len(parent)))
    if wrong.any():
        node = int(np.argmax(wrong))
        raise ValueError(
            f"masks.prefix_tree: parents[{node}] is {parent[node]}; a parent comes before its "
            "children, and roots have -1"
        )
    if sizes.sum() != length:
        raise ValueError(
            f"masks.prefix_tree: lengths add up to {sizes.sum()} tokens; the sequence has {length}"
        )
    return parent.astype(np.int64), sizes


def _ranges(parent: Int64, starts: Int64, ends: Int64) -> Int32:
    """Key ranges of every token: those of the nodes above, neighbours merged, and its own node."""
    count = np.zeros(len(parent), np.int64)
    _count_ranges(parent, starts, ends, count)
    most = int(count.max())
    length = int(ends[-1])
    if 2 * most * length > MOST_NUMBERS:
        raise ValueError(
            f"masks.prefix_tree: {length:,} tokens attend up to {most} separate nodes each; at "
            f"most {MOST_NUMBERS // (2 * length)} are possible at this length. Nodes that follow "
            "their parents in memory count as one: list every node right after its parent where "
            "you can (depth first)"
        )
    ranges = np.empty((length, most, 2), np.int32)
    _fill_ranges(parent, starts, ends, count, ranges)
    return ranges


@compiled
def _count_ranges(parent: Int64, starts: Int64, ends: Int64, count: Int64) -> None:
    """A node that directly follows its parent extends the parent's last range."""
    for node in range(len(parent)):
        above = parent[node]
        if above < 0:
            count[node] = 1
        else:
            count[node] = count[above] + (ends[above] != starts[node])


@compiled
def _fill_ranges(parent: Int64, starts: Int64, ends: Int64, count: Int64, ranges: Int32) -> None:
    length, most = ranges.shape[0], ranges.shape[1]
    for node in range(len(parent)):
        above, first, own = parent[node], starts[node], count[node] - 1
        last = ends[above] - 1 if above >= 0 else 0  # the parent's last token has all its ranges
        begin = first
        if above >= 0 and ends[above] == first:
            begin = ranges[last, own, 0]
        for token in range(first, ends[node]):
            for column in range(own):
                ranges[token, column, 0] = ranges[last, column, 0]
                ranges[token, column, 1] = ranges[last, column, 1]
            ranges[token, own, 0], ranges[token, own, 1] = begin, token + 1
            for column in range(own + 1, most):
                ranges[token, column, 0] = ranges[token, column, 1] = length


@compiled
def _depths(parent: Int64, sizes: Int64) -> Int64:
    """Tokens above every node."""
    depth = np.zeros(len(parent), np.int64)
    for node in range(len(parent)):
        if parent[node] >= 0:
            depth[node] = depth[parent[node]] + sizes[parent[node]]
    return depth


@compiled
def _leaves(parent: Int64) -> Int64:
    """Leaves below every node, itself if it is one."""
    leaves = np.zeros(len(parent), np.int64)
    for node in range(len(parent) - 1, -1, -1):
        leaves[node] = max(leaves[node], 1)
        if parent[node] >= 0:
            leaves[parent[node]] += leaves[node]
    return leaves


def _targets(parent: Int64, starts: Int64, ends: Int64) -> tuple[Int32, Int32 | None]:
    """The next token of every token but the last of nodes with no child, or with several."""
    targets = np.arange(1, int(ends[-1]) + 1, dtype=np.int32)
    targets[ends - 1] = -1
    children = np.flatnonzero(parent >= 0)
    above = parent[children]
    several = np.bincount(above, minlength=len(parent))[above] > 1
    targets[ends[above[~several]] - 1] = starts[children[~several]]
    if not several.any():
        return targets, None
    by_parent = np.argsort(above[several], kind="stable")
    pairs = np.stack([ends[above[several]] - 1, starts[children[several]]], axis=1)[by_parent]
    return targets, pairs.astype(np.int32)

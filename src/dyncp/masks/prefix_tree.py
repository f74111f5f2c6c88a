"""Texts that share a prefix: a prompt with many answers, or conversations that branch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dyncp.arrays import Int32, Int64
from dyncp.compiled import compiled
from dyncp.masks.function import MaskFunction, ParametricMask, from_sample, lengths_of
from dyncp.masks.mask import Marks, Mask, normal_mask

MOST_NUMBERS = 2**28  # size limit of the ranges array: 1 GiB of int32


class PrefixTree(ParametricMask):
    """The type of `masks.prefix_tree`: it can also be called as `prefix_tree(parents, lengths)`."""

    def __call__(  # type: ignore[override]
        self, subject: Any = None, lengths: Any = None, /, **parameters: Any
    ) -> Mask | MaskFunction:
        if lengths is not None:
            parameters["lengths"] = lengths
        if not isinstance(subject, list | tuple | np.ndarray):
            result: Mask | MaskFunction = super().__call__(subject, **parameters)
            return result
        sizes = _lengths(parameters.get("lengths"))
        tree = {**parameters, "parents": subject, "lengths": sizes}
        return self.with_parameters(tree).build(int(sizes.sum()), None)


@PrefixTree
def prefix_tree(
    length: int,
    parents: Sequence[int] = from_sample("parents"),
    lengths: Sequence[int] = from_sample("node_lengths"),
    weights: str = "token",
) -> Mask:
    """A token attends its own node up to itself, and all ancestors of the node.

    The sequence is the concatenation of all nodes, each after its parent. `parents[i]` is the
    parent of node i, or -1 for a root, and `lengths[i]` is its number of tokens (defaults: the
    sample's `parents` and `node_lengths`). `prefix_tree(parents, lengths)` returns the mask of the
    tree directly. Positions continue from the parent. The targets of a node's last token are the
    first tokens of all its children. With weights="token" every target counts once. With
    weights="leaf" it counts once per leaf below it, as if every path from a root to a leaf were a
    separate sequence.

    prefix_tree([-1, 0, 1, 1, 0], [2, 1, 1, 1, 1])    position    targets
    █·····                                            0           1
    ██····                                            1           2 and 5
    ███···                                            2           3 and 4
    ████··                                            3           none
    ███·█·                                            3           none
    ██···█                                            2           none
    """
    parent, sizes = _tree(length, parents, lengths)
    if weights not in ("token", "leaf"):
        raise ValueError(f"masks.prefix_tree: weights is {weights!r}; choose token or leaf")
    ends = np.cumsum(sizes)
    starts = ends - sizes
    num_ranges, depth, leaves = _walk(parent, starts, ends)
    ranges = _ranges(parent, starts, ends, num_ranges)
    positions = np.arange(length) + np.repeat(depth - starts, sizes)
    targets, branches = _targets(parent, starts, ends)
    counted = np.repeat(leaves.astype(np.int32), sizes) if weights == "leaf" else None
    marks = Marks(positions.astype(np.int32), targets, branches, counted)
    return normal_mask(ranges, marks, "prefix_tree")


def _lengths(lengths: object) -> Int64:
    sizes = lengths_of("prefix_tree", "lengths", lengths)
    if sizes.min() < 1:
        node = int(np.argmin(sizes))
        raise ValueError(
            f"masks.prefix_tree: lengths[{node}] is {sizes[node]}; every node needs at least one "
            "token: leave out empty nodes"
        )
    return sizes


def _tree(length: int, parents: npt.ArrayLike, lengths: object) -> tuple[Int64, Int64]:
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


@compiled
def _walk(parent: Int64, starts: Int64, ends: Int64) -> tuple[Int64, Int64, Int64]:
    """For every node: the number of key ranges of its tokens, the number of tokens in its
    ancestors, and the number of leaves below it (1 for a leaf itself). A node stored directly after
    its parent extends the parent's last range."""
    num_ranges = np.ones(len(parent), np.int64)
    depth, leaves = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
    for node in range(len(parent)):
        above = parent[node]
        if above >= 0:
            num_ranges[node] = num_ranges[above] + (ends[above] != starts[node])
            depth[node] = depth[above] + ends[above] - starts[above]
    for node in range(len(parent) - 1, -1, -1):
        leaves[node] = max(leaves[node], 1)
        if parent[node] >= 0:
            leaves[parent[node]] += leaves[node]
    return num_ranges, depth, leaves


def _ranges(parent: Int64, starts: Int64, ends: Int64, num_ranges: Int64) -> Int32:
    """Key ranges of every token: its ancestors and its own node, with adjacent ranges merged."""
    most, length = int(num_ranges.max()), int(ends[-1])
    if 2 * most * length > MOST_NUMBERS:
        raise ValueError(
            f"masks.prefix_tree: each of the {length:,} tokens attends up to {most} separate key "
            f"ranges; at most {MOST_NUMBERS // (2 * length)} are possible at this length. A node "
            "stored directly after its parent shares the parent's range: list the nodes depth "
            "first"
        )
    of_nodes = np.full((len(parent), most, 2), length, np.int32)
    _fill_ranges(parent, starts, ends, num_ranges, of_nodes)
    sizes, token = ends - starts, np.arange(length)
    ranges = np.repeat(of_nodes, sizes, axis=0)
    ranges[token, np.repeat(num_ranges - 1, sizes), 1] = token + 1
    return ranges


@compiled
def _fill_ranges(
    parent: Int64, starts: Int64, ends: Int64, num_ranges: Int64, of_nodes: Int32
) -> None:
    """Writes the key ranges of each node's last token to `of_nodes`."""
    for node in range(len(parent)):
        above, own = parent[node], num_ranges[node] - 1
        if above >= 0:
            of_nodes[node] = of_nodes[above]
        if above < 0 or ends[above] != starts[node]:
            of_nodes[node, own, 0] = starts[node]
        of_nodes[node, own, 1] = ends[node]


def _targets(parent: Int64, starts: Int64, ends: Int64) -> tuple[Int32, Int32 | None]:
    """The single target of every token, or -1, and the (token, target) pairs of tokens that have
    several: the last tokens of nodes with several children."""
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

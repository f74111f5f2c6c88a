"""Hypothesis strategies that several test folders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dyncp import masks
from dyncp.masks import Mask
from dyncp.placement import SOLVERS

# Solvers that run everywhere; hypergraph needs an extra and has tests of its own.
ALWAYS_THERE = sorted(set(SOLVERS) - {"hypergraph"})


def masks_of(length: int) -> st.SearchStrategy[Mask]:
    """Arbitrary valid masks of `length` tokens: random ranges and every builtin."""
    return st.one_of(range_masks_of(length), builtin_masks_of(length))


@st.composite
def named_masks_of(draw: Callable[..., Any], length: int, names: Sequence[str]) -> dict[str, Mask]:
    """One mask per name. Positions and targets belong to the sequence, not to one of its masks."""
    return {name: Mask(draw(masks_of(length)).ranges) for name in names}


@st.composite
def range_masks_of(draw: Callable[..., Any], length: int) -> Mask:
    """Masks of random ranges: up to 4 per token, also none at all.

    Ranges come from a seed, not from one draw per token, so that thousands of tokens stay cheap.
    """
    num_ranges = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    empty_share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    rng = np.random.default_rng(seed)
    borders = np.sort(rng.integers(0, length + 1, (length, 2 * num_ranges)), axis=1)
    ranges = borders.reshape(length, num_ranges, 2)
    ranges[rng.random(length) < empty_share] = 0
    return Mask(ranges, name=f"random(seed={seed})")


@st.composite
def builtin_masks_of(draw: Callable[..., Any], length: int) -> Mask:
    """Builtin masks with random parameters."""
    name = draw(st.sampled_from(sorted(masks.BUILTIN)))
    return masks.BUILTIN[name](length, **draw(parameters_of(name, length)))


def parameters_of(name: str, length: int) -> st.SearchStrategy[dict[str, Any]]:
    """Random parameters of a builtin mask, some of them longer than the sequence."""
    some = st.integers(0, length + 2)
    one_or_more = st.integers(1, length + 2)
    choices: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "causal": {},
        "full": {},
        "sliding_window": {"window": one_or_more},
        "lambda_shaped": {"sinks": some, "window": one_or_more},
        "causal_blockwise": {
            "block": one_or_more,
            "local": st.integers(0, 3),
            "sink": st.integers(0, 3),
        },
        "shared_question": {
            "answers": st.integers(1, 5),
            "question": st.none() | st.integers(0, length),
        },
        "prefix_lm": {"prefix": st.integers(0, length)},
        "document_packed": {"documents": parts_of(length), "causal": st.booleans()},
        "global_sliding": {"num_global": some, "window": one_or_more, "causal": st.booleans()},
        "block_causal": {"chunk": one_or_more},
    }
    return trees_of(length) if name == "prefix_tree" else st.fixed_dictionaries(choices[name])


@st.composite
def trees_of(draw: Callable[..., Any], length: int) -> dict[str, list[int]]:
    """Nodes whose lengths add up to `length`, each with an earlier parent or none."""
    lengths = [part for part in draw(parts_of(length)) if part]
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(lengths))]
    return {"parents": parents, "lengths": lengths}


@st.composite
def parts_of(draw: Callable[..., Any], length: int) -> list[int]:
    """Numbers of at least 0 that add up to `length`."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)]

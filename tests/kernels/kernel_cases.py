"""Random kernel calls, and their dense results in fp64."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dyncp.kernels import KernelCall, RowState, RowStates


@dataclass(frozen=True)
class Case:
    call: KernelCall
    allowed: np.ndarray  # bool[query rows, key rows]


def draw_call(seed: int, *, num_ranges: int = 2, largest: int = 200, groups: int = 1) -> Case:
    """A call on blocks of a few sequences, in any order and with gaps in both workspaces. It has
    about 70 % of the possible tiles."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, largest, rng.integers(1, 4))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    blocks = []
    for s, length in enumerate(lengths):
        cuts = np.unique(np.concatenate([[0, length], rng.integers(0, length, rng.integers(0, 4))]))
        blocks += [(s, a, b) for a, b in pairwise(cuts)]
    q_place, q_coordinates = _lay_out(rng, blocks, offsets)
    k_place, k_coordinates = _lay_out(rng, blocks, offsets)
    ranges = np.zeros((len(q_coordinates), num_ranges, 2), np.int32)
    for i, (s, a, b) in enumerate(blocks):
        if q_place[i] >= 0:
            rows = slice(q_place[i], q_place[i] + b - a)
            ranges[rows] = offsets[s] + _draw_ranges(rng, a, b, lengths[s], num_ranges)
    rectangles = [
        (q_place[i], q_place[i] + b - a, k_place[j], k_place[j] + d - c)
        for i, (s, a, b) in enumerate(blocks)
        for j, (t, c, d) in enumerate(blocks)
        if s == t and q_place[i] >= 0 and k_place[j] >= 0 and rng.random() < 0.7
    ]
    rectangles = np.asarray(rectangles, np.int64).reshape(-1, 4)
    allowed = np.zeros((len(q_coordinates), len(k_coordinates)), np.bool_)
    for q0, q1, k0, k1 in rectangles:
        keys = k_coordinates[k0:k1]
        for r in range(num_ranges):
            inside = (keys >= ranges[q0:q1, r, :1]) & (keys < ranges[q0:q1, r, 1:])
            allowed[q0:q1, k0:k1] |= inside
    states = [
        _draw_states(rng, rectangles[:, columns], n)
        for columns, n in (([0, 1], len(q_coordinates)), ([2, 3], len(k_coordinates)))
    ]
    rows = (slice(0, len(q_coordinates)), slice(0, len(k_coordinates)))
    call = KernelCall(0, rectangles, q_coordinates, k_coordinates, ranges, *states, *rows)
    return Case(call, allowed)


def _lay_out(rng, blocks, offsets):
    place, row, order = np.full(len(blocks), -1), 0, rng.permutation(len(blocks))
    coordinates = []
    for i in order:
        if rng.random() < 0.2 and len(blocks) > 1:
            continue
        gap = int(rng.integers(0, 150)) if rng.random() < 0.4 else 0
        s, a, b = blocks[i]
        coordinates += [-1] * gap + list(range(offsets[s] + a, offsets[s] + b))
        place[i], row = row + gap, row + gap + b - a
    return place, np.asarray(coordinates or [-1], np.int64)


def _draw_ranges(rng, a, b, length, num_ranges):
    """Ranges that mostly grow with the row, as those of masks do. Some rows attend nothing."""
    kind = rng.integers(0, 3)
    rows = np.arange(a, b)[:, None]
    if kind == 0:  # causal window, after a few keys that every row may attend
        edges = np.concatenate([rows * 0, np.minimum(5, rows + 1), np.maximum(5, rows - 70)], 1)
        edges = np.concatenate([edges, rows + 1], 1)
        edges = np.sort(edges, axis=1)
    elif kind == 1:
        edges = np.tile(np.sort(rng.integers(0, length + 1, 4)), (b - a, 1))
    else:
        edges = np.sort(rng.integers(0, length + 1, (b - a, 4)), axis=1)
    return edges.reshape(b - a, 2, 2)[:, :num_ranges]


def _draw_states(rng, spans, num_rows):
    before, after = np.zeros(num_rows, np.uint8), np.full(num_rows, RowState.UNTOUCHED, np.uint8)
    for first, end in np.unique(spans, axis=0):
        before[first:end] = rng.choice([RowState.NOTHING, RowState.FINAL, RowState.WIDE])
        after[first:end] = rng.choice([RowState.FINAL, RowState.WIDE])
    return RowStates(before, after)


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: np.ndarray, scale: float):
    """Output, log-sum-exp and weights [heads, rows, keys] in fp64."""
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T, weights

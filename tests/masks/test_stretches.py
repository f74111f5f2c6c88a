"""The preceding token of each token, which layers with state need."""

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from dyncp import Batch, Plan, Topology, masks, plan_batch
from dyncp.masks import Mask, find_runs, find_stretches, single_stretches
from strategies import masks_of

CAUSAL = masks.causal(10)
CHUNKS = masks.within(CAUSAL, chunk=4)
KNOWN = {
    "one document": ([CAUSAL], [0], [-1]),
    "a window and sinks": ([masks.lambda_shaped(30, sinks=2, window=3)], [0], [-1]),
    "documents": ([masks.document_packed(9, documents=[2, 4, 3])], [0, 2, 6], [-1, -1, -1]),
    "full documents": (
        [masks.document_packed(5, documents=[2, 3], causal=False)],
        [0, 2],
        [-1, -1],
    ),
    "answers": ([masks.shared_question(6, answers=2, question=2)], [0, 4], [-1, 1]),
    "a tree": ([masks.prefix_tree([-1, 0, 1, 1, 0], [4, 2, 3, 2, 5])], [0, 9, 11], [-1, 5, 3]),
    "a branch right after another branch, with another parent": (
        [masks.prefix_tree([-1, 0, 0, 1], [2, 1, 1, 1])],
        [0, 3, 4],
        [-1, 1, 2],
    ),
    "chunks next to a causal mask": ([CHUNKS, CAUSAL], [0], [-1]),
    "windows in branches": (
        [masks.within(masks.shared_question(40, answers=2, question=20), window=4)],
        [0, 30],
        [-1, 19],
    ),
}
UNCLEAR = {
    "chunks alone": ([CHUNKS], 4),
    "documents without positions": ([Mask(masks.document_packed(5, documents=[2, 3]).ranges)], 2),
    "a position without a preceding one": (
        [Mask(masks.document_packed(5, documents=[2, 3]).ranges, positions=[0, 1, 7, 8, 9])],
        2,
    ),
    "two masks that disagree": (
        [
            Mask([[[0, 1]], [[1, 2]], [[2, 3]], [[key, key + 1]]], positions=[0, 0, 0, 1])
            for key in (0, 1)
        ],
        3,
    ),
    "a document that attends earlier tokens": (
        [Mask([[[0, 1]], [[0, 2]], [[2, 3]], [[0, 4]]], positions=[0, 1, 0, 1])],
        2,
    ),
}


@pytest.mark.parametrize("what", KNOWN)
def test_masks_and_positions_determine_the_preceding_token(what):
    given, starts, before = KNOWN[what]
    found = find_stretches(given)
    assert [x.tolist() for x in found] == [starts, before]


@pytest.mark.parametrize("what", UNCLEAR)
def test_an_undetermined_preceding_token_is_not_guessed(what):
    given, token = UNCLEAR[what]
    starts, before = find_stretches(given)
    assert before[starts.tolist().index(token)] == -2


@drawn(st.lists(st.integers(1, 12).flatmap(masks_of), min_size=1, max_size=4))
def test_a_sequence_found_to_be_a_single_stretch_is_one(batch):
    single = single_stretches(find_runs([mask.ranges for mask in batch]))
    for mask, is_single in zip(batch, single, strict=True):
        assert not is_single or [x.tolist() for x in find_stretches([mask])] == [[0], [-1]]


def test_causal_sequences_are_found_to_be_single_stretches():
    batch = [CAUSAL, masks.causal(1), masks.lambda_shaped(30, sinks=2, window=3), CHUNKS]
    runs = find_runs([mask.ranges for mask in batch])
    assert single_stretches(runs).tolist() == [True, True, True, False]


def test_plans_have_the_stretches_of_all_sequences():
    batch = Batch.of([masks.causal(7), masks.document_packed(9, documents=[2, 4, 3])])
    plan = plan_batch(batch, Topology(1, 2))
    for part in Plan.decode(plan.encode()).parts:
        assert part.stretches.start.tolist() == [0, 7, 9, 13]
        assert np.all(part.stretches.before == -1)

"""LFM2 and Qwen3-Next on 4 gloo ranks, where layers with state are hardest to get right."""

import pytest

pytest.importorskip("transformers", reason="the extra transformers is not installed")

from benchmarks.parity import branching
from benchmarks.parity_models import make_model
from test_transformers_ranks import RANKS, SMALL, alone, check, losses_and_weights

from dyncp import DCPExecutor
from processes import run_ranks

HYBRID = ("lfm2", "qwen3_next")


def hybrid_cases(rank):
    """Three training steps of both models: with ranks without rows, and with branches."""
    executor = DCPExecutor(timeout=60)
    whole = {"solver": "uncut", "local_multiple": 1, "numbers": SMALL}
    found = {}
    for name in HYBRID:
        found[name, "empty ranks"] = losses_and_weights(make_model(name), executor, **whole)
        found[name, "branches"] = losses_and_weights(make_model(name), executor, branching)
    return found


def test_empty_ranks_and_branches_are_as_in_one_process():
    found = run_ranks(hybrid_cases, RANKS, timeout=280)[0]
    for name in HYBRID:
        check(found[name, "empty ranks"], alone(name, numbers=SMALL))
        check(found[name, "branches"], alone(name, branching))

"""The benchmark of peers: dyncp and torch's own context parallelism give dense attention."""

import pytest
from benchmarks.peers import METHODS, dense, inputs_of, row_of, with_dyncp

from processes import run_ranks


def a_little_wrong(data):
    part = with_dyncp(data)
    return part._replace(values=[x * 1.0001 for x in part.values])


def lines_of_rank(rank):
    METHODS["wrong"] = a_little_wrong
    data = inputs_of([70, 9, 25], kv_heads=2)
    names = ("dyncp", "torch all-gather", "torch all-to-all", "wrong", "ring-flash-attn")
    return [row_of(name, data, dense(data)) for name in names]


def test_peers_that_run_here_agree_with_dense_attention_and_others_say_why_not():
    *lines, wrong, missing = run_ranks(lines_of_rank, 2, timeout=100)[0]
    assert all(good for _, good in lines), lines
    of_torch = [float(line.split()[2]) for line, _ in lines[1:]]
    keys_and_values = 2 * 4 * 56 * 8 * 32 / 1e6  # of a rank's 52 rows, and 4 that pad documents
    assert of_torch == pytest.approx([4 * keys_and_values] * 2, rel=0.1)  # 1 forward, 3 backward
    assert not wrong[1]
    assert "does not run" in missing[0]

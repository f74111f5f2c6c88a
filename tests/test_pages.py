"""The code of pages that stand by themselves runs."""

import re
from pathlib import Path

import pytest
import torch
from benchmarks.planted_errors import ERRORS

from dyncp import Batch, DCPExecutor, PlannerConfig, Topology, masks, plan_batch

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page):
    text = (DOCS / page).read_text()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        yield compile(block, f"{page}, block {number}", "exec")


def test_the_tutorial_shows_what_it_prints(capsys):
    names = {}
    for block in blocks_of("tutorial.md"):
        exec(block, names)
        printed = capsys.readouterr().out
        assert printed in (DOCS / "tutorial.md").read_text(), printed
    assert names["step"].transport.bytes_sent == 200


def test_the_migration_page_runs():
    names = {}
    for block in blocks_of("migration.md"):
        exec(block, names)
    assert [len(document) for document in names["documents"]] == names["lengths"]
    q, k, v = names["q"], names["k"], names["v"]
    swapped = names["sdpa"](*(x.transpose(0, 1)[None] for x in (q, k, v)))
    assert swapped[0].transpose(0, 1) == pytest.approx(names["out"])


def test_the_page_of_hybrid_models_runs():
    batch = Batch.of([masks.causal(30), masks.document_packed(12, documents=[5, 7])])
    config = PlannerConfig(solver="random", block_size=4)
    step = DCPExecutor(virtual_ranks=3).prepare(plan_batch(batch, Topology(1, 3), planner=config))
    x, seen = step.shard(torch.arange(42.0)), []

    def layer(rows, cu_seqlens):
        seen.append(cu_seqlens.tolist())
        return rows + 1

    for block in blocks_of("hybrid_models.md"):
        names = {"step": step, "x": x, "conv": layer, "scan": layer}
        exec(block, names)
        assert torch.equal(names["y"], x + 1)
    assert [len(borders) for borders in seen] == [len(step.halo(3).lengths) + 1, 4]


def test_every_cell_of_the_support_page_has_a_test():
    text = (DOCS / "support.md").read_text()
    tables, tests = text.split("## The tests")
    listed = dict(re.findall(r"^\| (\w) \| (.*) \|$", tests, re.MULTILINE))
    cells = re.findall(r"\b(?:yes|refused) (\w)\b", tables) + re.findall(r"\((\w)\)", tables)
    assert set(cells) == set(listed)
    for names in listed.values():
        for name in re.findall(r"`(.*?)`", names):
            path, _, function = name.partition("::")
            source = (DOCS.parent / path).read_text()
            assert not function or f"def {function}(" in source, name


def test_every_silent_error_can_still_be_planted():
    """`python -m benchmarks.planted` plants them, and runs the tests that notice."""
    for error in ERRORS:
        assert error.before in (DOCS.parent / error.file).read_text(), error.name
        assert (DOCS.parent / error.tests).exists(), error.name

"""What planning needs is estimated beforehand, and refused if there is not as much."""

import tracemalloc

import numpy as np
import pytest

from dyncp import Batch, PlannerConfig, Topology, masks, plan_batch
from dyncp.checks import available_memory
from dyncp.cli import main
from dyncp.planner.memory import count_tiles, plan_bytes
from dyncp.planner.process import PlanFailed, PlanHere

BATCH = Batch.of([masks.causal(30000)])
SMALL_BLOCKS = PlannerConfig(block_size=10)


@pytest.fixture
def little_memory(monkeypatch):
    monkeypatch.setattr("dyncp.checks.available_memory", lambda: 100_000_000)


def peak(make):
    tracemalloc.start()
    try:
        make()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tiles_of(batch: Batch, size: int) -> float:
    sizes = np.full(len(batch.lengths), size)
    return count_tiles(batch, sizes, -(-np.asarray(batch.lengths) // sizes))


@pytest.mark.parametrize("solver", ["zigzag", "owner_computes"])
def test_the_estimate_is_near_what_a_plan_takes(solver):
    config = PlannerConfig(solver, block_size=60)
    plan_batch(BATCH, Topology(4, 8), planner=config)  # compiles
    taken = peak(lambda: plan_batch(BATCH, Topology(4, 8), planner=config))
    assert 0.6 < plan_bytes(tiles_of(BATCH, 60), 500, 32) / taken < 2.5


@pytest.mark.parametrize(
    "mask", [masks.causal, masks.full, masks.lambda_shaped(window=500), masks.sliding_window]
)
def test_tiles_are_counted_without_making_them(mask):
    batch = Batch.of([mask(9000), mask(700)])
    plan = plan_batch(batch, Topology(1, 2), planner=PlannerConfig("zigzag", block_size=40))
    made = sum(len(part.masks["default"].tiles) for part in plan.parts)
    assert 0.9 < tiles_of(batch, 40) / made < 1.3


@pytest.mark.usefixtures("little_memory")
def test_a_mask_that_needs_more_than_there_is_is_not_begun():
    for mask, needed in ((masks.causal, "50 GB"), (masks.lambda_shaped, "101 GB")):
        with pytest.raises(MemoryError, match=f"2,100,000,000 tokens would need about {needed}"):
            mask(2_100_000_000)
    tokens = 2**20
    assert 0.7 < 24 * tokens / peak(lambda: masks.causal(tokens)) < 1.3


@pytest.mark.usefixtures("little_memory")
def test_a_plan_that_needs_more_than_there_is_is_not_begun():
    with pytest.raises(MemoryError, match=r"in 3,000 blocks .* are available; use larger blocks"):
        plan_batch(BATCH, Topology(4, 8), planner=SMALL_BLOCKS)
    with pytest.raises(PlanFailed, match="MemoryError: a plan of 30,000 tokens in 3,000 blocks"):
        PlanHere().plan(lambda: plan_batch(BATCH, Topology(4, 8), planner=SMALL_BLOCKS))


@pytest.mark.usefixtures("little_memory")
def test_solvers_that_need_less_are_tried_instead(caplog):
    """The static method cuts every sequence into 128 blocks, others leave most of them whole."""
    batch = Batch.of([masks.causal(128)] * 400)
    plan = plan_batch(batch, Topology(8, 8), planner=PlannerConfig("zigzag/cp64"))
    assert plan.parts[0].solver != "zigzag/cp64"
    assert "solver zigzag/cp64 failed (MemoryError: a plan of" in caplog.text


@pytest.mark.usefixtures("little_memory")
def test_commands_say_so_in_one_line(capsys):
    for words in (
        ["plan", "--lengths", str(2**31 - 1)],
        ["plan", "--lengths", "300000", "--block-size", "1"],
        ["simulate", "--sample", "ldc:0", "--tokens", str(2**31 - 1), "--batches", "1"],
        ["masks", "causal", "--length", str(2**31 - 1)],
        ["masks", "causal", "--length", str(2**20), "--json"],
    ):
        assert main(words) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("dyncp: error: there is not enough memory: ")
        assert "0.1 GB are available; " in line


def test_the_machine_says_how_much_is_left():
    left = available_memory()
    assert left is None or 10**6 < left < 10**15


def test_masks_are_checked_by_their_kind(monkeypatch):
    """With the check at a small length, so that nothing large is made if it is missing."""
    monkeypatch.setattr("dyncp.checks.available_memory", lambda: 0)
    monkeypatch.setattr("dyncp.masks.function.LARGE", 1000)
    assert masks.causal(999).length == 999
    for mask in (masks.causal, masks.causal & masks.sliding_window, masks.by_name("lambda_shaped")):
        with pytest.raises(MemoryError, match=r"mask .* of 1,000 tokens would need"):
            mask(1000)

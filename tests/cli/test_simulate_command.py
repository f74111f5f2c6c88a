"""`dyncp simulate`: its numbers are those of single plans, and its verdict follows from them."""

import json
from itertools import pairwise
from typing import Any

import pytest

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.cli import main
from dyncp.cli.simulate import OURS, STATIC_METHODS, pack_documents, summarise, verdict
from dyncp.cost import CostModel, find_profile
from dyncp.placement import Limits, static_candidates
from dyncp.planner import PlannerConfig, plan_with
from dyncp.samplers import sample_lengths
from dyncp.simulate import simulate_plan
from dyncp.topology import preset

CLUSTER = ["--nodes", "2", "--ranks-per-node", "2"]
SMALL = [*CLUSTER, "--tokens", "4096", "--batches", "2"]


def run_json(capsys, *words: str) -> dict[str, Any]:
    assert main(["simulate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_method_stands_beside_ours_with_all_promised_numbers(capsys):
    result = run_json(capsys, "--sample", "ldc_x0.5:3", *SMALL)
    assert set(result["methods"]) == {OURS, *STATIC_METHODS}
    assert next(iter(result["methods"])) == OURS
    for numbers in result["methods"].values():
        for field in ("step_seconds", "compute_max_over_mean", "tokens_max_over_mean"):
            assert 0 < numbers[field]["mean"] <= numbers[field]["worst"]
        assert numbers["ratio_to_ideal"] >= 1
        assert numbers["inter_node_bytes"] <= numbers["forward_bytes"]
        assert numbers["peak_workspace_bytes"] > 0
        assert sum(numbers["solvers"].values()) == 2
        assert sum(numbers["parts"].values()) == pytest.approx(numbers["step_seconds"]["mean"])
    wins = result["wins"]
    assert wins["faster"] + wins["equal"] + wins["slower"] == result["num_batches"] == 2
    assert result["verdict"].startswith(("Use dyncp: ", "Not worth it: "))


def test_a_static_method_has_the_best_split_of_each_batch(capsys):
    """Checked by planning and simulating all splits again, through lowered plans."""
    words = ["--sample", "ldc:5", *SMALL, "--methods", "zigzag,magi", "--attention-only"]
    result = run_json(capsys, *words)
    topology, shape = preset("p4de", 2, 2), AttentionShape(8, 2, 128, "bf16")
    cost, config = CostModel(find_profile("p4de"), shape), PlannerConfig(limits=Limits(0.1, 0.2))
    for index, shown in enumerate(result["batches"]):
        lengths = sample_lengths("ldc", 4096, 5 + index)
        assert shown["lengths"] == lengths
        batch = Batch.of([masks.causal(n) for n in lengths])
        for method in ("zigzag", "magi"):
            plans = [
                plan_with(solver, batch, topology, shape, config)
                for solver in static_candidates(lengths, shape, topology, [method])
            ]
            steps = [simulate_plan(plan, topology, cost).step_seconds for plan in plans]
            best = plans[steps.index(min(steps))]
            given = shown["methods"][method]
            assert given["step_seconds"] == pytest.approx(min(steps))
            assert given["solver"] == best.parts[0].solver
            assert given["forward_bytes"] == best.parts[0].declared_bytes["default"][0]
            assert given["workspace_bytes"] == best.memory().peak


def test_means_and_worst_cases_are_those_of_the_batches(capsys):
    result = run_json(capsys, "--sample", "ldc:0", *SMALL, "--methods", "ring")
    for name, numbers in result["methods"].items():
        steps = [batch["methods"][name]["step_seconds"] for batch in result["batches"]]
        assert numbers["step_seconds"]["worst"] == max(steps)
        assert numbers["step_seconds"]["mean"] == pytest.approx(sum(steps) / 2)


def test_auto_is_never_slower_than_a_static_method(capsys):
    result = run_json(capsys, "--sample", "longalign:0", *SMALL, "--solver", "auto")
    assert result["wins"]["slower"] == 0


def test_slower_links_and_ranks_make_slower_steps(capsys):
    words = ["--sample", "ldc:0", *SMALL, "--methods", "ring"]
    plain = run_json(capsys, *words)["methods"]
    for change in (["--bandwidth", "0.1"], ["--latency", "20"], ["--jitter", "0.3"]):
        slowed = run_json(capsys, *words, *change)["methods"]
        for name in plain:
            assert slowed[name]["step_seconds"]["mean"] > plain[name]["step_seconds"]["mean"]


def test_a_model_adds_per_token_work(capsys):
    words = ["--sample", "ldc:0", *SMALL, "--methods", "zigzag"]
    parts = run_json(capsys, *words, "--model", "llama3-8b")["methods"][OURS]["parts"]
    assert parts["token_seconds"] > parts["kernel_seconds"] > 0
    alone = run_json(capsys, *words, "--attention-only")["methods"][OURS]["parts"]
    assert alone["token_seconds"] == 0
    assumed = run_json(capsys, *words)["methods"][OURS]["parts"]
    assert parts["token_seconds"] > assumed["token_seconds"] > 0


def test_documents_of_a_file_are_packed_in_order(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("500\n300\n400\n400\n700\n200\n")
    words = ["--lengths-file", str(path), "--tokens", "800", *CLUSTER, "--methods", "zigzag"]
    batches = run_json(capsys, *words)["batches"]
    assert [batch["lengths"] for batch in batches] == [[500, 300], [400, 400], [700], [200]]
    assert len(run_json(capsys, *words, "--batches", "3")["batches"]) == 3


def test_packing_loses_and_overfills_nothing():
    lengths = sample_lengths("training_documents", 60_000, 1)
    batches = pack_documents(lengths, max(lengths) + 100, "a file")
    assert [length for batch in batches for length in batch] == lengths
    for batch, following in pairwise(batches):
        assert sum(batch) <= max(lengths) + 100 < sum(batch) + following[0]


def test_the_text_has_a_line_per_method_and_ends_with_the_verdict(capsys):
    assert main(["simulate", "--sample", "ldc:0", *SMALL]) == 0
    output = capsys.readouterr()
    lines = output.out.strip().splitlines()
    assert "2 batches of 4,096 tokens (ldc, seed 0 to 1), mask causal" in lines[0]
    for name in (OURS, *STATIC_METHODS):
        assert sum(line.startswith(f"{name} ") for line in lines[4:16]) == 1
    assert lines[-1].startswith(("Use dyncp: ", "Not worth it: "))
    assert "batch 1 of 2" in output.err


def outcome(kernel: float, exposed: float, tokens: float = 0.0, **changes: Any) -> dict[str, Any]:
    seconds = {"kernel_seconds": kernel, "exposed_seconds": exposed, "token_seconds": tokens}
    return seconds | {
        "traffic_seconds": 0.0, "own_code_seconds": None,
        "solver": "bisection", "static": False, "step_seconds": kernel + exposed + tokens,
        "ideal_seconds": 0.010, "forward_bytes": 100, "inter_node_bytes": 50,
        "compute_max_over_mean": 1.1, "tokens_max_over_mean": 1.05, "workspace_bytes": 7,
    } | changes  # fmt: skip


def verdict_of(*batches: tuple[dict, dict], solver: str = "bisection") -> str:
    return verdict(summarise([{OURS: ours, "magi": magi} for ours, magi in batches]), solver)


def test_a_clear_gain_is_recommended_with_its_reason():
    pair = outcome(0.012, 0.001), outcome(0.012, 0.008)
    assert verdict_of(pair, pair) == (
        "Use dyncp: on these 2 batches a step takes 13.0 ms, 1.54× faster than the best static "
        "method (magi, 20.0 ms), and it was never slower than any of them. Most of the difference "
        "is exposed communication and waiting: 1.00 ms instead of 8.00 ms. What is left is 92 % "
        "attention kernels, 8 % exposed communication and waiting; the step is 30.0 % above the "
        "ideal."
    )


def test_batches_that_are_lost_are_said_beside_the_gain():
    text = verdict_of(
        (outcome(0.010, 0), outcome(0.020, 0)), (outcome(0.011, 0), outcome(0.010, 0))
    )
    assert "although in 1 of 2 batches one of them is faster (at most 1.10×)" in text


def test_a_small_gain_is_not_worth_it_and_the_parts_of_the_step_are_named():
    text = verdict_of((outcome(0.010, 0.001, 0.089), outcome(0.010, 0.002, 0.089)))
    assert text == (
        "Not worth it: on this batch a step takes 100.0 ms, and the best static method (magi, "
        "101.0 ms) is within 2 %. A step is 89 % per-token work, 10 % attention kernels, 1 % "
        "exposed communication and waiting; the step is 900.0 % above the ideal."
    )


def test_a_loss_names_its_cause_and_the_search():
    pair = outcome(0.010, 0.010), outcome(0.012, 0.001)
    cause = "exposed communication and waiting: 1.00 ms instead of 10.0 ms"
    assert f"1.54× faster. Most of the difference is {cause}" in verdict_of(pair)
    assert verdict_of(pair).endswith("--solver auto uses the best of both in every batch.")
    static = outcome(0.012, 0.001, solver="magi/cp2", static=True)
    chosen = verdict_of((static, static), (static, static), solver="auto")
    assert chosen.endswith("The planner itself chose a static method in 2 of 2 batches.")


def test_what_remains_on_other_clusters_is_said(capsys):
    words = ["--sample", "ldc:0", *SMALL, "--methods", "zigzag,magi"]
    found = run_json(capsys, *words)["surviving"]
    assert "half the bandwidths" in found
    assert all(0 < at["least"] <= at["mean"] for at in found.values())
    assert main(["simulate", *words]) == 0
    said = capsys.readouterr().out
    at = found["half the bandwidths"]
    assert f"half the bandwidths {at['mean']:.2f} ({at['least']:.2f})" in said

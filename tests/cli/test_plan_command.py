"""`dyncp plan`: numbers that can be checked independently."""

import json

from dyncp import Batch, masks
from dyncp.cli import main
from dyncp.plan import load_plan
from dyncp.planner import PERTURBATIONS

SMALL = ["--nodes", "2", "--ranks-per-node", "2", "--solver", "bisection"]


def run_json(capsys, *words: str) -> dict:
    assert main(["plan", *words, *SMALL, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_object_has_all_promised_numbers(capsys):
    result = run_json(capsys, "--lengths", "3000,700,500,300")
    assert set(result["cpu_seconds"]) == {"blocks", "placement", "schedule", "assemble", "total"}
    for direction in ("forward", "backward"):
        assert set(result[direction]) == {
            "bytes", "inter_node_bytes", "max_rank_send_bytes", "max_rank_recv_bytes",
            "divisions",
        }  # fmt: skip
        assert result[direction]["inter_node_bytes"] <= result[direction]["bytes"]
    assert result["compute_max_over_mean"] <= 1.1
    assert result["tokens_max_over_mean"] <= 1.2
    assert result["peak_workspace_bytes"] > 0
    times = result["simulated"]
    assert times["step_seconds"] >= times["ideal_seconds"] > 0


def test_a_dumped_placement_adds_up(capsys, tmp_path):
    path = tmp_path / "placement.json"
    result = run_json(capsys, "--lengths", "1000,300", "--dump-placement", str(path))
    dump = json.loads(path.read_text())
    assert len(dump["blocks"]) == result["num_blocks"]
    assert len(dump["tiles"]) == result["num_tiles"]
    assert sum(end - start for _, start, end, _ in dump["blocks"]) == 1300
    pairs = sum(tile[5] for tile in dump["tiles"])
    assert pairs == masks.causal(1000).num_pairs + masks.causal(300).num_pairs
    assert all(0 <= tile[3] < 4 for tile in dump["tiles"])


def test_a_saved_plan_can_be_read_back(capsys, tmp_path):
    path = tmp_path / "batch.plan"
    run_json(capsys, "--lengths", "1000,300", "--mask", "lambda_shaped", "--save", str(path))
    plan, batch = load_plan(path)
    assert plan.num_ranks == 4
    assert batch == Batch.of([masks.lambda_shaped(1000), masks.lambda_shaped(300)])
    assert plan.fingerprint == batch.fingerprint


def test_baselines_stand_beside_the_plan(capsys):
    result = run_json(capsys, "--lengths", "2000,900,600,500", "--compare")
    assert result["surviving"].keys() == PERTURBATIONS.keys()
    assert all(ratio > 0 for ratio in result["surviving"].values())
    assert {"zigzag/cp4", "ring/cp2", "all_gather/cp4"} <= set(result["baselines"])
    assert result["baselines"]["zigzag/cp4"]["forward"]["bytes"] > result["forward"]["bytes"]


def test_with_a_model_tokens_are_levelled_because_they_cost_time(capsys):
    assert main(["plan", "--sample", "ldc:0", "--model", "llama3-8b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens_max_over_mean"] <= 1.05


def test_samples_and_files_give_lengths(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("512\n256\n")
    assert run_json(capsys, "--lengths-file", str(path))["num_blocks"] >= 2
    assert run_json(capsys, "--sample", "ldc:1", "--tokens", "8192")["num_tiles"] > 0


def test_a_tolerance_that_nothing_meets_is_said_not_refused(capsys):
    words = ["--lengths", "101,7", "--block-size", "64", "--compute-tolerance", "0"]
    assert main(["plan", *words, "--token-tolerance", "0", *SMALL]) == 0
    reason = [line for line in capsys.readouterr().out.splitlines() if line.startswith("balance:")]
    assert len(reason) == 1
    assert "compute max/mean is" in reason[0]
    assert "over the limit of 1.000" in reason[0]


def test_a_file_that_cannot_be_written_is_one_line(capsys, tmp_path):
    for option in ("--save", "--dump-placement"):
        path = tmp_path / "no" / "such" / "folder.plan"
        assert main(["plan", "--lengths", "100", *SMALL, option, str(path)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("dyncp: error: ")
        assert f"{option} is {path}; the folder {path.parent} does not exist" in error


def test_objective_effort_and_head_groups_are_choices(capsys):
    words = ["plan", "--lengths", "9000,3000,700", "--nodes", "2", "--ranks-per-node", "2"]
    found = {}
    for objective in ("time", "bytes"):
        options = ["--objective", objective, "--head-groups", "auto", "--effort", "fast", "--json"]
        assert main([*words, *options]) == 0
        found[objective] = json.loads(capsys.readouterr().out)
    assert found["bytes"]["solver"] == "bisection_bytes"
    moved = {name: one["forward"]["bytes"] for name, one in found.items()}
    steps = {name: one["simulated"]["step_seconds"] for name, one in found.items()}
    assert moved["bytes"] <= moved["time"]
    assert steps["time"] <= steps["bytes"]
    assert "ruled out by their bounds" in found["time"]["why"]

"""`dyncp calibrate`: what it writes is a profile that planner and simulator take."""

import json
from pathlib import Path

import pytest

from dyncp.cli import main
from dyncp.cost import find_profile, load_profile
from torchrun import run_under_torchrun

SMALL = ["--device", "cpu", "--sizes", "32,64,256", "--masks", "causal,full", "--repeats", "3"]


def test_the_profile_is_measured_and_taken_by_plan_and_simulate(capsys, tmp_path: Path):
    path = tmp_path / "mine.json"
    assert main(["calibrate", *SMALL, "--save", str(path), "--name", "mine", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    profile, base = load_profile(path), find_profile("cpu_gloo")
    assert profile.name == "mine"
    assert profile.attention_forward == pytest.approx(found["rates"]["forward"])
    assert profile.dense != base.dense
    assert profile.overlap_slowdown >= 1
    assert (profile.intra, profile.inter) == (base.intra, base.inter)  # one rank has no links
    assert len(found["samples"]) == 2 * 3 * 2  # masks, sizes, directions

    cluster = ["--profile", str(path), "--nodes", "1", "--ranks-per-node", "2"]
    assert main(["plan", "--lengths", "500,100", *cluster, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["simulated"]
    area = (500 * 501 + 100 * 101) / 2  # causal pairs
    least = 4 * area * 128 * 8 / profile.attention_forward / 2
    assert planned["forward_seconds"] > least
    batches = ["--sample", "ldc:0", "--tokens", "1000", "--batches", "1", "--methods", "ring"]
    assert main(["simulate", *batches, *cluster]) == 0
    assert "mine, 1 × 2 ranks" in capsys.readouterr().out


def test_the_table_stands_beside_the_preset(capsys, tmp_path: Path):
    assert main(["calibrate", *SMALL, "--save", str(tmp_path / "mine.json")]) == 0
    out = capsys.readouterr().out
    assert "attention forward, TFLOP/s" in out
    assert "not measured" in out
    assert f"--profile {tmp_path / 'mine.json'}" in out


def test_links_are_measured_between_real_ranks(tmp_path: Path):
    path = tmp_path / "mine.json"
    done = run_under_torchrun(["calibrate", *SMALL, "--save", str(path), "--json"])
    assert done.returncode == 0, done.stderr
    found, profile = json.loads(done.stdout), load_profile(path)
    assert found["inter"] is None
    assert profile.intra.bandwidth == found["intra"]["link"]["bandwidth"]
    assert 1e6 < profile.intra.bandwidth < 1e12
    assert profile.ranks_per_node == 2
    assert [overlap["kind"] for overlap in found["overlaps"]] == ["link", "thread"]
    assert profile.overlap_slowdown == found["overlaps"][0]["slowdown"]
    assert found["all_gather_bytes_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "/no/such/folder/mine.json"], "the folder /no/such/folder does not exist"),
        (["--base", "moon"], "profile is 'moon'; choose one of p4de"),
        (["--masks", "crooked"], "mask is 'crooked'; choose from causal"),
        (["--sizes", "few"], "--sizes is 'few'; expected positive integers"),
        (["--device", "abacus"], "device is 'abacus'; choose cpu or cuda"),
    ],
)
def test_mistakes_are_one_line_with_the_choices(capsys, words, message):
    assert main(["calibrate", *words]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert message in output.err

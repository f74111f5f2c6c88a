"""`dyncp calibrate`: what it writes is a profile that planner and simulator take."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dyncp.calibrate import calibration
from dyncp.cli import main
from dyncp.cost import find_profile, load_profile
from torchrun import run_under_torchrun

SMALL = ["--device", "cpu", "--sizes", "32,64,256", "--masks", "causal,full", "--repeats", "3"]
SMALL += ["--accept-poor-fit"]  # of tiny calls on a machine that runs other tests


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


PLAIN = SMALL[:-1]


@pytest.fixture
def timed(monkeypatch):
    """Timings that are work × a rate, most of them longer by the next of these factors."""
    factors: list[float] = []
    measured = calibration.sample_attention
    made: list[int] = []
    # What links and copies take here is not the subject.
    monkeypatch.setattr(calibration, "_overlaps", lambda *_: [calibration.Overlap("thread", 1, 1)])

    def sample(*arguments):
        samples, calls = measured(*arguments)
        noise = np.random.default_rng(len(made)).uniform(-1, 1, len(samples))
        factor = factors[min(len(made), len(factors) - 1)]
        made.append(1)
        seconds = [1e-5 + 1e-9 * s.area * (1 + (s.direction == "backward")) for s in samples]
        found = zip(samples, seconds, noise, strict=True)
        return [
            replace(s, edge=0.0, seconds=x * (1 + factor * (y > -0.8))) for s, x, y in found
        ], calls

    monkeypatch.setattr(calibration, "sample_attention", sample)
    return factors, made


def calibrated(tmp_path: Path, *words: str) -> tuple[int, Path]:
    path = tmp_path / "mine.json"
    return main(["calibrate", *PLAIN, *words, "--save", str(path)]), path


def test_a_good_fit_is_measured_once_and_written(timed, tmp_path: Path, caplog):
    factors, made = timed
    factors += [0.05]
    code, path = calibrated(tmp_path)
    assert (code, len(made)) == (0, 1)
    assert 0 < load_profile(path).fit_error < 0.1
    assert "mean error" not in caplog.text


def test_a_poor_fit_is_measured_again_and_the_shorter_times_count(timed, tmp_path: Path):
    factors, made = timed
    factors += [20.0, 0.0]
    code, path = calibrated(tmp_path)
    assert (code, len(made)) == (0, 2)
    assert load_profile(path).fit_error < 0.05


def test_a_fit_that_stays_poor_is_not_written_and_a_busy_machine_is_named(
    timed, tmp_path: Path, capsys
):
    factors, made = timed
    factors += [20.0]
    code, path = calibrated(tmp_path)
    assert (code, len(made), path.exists()) == (2, 3, False)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the fit is off in the mean by" in error
    assert "the machine is busy. Stop other programs" in error
    assert "write this profile with --accept-poor-fit" in error


def test_a_poor_fit_that_is_accepted_is_told_by_every_command_that_uses_it(
    timed, tmp_path: Path, capsys, caplog
):
    factors, _ = timed
    factors += [20.0]
    code, path = calibrated(tmp_path, "--accept-poor-fit")
    assert code == 0
    assert "warning: the fit is off in the mean by" in capsys.readouterr().err
    assert load_profile(path).fit_error > 0.45
    caplog.clear()
    assert main(["plan", "--lengths", "500", "--profile", str(path)]) == 0
    assert caplog.text.count("was fitted with a mean error of") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "/no/such/folder/mine.json"], "the folder /no/such/folder does not exist"),
        (["--base", "moon"], "profile is 'moon'; choose one of p4de"),
        (["--save", "."], "--save is ., which is a folder; give the name of a file in it"),
        (["--save", "a.json", "--raw", "./a.json"], "--save and --raw are both a.json"),
        (["--raw", "x" * 5000], "File name too long"),
        (["--masks", ""], "--masks is ''; at least one name is needed"),
        (["--masks", ","], "--masks is ','; at least one name is needed"),
        (["--device", "cpu", "--sizes", ""], "--sizes is ''; expected positive integers"),
        (["--device", "cpu", "--base", ""], "profile is ''; choose one of p4de"),
        (["--device", "cpu", "--kernel", "magic"], "kernel is 'magic'; choose"),
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

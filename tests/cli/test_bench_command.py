"""`dyncp bench`: real measurements of tiny sizes, on virtual and on real ranks."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dyncp
from dyncp.cli import build_parser, main
from sizes import full, pick
from torchrun import run_under_torchrun

SHAPE = ["--q-heads", "2", "--kv-heads", "1", "--head-dim", "16"]
KERNELS = ["bench", "kernels", "--device", "cpu", "--repeats", "2", *SHAPE]
ATTENTION = ["bench", "attention", "--device", "cpu", "--repeats", "2", "--tokens", "600", *SHAPE]


def run(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("what", ["kernels", "attention", "layers"])
def test_each_bench_has_help_with_an_example(capsys, what):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", what, "--help"])
    assert stopped.value.code == 0
    assert f"\n  dyncp bench {what}" in capsys.readouterr().out.partition("example")[2]


def run_help(where: Path, folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """`dyncp COMMAND --help` with dyncp from `where`, in another folder."""
    return subprocess.run(
        [sys.executable, "-m", "dyncp", *command.split(), "--help"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(where)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "option"), [("bench kernels", "--baselines"), full("train", "--corpus")]
)
def test_commands_beside_the_source_are_found_from_any_folder(tmp_path, command, option):
    done = run_help(Path(dyncp.__file__).parents[1], tmp_path, command)
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


@pytest.mark.parametrize("command", ["bench kernels", full("train")])
def test_an_installed_package_says_where_these_commands_are(tmp_path, command):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "dyncp").symlink_to(Path(dyncp.__file__).parent)
    done = run_help(tmp_path / "lib", tmp_path, command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"dyncp: error: `dyncp {command}` is part of the source")
    assert done.stderr.count("\n") == 1


def test_kernels_stand_beside_each_other_with_speed_and_error(capsys):
    words = [*KERNELS, "--masks", "causal,lambda_shaped", "--lengths", "64,96", "--check", "all"]
    found = json.loads(run(capsys, *words, "--json"))
    ran = [row for row in found["rows"] if row["forward"]]
    assert {row["implementation"] for row in ran} == {"cpu", "sdpa_flash", "sdpa_mask"}
    assert {(row["mask"], row["tokens"]) for row in ran if row["implementation"] == "cpu"} == {
        (mask, tokens) for mask in ("causal", "lambda_shaped") for tokens in (64, 96)
    }
    for row in ran:
        assert max(row["errors"].values()) < 1e-5
        for direction, factor in (("forward", 1.0), ("backward", 2.5)):
            measured = row[direction]
            flops = factor * 4 * row["pairs"] * 16 * 2
            assert measured["flops"] == pytest.approx(flops / measured["seconds"])
            assert measured["kernel_seconds"] is None  # no GPU
    missing = {row["implementation"]: row["reason"] for row in found["rows"] if not row["forward"]}
    assert "no backward on CPUs" in missing["flex"]


def test_the_table_says_what_could_not_run(capsys):
    out = run(capsys, *KERNELS, "--masks", "causal", "--lengths", "64", "--kernels", "cpu,abacus")
    lines = out.splitlines()
    assert any(line.startswith("causal") and " cpu " in line for line in lines)
    assert any(line.startswith("abacus did not run: ") for line in lines)
    assert "flash_attn_4 did not run: flash-attn-4 runs on CUDA GPUs only" in lines


def test_virtual_ranks_are_measured_and_predicted(capsys):
    words = [*ATTENTION, "--virtual-ranks", "4", "--ranks-per-node", "2"]
    found = json.loads(run(capsys, *words, "--methods", "auto,zigzag", "--json"))
    assert set(found["methods"]) == {"auto", "zigzag"}
    assert (found["nodes"], found["ranks_per_node"], found["virtual"]) == (2, 2, True)
    for method in found["methods"].values():
        for direction in ("forward", "backward"):
            ranks = method["ranks"][direction]
            assert [row["rank"] for row in ranks] == [0, 1, 2, 3]
            assert sum(row["pairs"] for row in ranks) == found["alone"]["pairs"]
            divisions = method["divisions"][direction]
            measured = sum(row["measured_seconds"] for row in divisions)
            assert measured == pytest.approx(sum(row["kernel_seconds"] for row in ranks))
            slowest = max(row["kernel_seconds"] for row in ranks)
            assert method["with_measured_kernels"][f"{direction}_seconds"] >= slowest
            busy = [row for row in ranks if row["pairs"]]
            assert all(row["predicted_call_seconds"] > 0 < row["call_seconds"] for row in busy)
            summary = method["summary"][direction]
            assert summary["call_prediction_error"]["mean"] >= 0
            assert all(row["over_alone"] > 0 and row["call_over_alone"] > 0 for row in busy)


def test_the_attention_table_has_a_line_per_method_and_direction(capsys, tmp_path):
    words = ["--virtual-ranks", "2", "--methods", "zigzag", "--raw", str(tmp_path / "raw.json")]
    out = run(capsys, *ATTENTION, *words)
    assert "kernel auto (cpu)" in out
    assert set(json.loads((tmp_path / "raw.json").read_text())["methods"]) == {"zigzag"}
    assert "the whole batch on one rank, backward: kernels" in out
    assert sum(line.startswith("zigzag") for line in out.splitlines()) == 2
    assert "predicted − measured" in out


SAMPLES = pick(["uniform:40"], ["ldc_x0.05:0", "uniform:40"])
MASKS = pick(["lambda_shaped"], ["causal", "lambda_shaped"])
LAYERS = [
    *("bench", "layers", "--device", "cpu", "--repeats", "2", "--tokens", "1200"),
    *("--layers", "1", "--sample", ",".join(SAMPLES), "--masks", ",".join(MASKS)),
]


def test_layers_are_measured_with_our_attention_plain_attention_and_none(capsys, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 9, "num_attention_heads": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes | {"intermediate_size": 48, "vocab_size": 99}))
    words = [*LAYERS, "--model", str(config), "--rank", "1,3", "--kernel", "cpu", "--graphs", "off"]
    found = json.loads(run(capsys, *words, "--json"))
    assert found["shape"]["q_heads"] == found["shape"]["kv_heads"] == 2
    assert (found["model"]["hidden"], found["model"]["layers"]) == (32, 1)
    assert (found["nodes"], found["ranks_per_node"]) == (1, 4)
    assert [(row["sample"], row["mask"], row["rank"]) for row in found["rows"]] == [
        (sample, mask, rank) for sample in SAMPLES for mask in MASKS for rank in (1, 3)
    ]
    for row in found["rows"]:
        measured = row["attention"]
        assert [one["implementation"] for one in measured.values()] == ["dyncp", "sdpa", "none"]
        for one in measured.values():
            assert 0 < one["wall_seconds"] == one["host_seconds"]
            assert one["busy_share"] is one["kernels"] is one["kernel_seconds"] is None  # no GPU
            ratio = one["wall_seconds"] / measured["plain"]["wall_seconds"]
            assert one["wall_over_plain"] == pytest.approx(ratio)
    for group in found["summary"]:
        rows = [row for row in found["rows"] if row["sample"] == group["sample"]]
        rows = [row["attention"]["dyncp"] for row in rows if row["mask"] == group["mask"]]
        walls = [row["wall_seconds"] for row in rows]
        mean = pytest.approx(sum(walls) / 2)
        assert group["attention"]["dyncp"]["wall_seconds"] == {"worst": max(walls), "mean": mean}


def test_the_layers_table_has_three_lines_per_rank_and_worst_and_mean(capsys):
    out = run(capsys, *LAYERS, "--masks", "causal", "--rank", "0,2").splitlines()
    assert "kernel auto (cpu), graphs auto; 1 layers: hidden 256" in out[0]
    headings = ("wall ms", "busy", "host", "kernels", "kernel ms", "wall / kernel", "× plain")
    assert sum(all(heading in line for heading in headings) for line in out) == len(SAMPLES)
    for start, count in (
        ("rank 0 (requested", len(SAMPLES)),
        ("  sdpa: ", 2 * len(SAMPLES)),
        ("worst of", len(SAMPLES)),
        ("mean of", len(SAMPLES)),
    ):
        assert sum(line.startswith(start) for line in out) == count
    assert sum("no attention" in line for line in out) == 4 * len(SAMPLES)


def test_real_ranks_are_measured_beside_the_prediction():
    done = run_under_torchrun([*ATTENTION, "--methods", "auto,zigzag", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["virtual"] is False
    assert found["ranks_per_node"] == 2
    for method in found["methods"].values():
        for direction in ("forward", "backward"):
            measured = method["measured"][direction]
            assert len(measured["rank_seconds"]) == 2
            assert measured["seconds"] > 0 < method["predicted"][direction]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernels", "--masks", "crooked"], "mask is 'crooked'; choose from causal"),
        (["kernels", "--lengths", "12,x"], "--lengths is '12,x'; expected positive integers"),
        (["kernels", "--lengths", "0"], "--lengths is '0'; expected positive integers"),
        (["kernels", "--baselines", "best"], "baseline is 'best'; choose from sdpa_flash"),
        (["kernels", "--check", "some"], "check is 'some'; choose one of smallest, all, none"),
        (["kernels", "--repeats", "0"], "repeats are 0"),
        (["kernels", "--kernels", "cpu:slow"], "kernel is 'cpu:slow'; write NAME or"),
        (["kernels", "--device", "abacus"], "device is 'abacus'; choose cpu or cuda"),
        (["attention", "--methods", "best"], "method is 'best'; choose from auto, ring"),
        (["attention", "--virtual-ranks", "0"], "--virtual-ranks is 0; at least 1"),
        (["attention", "--ranks-per-node", "3"], "3, which does not divide the 4 virtual"),
        (["attention", "--profile", "/no/mine.json"], "profile /no/mine.json cannot be read"),
        (["attention", "--topology", "moon"], "profile is 'moon'; choose one of p4de"),
        (["attention", "--raw", "/no/folder/raw.json"], "the folder /no/folder does not exist"),
        (["attention", "--tokens", "0"], "--tokens is 0; at least 1 is needed"),
        (["attention", "--kernel", "abacus", "--tokens", "64"], "abacus"),
        (["layers", "--sample", "moon:1"], "length distribution is 'moon'; choose one of"),
        (["layers", "--masks", "crooked"], "there is no mask 'crooked'; choices: block_causal"),
        (["layers", "--masks", ""], "--masks is ''; at least one name is needed"),
        (["layers", "--rank", "one"], "--rank is 'one'; expected integers"),
        (["layers", "--rank", "9", "--tokens", "64"], "rank is 9; the plan has ranks 0 to 3"),
        (["layers", "--layers", "0", "--tokens", "64"], "layers is 0; at least 1 is needed"),
        (["layers", "--virtual-ranks", "0"], "--virtual-ranks is 0; at least 1"),
        (["layers", "--model", "gpt"], "model is 'gpt'; choose one of llama3_8b"),
        (["layers", "--kernel", "abacus", "--tokens", "64"], "abacus"),
    ],
)
def test_mistakes_are_one_line_with_the_choices(capsys, words, message):
    device = [] if "--device" in words else ["--device", "cpu"]
    assert main(["bench", *words, *device]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.strip().splitlines()[-1].startswith("dyncp: error: ")
    assert message in output.err


PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
SHOWN = [
    line.removeprefix("$ ").partition(" #")[0].strip()
    for line in PAGE.splitlines()
    if line.startswith(("$ dyncp ", "dyncp ", "torchrun "))
]


@pytest.mark.parametrize("line", SHOWN)
def test_documented_command_lines_are_understood(line):
    words = shlex.split(line)
    build_parser().parse_args(words[words.index("dyncp") + 1 :])

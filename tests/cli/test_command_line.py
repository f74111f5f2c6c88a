"""Help, errors and exit codes of all commands."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dyncp.cli import COMMANDS, build_parser, load_command, main


def run(capsys, *words):
    """Exit code, stdout and stderr of one command line."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"\n  dyncp {name}" in out.partition("example")[2]
    assert "==SUPPRESS==" not in out


def test_help_lists_all_commands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    text = " ".join(out.split())
    assert all(f"{name} {summary}" in text for name, summary in COMMANDS.items())


PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
SHOWN = [line[2:] for line in PAGE.splitlines() if line.startswith("$ dyncp ")]
EXAMPLES = [
    example for name in COMMANDS if name != "bench" for example in load_command(name).EXAMPLES
]


@pytest.mark.parametrize("line", SHOWN + EXAMPLES)
def test_documented_command_lines_are_understood(line):
    words = shlex.split(line)
    build_parser().parse_args(words[words.index("dyncp") + 1 :])


def test_the_page_shows_every_command():
    assert {line.split()[1] for line in SHOWN} == set(COMMANDS)


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("dyncp 0.")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "--mask", "crooked"], ["crooked", "causal", "lambda_shaped"]),
        (["train", "--solver", "magic"], ["magic", "uncut", "zigzag"]),
        (["train", "--device", "abacus"], ["abacus", "cpu", "cuda"]),
        (["train", "--steps", "0"], ["--steps is 0", "at least 1"]),
        (["train", "--tokens-per-batch", "100"], ["100", "--max-length 4096"]),
        (["train", "--ranks", "0"], ["--ranks is 0"]),
        (["train", "--virtual-ranks", "-1"], ["--virtual-ranks is -1"]),
        (["masks", "crooked"], ["crooked", "causal"]),
        (["masks", "sliding_window:width=3"], ["width", "window"]),
        (["masks", "causal", "--length", "0"], ["length of a sequence is 0"]),
        (["masks", "prefix_lm"], ["prefix="]),
    ],
)
def test_a_user_mistake_is_one_line_with_the_choices(capsys, words, expected):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert not out
    assert err.startswith("dyncp: error: ")
    assert err.count("\n") == 1
    assert all(text in err for text in expected)


def test_late_mistakes_end_with_one_line_too(capsys):
    for words in (["--kernel", "slow"], ["--corpus", "/no/such/folder"]):
        code, out, err = run(capsys, "train", *words, "--steps", "1")
        assert code == 2
        assert not out
        assert err.splitlines()[-1].startswith("dyncp: error: ")
        assert words[1] in err.splitlines()[-1]


def test_traceback_shows_where_an_error_was_raised(capsys):
    with pytest.raises(ValueError, match="crooked"):
        main(["--traceback", "masks", "crooked"])


def test_masks_draws(capsys):
    code, out, _ = run(capsys, "masks", "causal", "--length", "16")
    lines = out.splitlines()
    assert code == 0
    assert "16 tokens, 136 pairs" in lines[0]
    assert lines[1:] == ["█" * (i + 1) + "·" * (15 - i) for i in range(16)]


def test_masks_lists_all_masks(capsys):
    from dyncp.masks import ALIASES, BUILTIN

    code, out, _ = run(capsys, "masks")
    assert code == 0
    assert all(name in out for name in [*BUILTIN, *ALIASES])


def test_masks_speaks_json(capsys):
    _, out, _ = run(capsys, "masks", "sliding_window:window=2", "--length", "3", "--json")
    drawn = json.loads(out)
    assert drawn["pairs"] == 5
    assert drawn["ranges"] == [[[0, 1]], [[0, 2]], [[1, 3]]]
    _, out, _ = run(capsys, "masks", "--json")
    assert "causal" in [mask["name"] for mask in json.loads(out)["masks"]]


def test_the_module_runs_and_needs_no_torch_for_help():
    code = "import sys; sys.modules['torch'] = None; from dyncp.cli import main; main(['masks'])"
    for command in (["-m", "dyncp", "--version"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_a_closed_pipe_is_no_error():
    drawn = f"{sys.executable} -m dyncp masks causal --length 800 --width 800 | head -1"
    done = subprocess.run(
        ["bash", "-c", drawn], capture_output=True, text=True, timeout=60, check=False
    )
    assert "800 tokens" in done.stdout
    assert not done.stderr

"""Mistakes in what `plan` and `simulate` are given: one line with what was given and is allowed."""

import pytest

from dyncp.cli import main, plan

BATCH = ["--lengths", "12"]


def mistake(capsys, words: list[str]) -> str:
    """The error line of a command line that must fail without a result."""
    assert main(words) == 2
    output = capsys.readouterr()
    assert not output.out
    line = output.err.strip().splitlines()[-1]
    assert line.startswith("dyncp: error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*BATCH, "--mask", "magic"], "there is no mask 'magic'; choices: block_causal"),
        ([*BATCH, "--mask", "sliding_window:window=0"], "window"),
        ([*BATCH, "--solver", "best"], "solver is 'best'; choose one of bisection"),
        ([*BATCH, "--solver", "zigzag/cp5"], "5"),
        ([*BATCH, "--topology", "moon"], "profile is 'moon'; choose one of p4de"),
        ([*BATCH, "--model", "gpt-x"], "model is 'gpt-x'; choose one of llama3_8b"),
        ([*BATCH, "--model", "/no/config.json"], "/no/config.json cannot be read"),
        ([*BATCH, "--dtype", "int3"], "dtype is 'int3'; choose one of fp64, fp32, bf16, fp16"),
        ([*BATCH, "--nodes", "0"], "nodes is 0; at least 1"),
        ([*BATCH, "--ranks-per-node", "0"], "ranks_per_node is 0; at least 1"),
        ([*BATCH, "--q-heads", "0"], "q_heads is 0; at least 1"),
        ([*BATCH, "--kv-heads", "3"], "kv_heads=3 does not divide q_heads=8"),
        ([*BATCH, "--head-groups", "3"], "head_groups is 3; allowed are 1 to 2"),
        ([*BATCH, "--head-groups", "0"], "head_groups is 0; at least 1"),
        ([*BATCH, "--divisions", "1"], "divisions is 1; at least 2"),
        ([*BATCH, "--block-size", "0"], "block_size is 0; at least 1"),
        (
            [*BATCH, "--compute-tolerance", "-1"],
            "compute_tolerance is -1.0; must be a number of at least 0",
        ),
        (
            [*BATCH, "--token-tolerance", "-0.1"],
            "token_tolerance is -0.1; must be a number of at least 0",
        ),
        ([*BATCH, "--compute-tolerance", "nan"], "compute_tolerance is nan"),
        (["--sample", "nobody:1"], "length distribution is 'nobody'; choose one of training_doc"),
        (["--sample", "ldc:x"], "sample is 'ldc:x'; write NAME or NAME:SEED"),
        (["--sample", "ldc:0", "--tokens", "0"], "--tokens is 0; at least 1 is needed"),
        (["--lengths", "12,x"], "--lengths is '12,x'; expected positive integers, as in 1024"),
        (["--lengths", ""], "--lengths is ''; expected positive integers"),
        (["--lengths", "12,0"], "--lengths is '12,0'; expected positive integers"),
        (["--lengths", "-5"], "--lengths is '-5'; expected positive integers"),
        (["--lengths-file", "/no/lengths.txt"], "/no/lengths.txt cannot be read"),
        (["--lengths", str(2**31)], "the length of a sequence is 2147483648; at most"),
        (["--sample", "ldc:0", "--tokens", str(10**30)], "at most 2,147,483,647 is allowed"),
        ([*BATCH, "--head-dim", str(2**40)], "head_dim is 1099511627776; at most 16,384"),
        ([*BATCH, "--divisions", str(2**40)], "divisions is 1099511627776; at most 1,024"),
        ([*BATCH, "--block-size", str(2**40)], "block_size is 1099511627776; at most"),
        ([*BATCH, "--nodes", str(2**40)], "nodes is 1099511627776; at most 65,536"),
        ([*BATCH, "--model", "x" * 5000 + ".json"], "cannot be read: File name too long"),
        ([*BATCH, "--mask", "shared_question:answers=1" + "0" * 30], "answers is 1000"),
    ],
)
def test_plan_names_the_mistake_and_the_choices(capsys, words, message):
    assert message in mistake(capsys, ["plan", *words])


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\n\nlong\n7\n", "lengths.txt, line 3: 'long' is not a length; lengths must be"),
        ("12\n0\n", "lengths.txt, line 2: 0 is not a length"),
        ("12\n3.5\n", "lengths.txt, line 2: '3.5' is not a length"),
        ("[12, true]", "lengths.txt, entry 2: True is not a length"),
        ("[12,\n 7", "lengths.txt, line 2: not a JSON list"),
        ("", "lengths.txt has no lengths; at least one is needed"),
        ("\n \n", "lengths.txt has no lengths"),
        ("[]", "lengths.txt has no lengths"),
    ],
)
def test_a_junk_lengths_file_is_named_with_the_place(capsys, tmp_path, command, text, message):
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert message in mistake(capsys, [command, "--lengths-file", str(path)])


@pytest.mark.parametrize("option", ["--lengths-file", "--model", "--profile"])
def test_deeply_nested_json_is_refused(capsys, tmp_path, option):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    words = ["plan", option, str(path), *([] if option == "--lengths-file" else BATCH)]
    assert "deep.json" in (line := mistake(capsys, words))
    assert "nested too deeply" in line


def test_more_memory_than_there_is_is_one_line(capsys, monkeypatch):
    def too_large(_: object) -> int:
        raise MemoryError("Unable to allocate 16.0 GiB")

    monkeypatch.setattr(plan, "run", too_large)
    assert "there is not enough memory: Unable" in mistake(capsys, ["plan", *BATCH])


def test_a_lengths_file_that_is_no_text_is_refused(capsys, tmp_path):
    path = tmp_path / "lengths.bin"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert "lengths.bin is not text" in mistake(capsys, ["plan", "--lengths-file", str(path)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "1000000000"], "--batches is 1000000000; at most 100,000 is allowed"),
        (["--batches", "0"], "--batches is 0; at least 1 is needed"),
        (["--tokens", "-3"], "--tokens is -3; at least 1 is needed"),
        (["--methods", "zigzag,best"], "--methods names 'best'; choose from ring, zigzag"),
        (["--methods", ""], "--methods names ''; choose from ring, zigzag"),
        (["--bandwidth", "0"], "--bandwidth is 0.0; it must be positive"),
        (["--latency", "-1"], "--latency is -1.0; it must not be negative"),
        (["--jitter", "1"], "--jitter is 1.0; it must be at least 0 and below 1"),
        (["--solver", "best"], "solver is 'best'; choose one of bisection"),
        (["--mask", "magic"], "there is no mask 'magic'"),
        (["--topology", "moon"], "choose one of p4de"),
        (["--nodes", "0"], "nodes is 0"),
        (["--kv-heads", "3"], "kv_heads=3 does not divide q_heads=8"),
    ],
)
def test_simulate_names_the_mistake_and_the_choices(capsys, words, message):
    assert message in mistake(capsys, ["simulate", "--sample", "ldc:0", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save", "."], "--save is ., which is a folder; give the name of a file in it"),
        (["--save", ""], "--save is ., which is a folder"),
        (["--save", "/no/such/a.plan"], "the folder /no/such does not exist"),
        (["--save", "/dev/null/a.plan"], "the folder /dev/null does not exist"),
        (["--dump-placement", "."], "--dump-placement is ., which is a folder"),
        (["--dump-placement", "y" * 400], "File name too long"),
        (["--save", "a.b", "--dump-placement", "./a.b"], "--save and --dump-placement are both"),
    ],
)
def test_outputs_are_checked_before_the_work(capsys, monkeypatch, words, message):
    monkeypatch.setattr(plan, "choose", lambda _: pytest.fail("the work has begun"))
    assert message in mistake(capsys, ["plan", *BATCH, *words])


def test_a_file_that_may_not_be_written_is_refused_before_the_work(capsys, monkeypatch, tmp_path):
    path = tmp_path / "batch.plan"
    path.touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    line = mistake(capsys, ["plan", *BATCH, "--save", str(path)])
    assert "which cannot be written: permission denied" in line


def test_sequences_that_are_too_many_together_are_refused_before_masks_are_made(capsys):
    lengths = ",".join([str(2**30)] * 3)
    line = mistake(capsys, ["plan", "--lengths", lengths])
    assert "the number of tokens of the batch is 3221225472; at most 2,147,483,647" in line


def test_a_document_longer_than_a_batch_is_refused_with_a_way_out(capsys, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n900\n")
    line = mistake(capsys, ["simulate", "--lengths-file", str(path), "--tokens", "512"])
    assert "document 2 has 900 tokens, but a batch has at most 512; raise --tokens" in line


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_lengths_have_to_come_from_one_place(capsys, command):
    for words in ([], ["--sample", "ldc:0", "--lengths-file", "lengths.txt"]):
        with pytest.raises(SystemExit) as stopped:
            main([command, *words])
        assert stopped.value.code == 2
        assert "--lengths-file" in capsys.readouterr().err

"""`dyncp verify`: healthy files pass, and every fault is reported in its invariant's line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from verify_faults import FAULTS, Fault
from verify_plans import rich_batch, rich_plan

from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.cli import main
from dyncp.cli.verify import check_kernel_calls
from dyncp.plan import save_plan
from dyncp.verify import INVARIANTS, compare_with_dense, examine_plan
from sizes import pick


def verify(capsys, path: Path, words: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    code = main(["verify", str(path), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return rich_plan()


def test_a_healthy_plan_keeps_all_eight_invariants(capsys, tmp_path, plan):
    save_plan(tmp_path / "a.plan", plan, rich_batch())
    code, result = verify(capsys, tmp_path / "a.plan", ["--numeric"])
    assert code == 0
    assert result["ok"]
    assert {n: e["state"] for n, e in result["invariants"].items()} == dict.fromkeys(
        map(str, INVARIANTS), "ok"
    )
    assert result["numeric"]["state"] == "ok"
    assert set(result["numeric"]["errors"]) == {"default", "local"}
    assert all(error < 1e-12 for error in result["numeric"]["errors"]["default"].values())


def test_kernel_calls_stay_unchecked_without_numeric(capsys, tmp_path, plan):
    save_plan(tmp_path / "a.plan", plan, rich_batch())
    code, result = verify(capsys, tmp_path / "a.plan")
    assert code == 0
    assert result["invariants"]["6"]["state"] == "unchecked"
    assert result["numeric"] is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_corrupted_plan_is_reported_under_its_invariant(capsys, tmp_path, plan, fault: Fault):
    """If the decoder refuses the plan, the command reports the decoder's error instead."""
    path = tmp_path / "broken.plan"
    save_plan(path, fault.make(plan), rich_batch())
    code = main(["verify", str(path), "--json"])
    output = capsys.readouterr()
    if code == 2:
        assert output.err.splitlines()[-1].startswith(f"dyncp: error: plan file {path}: ")
        return
    entry = json.loads(output.out)["invariants"][str(fault.invariant)]
    assert code == 1
    assert entry["state"] == "violated"
    assert any(fault.word in sentence for sentence in entry["sentences"])


def test_most_faults_get_past_the_decoder(tmp_path, capsys, plan):
    codes = []
    for fault in pick(FAULTS[::3], FAULTS):
        save_plan(tmp_path / "broken.plan", fault.make(plan), rich_batch())
        codes.append(main(["verify", str(tmp_path / "broken.plan"), "--json"]))
    capsys.readouterr()
    assert codes.count(1) > len(codes) / 2
    assert 0 not in codes


def test_wrong_results_show_numerically_too(tmp_path, capsys, plan):
    seen = 0
    for fault in pick(FAULTS[::3], FAULTS):
        save_plan(tmp_path / "broken.plan", fault.make(plan), rich_batch())
        code = main(["verify", str(tmp_path / "broken.plan"), "--json", "--numeric"])
        if code != 1:
            capsys.readouterr()
            continue
        numeric = json.loads(capsys.readouterr().out)["numeric"]
        assert numeric["state"] in (("violated", "unchecked") if fault.numerical else ("ok",))
        seen += numeric["state"] == "violated"
    assert seen > pick(3, 10)


def test_the_text_has_a_line_per_invariant_and_the_sentences(tmp_path, capsys, plan):
    fault = next(fault for fault in FAULTS if fault.name == "declared_bytes_changed")
    save_plan(tmp_path / "broken.plan", fault.make(plan), rich_batch())
    assert main(["verify", str(tmp_path / "broken.plan")]) == 1
    lines = capsys.readouterr().out.splitlines()
    for number, invariant in INVARIANTS.items():
        state = {6: "unchecked", 7: "VIOLATED"}.get(number, "ok")
        assert any(line.split()[:2] == [str(number), state] and invariant in line for line in lines)
    assert any("- mask 'default', backward, rank 1: declares" in line for line in lines)
    assert lines[-1] == "The plan must not be run: it breaks 1 of 8 invariants."


def test_a_plan_of_another_batch_hides_what_needs_the_batch(tmp_path, capsys, plan):
    save_plan(tmp_path / "a.plan", plan, Batch.of([masks.causal(51)]))
    code, result = verify(capsys, tmp_path / "a.plan", ["--numeric"])
    states = {number: entry["state"] for number, entry in result["invariants"].items()}
    assert code == 1
    assert states["1"] == states["8"] == "violated"
    assert {states[n] for n in "234567"} == {"unchecked"}
    assert result["numeric"]["state"] == "unchecked"


def test_a_large_batch_is_verified_but_not_run(tmp_path, capsys):
    batch = Batch.of([masks.causal(6000)])
    plan = plan_batch(batch, Topology(1, 4), AttentionShape(8, 2, 128))
    save_plan(tmp_path / "a.plan", plan, batch)
    code, result = verify(capsys, tmp_path / "a.plan", ["--numeric"])
    assert code == 0
    assert "too large: 288,000,000 scores" in result["numeric"]["sentences"][0]
    assert "too large: 6,000 tokens" in result["invariants"]["6"]["sentences"][0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not a plan at all", "it starts with b'not a pl' instead of"),
        (b"", "it starts with b''"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_plan_file_is_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "some.plan"
    if content is not None:
        path.write_bytes(content)
    assert main(["verify", str(path)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert output.err.count("\n") == 1
    assert "some.plan" in output.err
    assert message in output.err


def test_a_plan_saved_on_the_command_line_can_be_verified_there(tmp_path, capsys):
    path = str(tmp_path / "batch.plan")
    words = ["--lengths", "300,120,50", "--mask", "lambda_shaped:sinks=4,window=32"]
    cluster = ["--nodes", "2", "--ranks-per-node", "2", "--block-size", "32"]
    assert main(["plan", *words, *cluster, "--save", path]) == 0
    assert main(["verify", path, "--numeric"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The plan is correct."


def test_what_was_checked_is_said_beside_the_violations(plan):
    examined = examine_plan(plan, rich_batch())
    assert not examined.violations
    assert examined.checked == set(INVARIANTS) - {6}
    assert examine_plan(Plan.of(plan.parts[:-1]), rich_batch()).checked == frozenset()
    assert examine_plan(plan, Batch.of([masks.causal(51)])).checked == {8}


def test_kernel_calls_of_another_mask_are_found():
    """The plan is for 40 causal tokens, the batch allows one pair less."""
    plan = plan_batch(Batch.of([masks.causal(40)]), Topology(1, 2))
    assert check_kernel_calls(plan, Batch.of([masks.causal(40)])) == []
    ranges = masks.causal(40).ranges.copy()
    ranges[30, 0, 0] += 1
    found = check_kernel_calls(plan, Batch.of([masks.Mask(ranges)]))
    assert {violation.invariant for violation in found} == {6}
    assert "(30, 0) is computed 1 times" in found[0].sentence


def test_a_comparison_sees_one_wrong_key():
    """The plan of a mask that differs in a single pair of 60 × 60."""
    right = masks.causal(60)
    ranges = right.ranges.copy()
    ranges[41, 0, 1] -= 1
    plan = plan_batch(Batch.of([masks.Mask(ranges)]), Topology(1, 2), planner=PlannerConfig())
    assert compare_with_dense(plan, Batch.of([masks.Mask(ranges)]), "default").agrees
    wrong = compare_with_dense(plan, Batch.of([right]), "default")
    assert not wrong.agrees
    assert wrong.largest > 1e-6


def test_rows_without_keys_agree_with_dense_attention():
    mask = masks.Mask([[[0, 0]], [[0, 2]], [[3, 3]]])
    batch = Batch.of([mask, masks.causal(30)])
    plan = plan_batch(batch, Topology(1, 3), planner=PlannerConfig("random", block_size=4))
    assert compare_with_dense(plan, batch, "default").agrees

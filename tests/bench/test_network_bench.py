"""What benchmarks.network says about measured plans, and that it ends where links cannot be made.
Nothing here needs root."""

import pytest
from benchmarks import network
from benchmarks.network import Outcome, count_pairs, summarize
from benchmarks.network_links import NotAllowedError


def outcome(name: str, predicted: float, measured: float, batch: str = "one") -> Outcome:
    return Outcome(batch, name, name.startswith("static"), name == "auto", predicted, measured)


THREE = [outcome("auto", 1.0, 1.0), outcome("static a", 1.1, 1.05), outcome("static b", 1.2, 1.02)]


def test_pairs_are_right_where_the_predicted_winner_won() -> None:
    pairs = count_pairs(THREE)
    assert (pairs.right, pairs.count) == (2, 3)


def test_pairs_that_are_close_do_not_count_where_they_are_to_be_apart() -> None:
    pairs = count_pairs(THREE, apart=0.03)
    assert (pairs.right, pairs.count) == (1, 1)


def test_plans_of_different_batches_are_not_paired() -> None:
    assert count_pairs([THREE[0], outcome("static a", 1.0, 2.0, "two")]).count == 0


def test_a_summary_tells_dynamic_and_static_plans_apart() -> None:
    text = "\n".join(summarize([*THREE, outcome("dynamic", 1.0, 1.1)]))
    assert "dynamic     2 plans: measured +5.0% in the median" in text
    assert "static      2 plans: measured -9.8% in the median" in text
    assert "dynamic plans took +14.8% longer than static ones" in text
    assert "one: auto is fastest" in text


def test_an_auto_that_is_too_slow_is_named_with_the_faster_plan() -> None:
    text = "\n".join(summarize([outcome("auto", 1.0, 1.2), *THREE[1:]]))
    assert "auto is 1.176 × the fastest (static b), TOO SLOW" in text


def test_where_namespaces_are_not_allowed_it_says_why_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: str) -> None:
        raise NotAllowedError("ip netns add: Operation not permitted")

    monkeypatch.setattr("benchmarks.network_links._run", refuse)
    monkeypatch.setattr("sys.argv", ["network", "--cases", "2:single:causal:0"])
    network.main()
    said = capsys.readouterr().out
    assert "skipped: " in said
    assert "Operation not permitted" in said


def test_a_case_that_cannot_be_read_is_refused_with_how_to_write_it() -> None:
    with pytest.raises(ValueError, match="write nodes:lengths:mask:seed"):
        network.parse_case("2:single")

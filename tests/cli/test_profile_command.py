"""`dyncp profile` shows the numbers that plans are priced with, and where each is from."""

import json
from dataclasses import fields

import pytest

from dyncp.cli import main
from dyncp.cost import PROFILES, Profile

WORDS = ("measured", "published", "vendor", "assumed")


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_number_of_a_preset_says_where_it_is_from(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--topology", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    priced = {field.name for field in fields(Profile)} - {"name", "sources", "fit_error"}
    assert set(shown["numbers"]) <= priced
    for field, value in shown["numbers"].items():
        preset = getattr(PROFILES[name], field)
        default = Profile.__dataclass_fields__[field].default
        if preset != default:
            assert shown["sources"][field].split(":")[0] in WORDS, (field, value)


@pytest.mark.parametrize(("other", "name"), [("a100", "p4de"), ("gb200", "gb200_nvl72")])
def test_presets_have_the_names_of_their_gpus_too(
    other: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--topology", other]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"profile {name}\n")
    assert "TFLOP/s" in shown


def test_gpus_price_launches_rows_edges_and_the_host() -> None:
    """A preset that leaves a cost out makes its plans look faster than they run."""
    for name, profile in PROFILES.items():
        assert profile.launch_seconds > 0, name
        if profile.ordered_phases:  # GPUs
            assert min(profile.edge_forward, profile.edge_backward, profile.overlap_slowdown) > 1
            assert min(profile.row_forward, profile.row_backward, profile.lanes) > 0
            assert 0 < profile.host_seconds < profile.host_seconds_eager

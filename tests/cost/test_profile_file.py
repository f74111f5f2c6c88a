"""Profiles survive their file, and a file with mistakes says which."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dyncp.cost import PROFILES, Profile, find_profile, load_profile, save_profile


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_saved_profile_loads_as_it_was(name: str, tmp_path: Path) -> None:
    save_profile(find_profile(name), tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == find_profile(name)


def test_edges_and_rows_survive_their_file_and_may_be_left_out(tmp_path: Path) -> None:
    calibrated = replace(
        find_profile("p4de"), edge_forward=3.5, edge_backward=5.0, row_forward=400.0, lanes=132
    )
    save_profile(calibrated, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == calibrated
    new = ("edge_forward", "edge_backward", "row_forward", "row_backward", "lanes")
    older = write(tmp_path, **dict.fromkeys(new))
    assert load_profile(older) == replace(
        find_profile("p4de"),
        edge_forward=1.0,
        edge_backward=1.0,
        row_forward=0.0,
        row_backward=0.0,
        lanes=0,
    )


def test_an_edited_file_changes_the_topology(tmp_path: Path) -> None:
    path = write(tmp_path, inter={"latency": 1e-3, "bandwidth": 5e9}, nics=2)
    topology = load_profile(path).topology(2, 4)
    assert (topology.inter.latency, topology.nic_bandwidth) == (1e-3, 2.5e9)


def write(folder: Path, **changes: Any) -> Path:
    """The p4de profile with other entries; None removes one."""
    path = folder / "profile.json"
    save_profile(find_profile("p4de"), path)
    entries = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dense": None}, "dense is missing; needed are name, attention_forward"),
        ({"dens": 1.0}, "dens is not a field; allowed are name, attention_forward"),
        ({"dense": "fast"}, "dense is 'fast'; expected number"),
        ({"dense": True}, "dense is True; expected number"),
        ({"dense": -1.0}, r"Profile.dense is -1\.0; it must be finite and above 0"),
        (
            {"call_seconds": -1.0},
            r"Profile.call_seconds is -1\.0; it must be finite and at least 0",
        ),
        ({"edge_forward": 0.5}, r"Profile.edge_forward is 0\.5; it must be finite and at least 1"),
        ({"row_backward": -1}, "Profile.row_backward is -1; it must be finite and at least 0"),
        ({"lanes": -1}, "Profile.lanes is -1; it must be finite and at least 0"),
        ({"kernel_tile": 12.5}, r"kernel_tile is 12\.5; expected integer"),
        ({"kernel_tile": 0}, "Profile.kernel_tile is 0; it must be finite and at least 1"),
        ({"intra": 5}, "intra is 5; it must be an object with latency and bandwidth"),
        ({"intra": {"latency": 0.0}}, r"intra\.bandwidth is missing"),
        ({"inter": {"latency": "low", "bandwidth": 1.0}}, r"inter\.latency is 'low'"),
        ({"ordered_phases": 1}, "ordered_phases is 1; expected true or false"),
        ({"format": "other"}, '"format": "dyncp-profile-1"'),
    ],
)
def test_a_mistake_in_the_file_is_named(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ValueError, match=sentence) as error:
        load_profile(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("fast")
    with pytest.raises(ValueError, match=r"text\.json is not JSON"):
        load_profile(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        load_profile(tmp_path / "list.json")


def test_a_profile_checks_its_numbers() -> None:
    profile: Profile = find_profile("p4de")
    with pytest.raises(ValueError, match=r"Profile\.copy is inf"):
        replace(profile, copy=float("inf"))

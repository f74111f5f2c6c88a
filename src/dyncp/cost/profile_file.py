"""Profiles as JSON files that a user can edit."""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from dyncp.checks import parse_json
from dyncp.cost.profile import Profile
from dyncp.topology import Link

FORMAT = "dyncp-profile-1"


def save_profile(profile: Profile, path: str | Path) -> None:
    text = json.dumps({"format": FORMAT} | asdict(profile), indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"profile {path} cannot be written: {error.strerror}") from error


def load_profile(path: str | Path) -> Profile:
    """The profile of `save_profile`; raises ValueError that names the file and the field."""
    try:
        entries = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    try:
        return _read(entries)
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from error


def _read(entries: Any) -> Profile:
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise ValueError(f'it has to be a JSON object with "format": "{FORMAT}"')
    values = {key: value for key, value in entries.items() if key != "format"}
    _check_names(Profile, values, "")
    for field in ("intra", "inter"):
        values[field] = _read_link(values[field], field)
    for field, value in values.items():
        if not isinstance(value, Link):
            _check_type(field, value, _PROFILE_TYPES.get(field, "number"))
    return Profile(**values)


def _read_link(entries: Any, field: str) -> Link:
    if not isinstance(entries, dict):
        raise ValueError(f"{field} is {entries!r}; an object with latency and bandwidth is needed")
    _check_names(Link, entries, f"{field}.")
    for name, value in entries.items():
        _check_type(f"{field}.{name}", value, "number")
    return Link(**entries)


_PROFILE_TYPES = {
    "name": "text",
    "kernel_tile": "integer",
    "ranks_per_machine": "integer",
    "nics": "integer",
    "ordered_phases": "true or false",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
}


def _check_type(field: str, value: Any, expected: str) -> None:
    if type(value) not in _PYTHON_TYPES[expected]:
        raise ValueError(f"{field} is {value!r}; expected is {expected}")


def _check_names(kind: type[Profile] | type[Link], entries: dict[str, Any], prefix: str) -> None:
    known = {field.name: field for field in fields(kind)}
    for name in entries:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not a field; allowed are {', '.join(known)}")
    for name, field in known.items():
        if name not in entries and field.default is MISSING:
            raise ValueError(f"{prefix}{name} is missing; needed are {', '.join(known)}")

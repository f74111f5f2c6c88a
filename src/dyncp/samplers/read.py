"""Reads a user's own file of lengths."""

import json
from pathlib import Path
from typing import Any

from dyncp.checks import parse_json


def read_lengths(path: str | Path) -> list[int]:
    """Lengths of a text file with one integer per line, or of a JSON list of integers.

    Empty lines are skipped; anything else raises ValueError that says where it stands.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"lengths file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"lengths file {path} is not text: {error.reason}") from error
    lengths = _read_json(text, path) if text.lstrip().startswith("[") else _read_lines(text, path)
    if not lengths:
        raise ValueError(f"lengths file {path} has no lengths; at least one is needed")
    return lengths


def _read_lines(text: str, path: str | Path) -> list[int]:
    lines = ((n, line.strip()) for n, line in enumerate(text.splitlines(), start=1))
    return [_length(_number(line), f"{path}, line {n}") for n, line in lines if line]


def _number(line: str) -> int | str:
    return int(line) if line.isascii() and line.isdigit() else line


def _read_json(text: str, path: str | Path) -> list[int]:
    try:
        values = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"lengths file {path}, line {error.lineno}: not a JSON list: {error.msg}"
        ) from error
    except ValueError as error:
        raise ValueError(f"lengths file {path}: not a JSON list: {error}") from error
    return [_length(value, f"{path}, entry {n}") for n, value in enumerate(values, start=1)]


def _length(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:  # bool is no length either
        raise ValueError(f"lengths file {where}: {value!r} is no length; integers from 1 on are")
    return value

"""What commands print: progress on stderr, then a table or one JSON object."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

CLEAR_LINE = "\r\x1b[K"
SELDOM_SECONDS = 2.0


class Progress:
    """Says what is being done now, by default on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.in_place = self._stream.isatty()
        self._shown = -SELDOM_SECONDS

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """A line that the next one replaces."""
        end = "" if self.in_place else "\n"
        self.clear()
        print(text, end=end, file=self._stream, flush=True)

    def show_seldom(self, text: str) -> None:
        """`show`, but where lines stay only one every two seconds."""
        now = time.monotonic()
        if self.in_place or now - self._shown >= SELDOM_SECONDS:
            self._shown = now
            self.show(text)

    def clear(self) -> None:
        if self.in_place:
            print(CLEAR_LINE, end="", file=self._stream, flush=True)


def add_output_options(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--raw", type=Path, metavar="FILE", help="write that JSON object, whatever is printed"
    )


def check_raw(args: Namespace) -> None:
    """Before anything is measured."""
    if args.raw is not None and not args.raw.parent.is_dir():
        raise ValueError(f"--raw is {args.raw}; the folder {args.raw.parent} does not exist")


def show(args: Namespace, numbers: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints the JSON object or the lines, and writes the file that was asked for."""
    text = json.dumps(numbers)
    if args.raw is not None:
        args.raw.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else "\n".join(lines))

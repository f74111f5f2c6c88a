"""Progress of long work: updated in place on a terminal, plain lines elsewhere."""

import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Says what is being done now, by default on stderr."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.in_place = self._stream.isatty()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._stream, flush=True)

    def show(self, text: str) -> None:
        """A line that the next one replaces."""
        end = "" if self.in_place else "\n"
        self.clear()
        print(text, end=end, file=self._stream, flush=True)

    def clear(self) -> None:
        if self.in_place:
            print(CLEAR_LINE, end="", file=self._stream, flush=True)

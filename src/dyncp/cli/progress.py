"""Progress of long work: updated in place on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

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

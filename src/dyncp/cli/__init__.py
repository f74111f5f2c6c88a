"""The command line: `dyncp COMMAND`. One file per command; `entry` lists them."""

from dyncp.cli.entry import main

__all__ = ["main"]

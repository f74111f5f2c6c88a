"""What a subcommand is."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand. `examples` stand in its help, one command line each.

    `run` gets the parsed options, and in `words` the command line itself; it returns the exit code
    and raises ValueError for user mistakes.
    """

    name: str
    summary: str
    examples: tuple[str, ...]
    add_options: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]

    @property
    def epilog(self) -> str:
        title = "examples:" if len(self.examples) > 1 else "example:"
        return "\n".join([title, *(f"  {example}" for example in self.examples)])

"""The command line: `dyncp COMMAND`, a file per command. `main` finds the command, runs it, and
turns user mistakes into one line."""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from dyncp.cli import bench, calibrate, doctor, masks, plan, simulate, train, verify
from dyncp.cli.arguments import examples_text

__all__ = ["main"]

# Files with SUMMARY, EXAMPLES, `add_options(parser)` and `run(args)`, which gets the parsed options
# and in `args.words` the command line itself, returns the exit code, and raises ValueError for user
# mistakes.
COMMANDS = (train, plan, simulate, verify, bench, calibrate, doctor, masks)
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line (default: that of the process) and returns its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    args = build_parser().parse_args(words)
    args.words = words
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ndyncp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, MemoryError) as error:
        if args.traceback:
            raise
        needs = {MemoryError: "more memory than there is", OSError: "another file"}
        found = [text for kind, text in needs.items() if isinstance(error, kind)]
        text = f"this needs {found[0]}: {error}" if found else str(error)
        print(f"dyncp: error: {text}", file=sys.stderr)
        return USER_ERROR


def _version() -> str:
    try:
        return version("dyncp")
    except PackageNotFoundError:
        return "(run from its source, not installed)"


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="dyncp",
        description="Dynamic context parallelism for long-context training.",
        epilog="example:\n  dyncp train",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dyncp {_version()}")
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error was raised, not only its text"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        options = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.SUMMARY,
            description=f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            epilog=examples_text(command.EXAMPLES),
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_options(options)
        options.set_defaults(run=command.run)
    return parser

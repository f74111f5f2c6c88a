"""The command line `dyncp COMMAND`; every command has its own file. `main` finds the command, runs
it, and turns user mistakes into one line."""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import dyncp

# A command is a file of this package, or of a folder next to the `src` that dyncp runs from;
# `bench` is a folder of commands. Each file has EXAMPLES, `add_options(parser)` and `run(args)`.
# `run` gets the parsed options, with the command line itself in `args.words`; it returns the exit
# code, and raises ValueError for user mistakes.
COMMANDS = {
    "train": "train a small Llama on several ranks and compare its losses with one process",
    "plan": "plan one batch and show what the plan costs",
    "simulate": "simulate many batches under dyncp and all static methods, and say which to use",
    "verify": "check a saved plan, invariant by invariant",
    "bench": "measure attention kernels, plans rank by rank, or ranks inside a stack of layers",
    "calibrate": "measure this machine and write a profile for planner and simulator",
    "profile": "show the numbers that plans are priced with, and where each is from",
    "doctor": "check devices, links, groups and one plan, and report what an issue needs",
    "masks": "list the masks, or draw one as text",
}
FOLDERS = {"train": "examples", "bench": "benchmarks"}
BENCHMARKS = {
    "kernels": "compare attention kernels with torch's and flash-attn-4's, on many masks",
    "attention": "compare measured with predicted attention of plans, on virtual or real ranks",
    "layers": "compare ranks of plans with plain attention, inside a stack of transformer layers",
}
EXTRAS = {"transformers": "'dyncp[transformers]'"}
USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    try:
        args = build_parser().parse_args(words)
        args.words = words
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\ndyncp: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, MemoryError) as error:
        if "--traceback" in words:
            raise
        reason = "there is not enough memory: " if isinstance(error, MemoryError) else ""
        print(f"dyncp: error: {reason}{error}", file=sys.stderr)
        return USER_ERROR


def _version() -> str:
    try:
        return version("dyncp")
    except PackageNotFoundError:
        return "(not installed: run from source)"


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="dyncp",
        description="Dynamic context parallelism for long-context training.",
        epilog="example:\n  dyncp train",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dyncp {_version()}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error, not only its text"
    )
    _add_commands(parser, COMMANDS, "COMMAND")
    return parser


def _add_commands(parser: ArgumentParser, commands: Mapping[str, str], metavar: str) -> None:
    added = parser.add_subparsers(
        title=f"{metavar.lower()}s", metavar=metavar, required=True, parser_class=CommandParser
    )
    for name, summary in commands.items():
        text = f"{summary[0].upper()}{summary[1:]}."
        form = RawDescriptionHelpFormatter
        added.add_parser(name, help=summary, description=text, formatter_class=form)


class CommandParser(ArgumentParser):
    """Parses the options of one command. The command's file is imported only then, so that planning
    does not wait for torch."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        _, *names = self.prog.split()
        if names == ["bench"]:
            self.epilog = _examples([f"dyncp bench {name}" for name in BENCHMARKS])
            _add_commands(self, BENCHMARKS, "BENCHMARK")
        else:
            command = load_command(*names)
            self.epilog = _examples(command.EXAMPLES)
            command.add_options(self)
            self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


def _examples(examples: Sequence[str]) -> str:
    """The examples at the end of a command's help."""
    title = "examples:" if len(examples) > 1 else "example:"
    return "\n".join([title, *(f"  {example}" for example in examples)])


def load_command(*names: str) -> ModuleType:
    """Imports the file of `dyncp NAME` or `dyncp bench BENCHMARK`; raises ValueError if something
    that it needs is not installed."""
    folder, command = FOLDERS.get(names[0]), " ".join(["dyncp", *names])
    module = f"{folder or 'dyncp.cli'}.{names[-1]}"
    checkout = Path(dyncp.__file__).parents[2]
    if folder and (checkout / folder).is_dir() and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if missing in (folder, module):
            raise ValueError(
                f"`{command}` is part of the source checkout, not of the installed package: clone "
                "the repository, run `pip install -e .` in it, and try again"
            ) from None
        raise ValueError(
            f"{command} needs {missing}, which is not installed; pip install "
            f"{EXTRAS.get(missing, missing)}"
        ) from error

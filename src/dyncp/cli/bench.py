"""`dyncp bench`: runs the comparisons in the `benchmarks` folder of the source checkout."""

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import dyncp
from dyncp.cli.arguments import examples_text

USER_ERROR = 2
BENCHES = {
    "kernels": "measure attention kernels on many masks, beside torch's and flash-attn-4's",
    "attention": "measure the attention of plans on virtual or real ranks, beside predictions",
    "layers": "measure ranks of plans inside a stack of transformer layers, beside plain attention",
}
SUMMARY = "measure attention kernels, plans rank by rank, or ranks inside a stack of layers"
EXAMPLES = tuple(f"dyncp bench {name}" for name in BENCHES)


def load_benchmark(name: str) -> ModuleType:
    """`benchmarks/NAME.py`: beside the `src` that dyncp runs from, or importable."""
    checkout = Path(dyncp.__file__).parents[2]
    if (checkout / "benchmarks" / f"{name}.py").exists() and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    try:
        return import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", f"benchmarks.{name}"):
            raise
        raise ValueError(
            f"`dyncp bench {name}` is part of the source checkout, not of the installed package: "
            "clone the repository, run `pip install -e .` in it, and try again"
        ) from None


class BenchParser(ArgumentParser):
    """Options of one benchmark. It is imported when they are parsed, so that other commands do not
    wait for torch."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        try:
            bench = load_benchmark(self.prog.split()[-1])
        except ValueError as error:
            self.exit(USER_ERROR, f"dyncp: error: {error}\n")
        self.epilog = examples_text(bench.EXAMPLES)
        bench.add_options(self)
        self.set_defaults(bench=bench.run)
        return super().parse_known_args(args, namespace)


def add_options(parser: ArgumentParser) -> None:
    benches = parser.add_subparsers(
        title="what", metavar="WHAT", required=True, parser_class=BenchParser
    )
    for name, summary in BENCHES.items():
        benches.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=RawDescriptionHelpFormatter,
        )


def run(args: Namespace) -> int:
    code: int = args.bench(args)
    return code

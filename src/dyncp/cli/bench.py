"""`dyncp bench`: kernels beside each other, and the attention of whole plans."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from dyncp.cli import bench_attention, bench_kernels
from dyncp.cli.command import Command

BENCHES = (bench_kernels.command, bench_attention.command)


def add_options(parser: ArgumentParser) -> None:
    benches = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    for bench in BENCHES:
        options = benches.add_parser(
            bench.name,
            help=bench.summary,
            description=f"{bench.summary[0].upper()}{bench.summary[1:]}.",
            epilog=bench.epilog,
            formatter_class=RawDescriptionHelpFormatter,
        )
        bench.add_options(options)
        options.set_defaults(bench=bench.run)


def run(args: Namespace) -> int:
    code: int = args.bench(args)
    return code


command = Command(
    name="bench",
    summary="measure attention kernels, or plans rank by rank, beside what is predicted",
    examples=tuple(bench.examples[0] for bench in BENCHES),
    add_options=add_options,
    run=run,
)

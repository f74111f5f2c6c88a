"""`dyncp bench`: kernels beside each other, the attention of whole plans, and layers with it."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from dyncp.cli import bench_attention, bench_kernels, bench_layers
from dyncp.cli.command import Command

BENCHES = (bench_kernels.command, bench_attention.command, bench_layers.command)


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
    summary="measure attention kernels, plans rank by rank, or ranks inside a stack of layers",
    examples=tuple(bench.examples[0] for bench in BENCHES),
    add_options=add_options,
    run=run,
)

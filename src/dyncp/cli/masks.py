"""`dyncp masks`: lists the masks, or draws one."""

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from dyncp import masks
from dyncp.checks import check_memory
from dyncp.cli.arguments import add_json_option, option, show

RANGE_BYTES = 200  # of a range as a list, and as JSON
EXAMPLES = ("dyncp masks", "dyncp masks sliding_window:window=12 --length 48")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "mask",
        nargs="?",
        metavar="NAME[:key=value,...]",
        help="the mask to draw; all masks are listed if it is left out",
    )
    option(parser, "--length", "tokens of the sequence", 64, metavar="N")
    option(parser, "--width", "maximum width of the drawing in characters", 64, metavar="N")
    add_json_option(parser)


def run(args: Namespace) -> int:
    if args.mask is None:
        listed = [_describe(name) for name in masks.BUILTIN]
        show(args, {"masks": listed}, _table(listed))
        return 0
    mask = masks.by_name(args.mask)(args.length)
    drawing = [mask.draw(args.width)]
    show(args, _numbers(mask) if args.json else {}, drawing)
    return 0


def _numbers(mask: masks.Mask) -> dict[str, Any]:
    size = RANGE_BYTES * mask.ranges.shape[0] * mask.ranges.shape[1]
    check_memory(f"the list of all {mask.length:,} ranges", size, "leave out --json")
    return {
        "name": mask.name,
        "length": mask.length,
        "pairs": mask.num_pairs,
        "density": mask.num_pairs / mask.length**2,
        "ranges": mask.ranges.tolist(),
    }


def _describe(name: str) -> dict[str, Any]:
    function = masks.BUILTIN[name]
    summary = (inspect.getdoc(inspect.getmodule(function.builder)) or "").partition("\n")[0]
    aliases = [alias for alias, other in masks.ALIASES.items() if other is function]
    parameters = {
        key: "needed" if value is inspect.Parameter.empty else str(value)
        for key, value in function.defaults.items()
    }
    return {"name": name, "parameters": parameters, "summary": summary, "aliases": aliases}


def _table(listed: list[dict[str, Any]]) -> Iterator[str]:
    for mask in listed:
        aliases = f" (also {', '.join(mask['aliases'])})" if mask["aliases"] else ""
        yield f"{mask['name']:<18}{mask['summary']}{aliases}"
        if mask["parameters"]:
            given = ", ".join(f"{key}={value}" for key, value in mask["parameters"].items())
            yield f"{'':<18}{given}"

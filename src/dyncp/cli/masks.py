"""`dyncp masks`: lists the masks, or draws one."""

import inspect
import json
from argparse import ArgumentParser, Namespace
from typing import Any

from dyncp import masks
from dyncp.cli.arguments import add_json_option, option
from dyncp.masks import Mask

SUMMARY = "list the masks, or draw one as text"
EXAMPLES = ("dyncp masks", "dyncp masks sliding_window:window=12 --length 48")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "mask",
        nargs="?",
        metavar="NAME[:key=value,...]",
        help="the mask to draw; without it, all masks are listed",
    )
    option(parser, "--length", "tokens of the sequence", 64)
    option(parser, "--width", "most cells of the drawing", 64)
    add_json_option(parser)


def run(args: Namespace) -> int:
    if args.mask is None:
        listed = [_describe(name) for name in masks.BUILTIN]
        print(json.dumps({"masks": listed}) if args.json else _table(listed))
    else:
        mask = masks.by_name(args.mask)(args.length)
        print(json.dumps(_numbers(mask)) if args.json else mask.draw(args.width))
    return 0


def _describe(name: str) -> dict[str, Any]:
    function = masks.BUILTIN[name]
    summary = (inspect.getdoc(inspect.getmodule(function.builder)) or "").partition("\n")[0]
    aliases = [alias for alias, other in masks.ALIASES.items() if other is function]
    parameters = {
        key: "needed" if value is inspect.Parameter.empty else str(value)
        for key, value in function.defaults.items()
    }
    return {"name": name, "parameters": parameters, "summary": summary, "aliases": aliases}


def _table(listed: list[dict[str, Any]]) -> str:
    lines = []
    for mask in listed:
        aliases = f" (also {', '.join(mask['aliases'])})" if mask["aliases"] else ""
        lines.append(f"{mask['name']:<18}{mask['summary']}{aliases}")
        if mask["parameters"]:
            given = ", ".join(f"{key}={value}" for key, value in mask["parameters"].items())
            lines.append(f"{'':<18}{given}")
    return "\n".join(lines)


def _numbers(mask: Mask) -> dict[str, Any]:
    density = mask.num_pairs / mask.length**2
    numbers = {"name": mask.name, "length": mask.length, "pairs": mask.num_pairs}
    return numbers | {"density": density, "ranges": mask.ranges.tolist()}

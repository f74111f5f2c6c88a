"""`dyncp profile`: the numbers of a profile, each with where it is from."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from dyncp.cli import arguments
from dyncp.cost import Profile
from dyncp.topology import Link

EXAMPLES = ("dyncp profile --topology h100", "dyncp profile --profile mine.json --json")
UNITS = {
    "attention_forward": (1e12, "TFLOP/s"),
    "attention_backward": (1e12, "TFLOP/s"),
    "deterministic_backward": (1e12, "TFLOP/s"),
    "dense": (1e12, "TFLOP/s"),
    "copy": (1e9, "GB/s"),
    "call_seconds": (1e-6, "µs"),
    "launch_seconds": (1e-6, "µs"),
    "host_seconds": (1e-6, "µs"),
    "host_seconds_eager": (1e-6, "µs"),
    "row_forward": (1.0, "keys"),
    "row_backward": (1.0, "keys"),
    "deterministic_row": (1.0, "keys"),
    "kernel_tile": (1.0, "rows"),
}
HIDDEN = ("name", "sources", "fit_error", "ordered_phases")
DETERMINISTIC = ("deterministic_backward", "deterministic_edge", "deterministic_row")
UNKNOWN = "not said"


def add_options(parser: ArgumentParser) -> None:
    arguments.add_profile_options(parser)
    arguments.add_json_option(parser)


def run(args: Namespace) -> int:
    profile = arguments.profile_of(args)
    numbers = dict(_numbers(profile))
    width = max(map(len, numbers))
    lines = [
        f"{name:<{width}}  {text:>22}  {profile.sources.get(name, UNKNOWN)}"
        for name, text in numbers.items()
    ]
    values = {name: getattr(profile, name) for name in numbers}
    links = {name: value for name, value in values.items() if isinstance(value, Link)}
    plain = values | {
        name: {"latency": link.latency, "bandwidth": link.bandwidth} for name, link in links.items()
    }
    result: dict[str, Any] = {
        "name": profile.name,
        "numbers": plain,
        "sources": dict(profile.sources),
    }
    arguments.show(args, result, [f"profile {profile.name}", "", *lines])
    return 0


def _numbers(profile: Profile) -> Iterator[tuple[str, str]]:
    for field in fields(profile):
        value = getattr(profile, field.name)
        if field.name in HIDDEN:
            continue
        if field.name in DETERMINISTIC and not profile.deterministic_backward:
            continue  # deterministic kernels cost the same
        if isinstance(value, Link):
            yield field.name, f"{value.bandwidth / 1e9:g} GB/s, {value.latency * 1e6:g} µs"
            continue
        per, unit = UNITS.get(field.name, (1.0, ""))
        yield field.name, f"{value / per:.4g} {unit}".rstrip()

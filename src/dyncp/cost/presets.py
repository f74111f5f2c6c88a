"""Profiles of known machines; each number says where it is from.

Sources begin with one word: *measured* (by `dyncp calibrate` or a benchmark of this project),
*published* (by others; `benchmarks/data/hindcast` has their tables), *vendor* (a datasheet) or
*assumed*.
"""

import logging
from functools import cache
from typing import Any

from dyncp.checks import one_of
from dyncp.cost.profile import Profile
from dyncp.topology import ALIASES, Link, preset

DEFAULT_PROFILE = "p4de"  # if the device is unknown
CPU = "cpu"
# Parts of torch's device names, and the preset for each.
PRESETS_BY_DEVICE = (
    ("B200", "gb200_nvl72"),  # GB200 as well
    ("H200", "h200"),
    ("H100", "h100"),
    ("A100", "p4de"),
)
logger = logging.getLogger(__name__)

Priced = tuple[float | Link, str]

ONE_H200 = "measured: dyncp calibrate --kernel flash4:fast on one H200, rounded"
ALIKE = "assumed: as measured on one H200"
HOST = "assumed: a fast host that runs ahead of the GPU inside a model; 40 µs without that"
EAGER = "measured: calls of 15 to 60 instructions launched from Python took 2 to 8 ms on an H200"
LINKS = "vendor: the share of its bandwidth, and the latency, are assumed"
PLAIN = "published: flash-attention 2 on one A100, from ring-flash-attention's table; "
NO_GPU = "assumed: one core of a server CPU, fp32"


def _profile(name: str, **priced: Priced) -> Profile:
    """The profile with the links of the topology preset `name`, and with these numbers and
    sources."""
    of = preset(name)
    links: dict[str, Any] = {
        "ranks_per_node": of.ranks_per_node,
        "intra": of.intra,
        "inter": of.inter,
        "nics": of.nics,
        "ordered_phases": of.ordered_phases,
    }
    numbers: dict[str, Any] = {field: number for field, (number, _) in priced.items()}
    sources = {field: source for field, (_, source) in priced.items()}
    sources = dict.fromkeys(("intra", "inter", "nics", "ranks_per_node"), LINKS) | sources
    return Profile(name, **(links | numbers), sources=sources)


PROFILES = {
    profile.name: profile
    for profile in (
        _profile(
            "p4de",
            attention_forward=(233e12, PLAIN + "0.75 of the vendor's 312 TFLOP/s"),
            attention_backward=(203e12, PLAIN + "0.65 of the vendor's 312 TFLOP/s"),
            edge_forward=(1.2, ALIKE),
            edge_backward=(1.4, ALIKE),
            row_forward=(350.0, PLAIN + "what packings cost more than one sequence"),
            row_backward=(450.0, PLAIN + "what packings cost more than one sequence"),
            lanes=(108, "vendor: multiprocessors"),
            kernel_tile=(128, "assumed: flash-attention 2's rows per tile"),
            call_seconds=(3e-6, "assumed"),
            dense=(200e12, "assumed: 0.65 of the vendor's 312 TFLOP/s"),
            copy=(0.57e12, "assumed: the H200's share of the vendor's memory bandwidth"),
            launch_seconds=(1.5e-6, "assumed: the gap between kernels of a stream"),
            host_seconds=(15e-6, HOST),
            host_seconds_eager=(120e-6, EAGER),
            overlap_slowdown=(1.07, ALIKE),
        ),
        _profile(
            "h100",
            attention_forward=(800e12, "published: 0.95 of the H200's, from MagiAttention's H100"),
            attention_backward=(640e12, "published: 0.90 of the H200's, from MagiAttention's H100"),
            edge_forward=(1.21, ALIKE),
            edge_backward=(1.39, ALIKE),
            row_forward=(530.0, ALIKE),
            row_backward=(300.0, ALIKE),
            lanes=(132, "vendor: multiprocessors"),
            kernel_tile=(128, "measured: the tile of dyncp's kernels"),
            call_seconds=(0.0, ALIKE),
            deterministic_backward=(350e12, "assumed: 0.90 of the H200's"),
            deterministic_edge=(3.8, ALIKE),
            deterministic_row=(150.0, ALIKE),
            dense=(600e12, "assumed: 0.61 of the vendor's 989 TFLOP/s"),
            copy=(0.94e12, "assumed: 0.7 of the H200's, as its memory bandwidth"),
            launch_seconds=(0.25e-6, ALIKE),
            host_seconds=(15e-6, HOST),
            host_seconds_eager=(120e-6, EAGER),
            overlap_slowdown=(1.07, ALIKE),
            intra=(preset("h100").intra, "published: DistCA's NCCL curves; latency assumed"),
        ),
        _profile(
            "h200",
            attention_forward=(845e12, ONE_H200),
            attention_backward=(713e12, ONE_H200),
            edge_forward=(1.21, ONE_H200),
            edge_backward=(1.39, ONE_H200),
            row_forward=(530.0, ONE_H200),
            row_backward=(300.0, ONE_H200),
            lanes=(132, "vendor: multiprocessors"),
            kernel_tile=(128, "measured: the tile of dyncp's kernels"),
            call_seconds=(0.0, ONE_H200),
            deterministic_backward=(389e12, ONE_H200.replace("fast", "deterministic")),
            deterministic_edge=(3.8, ONE_H200.replace("fast", "deterministic")),
            deterministic_row=(150.0, ONE_H200.replace("fast", "deterministic")),
            dense=(650e12, "assumed: below the 803 TFLOP/s measured for one large product"),
            copy=(1.35e12, ONE_H200),
            launch_seconds=(0.25e-6, ONE_H200),
            host_seconds=(15e-6, HOST),
            host_seconds_eager=(120e-6, EAGER),
            overlap_slowdown=(1.07, ONE_H200),
        ),
        _profile(
            "gb200_nvl72",
            attention_forward=(2000e12, "assumed: the H200's share of the vendor's 2,500 TFLOP/s"),
            attention_backward=(1650e12, "assumed: the H200's share of the vendor's 2,500 TFLOP/s"),
            edge_forward=(1.21, ALIKE),
            edge_backward=(1.39, ALIKE),
            row_forward=(530.0, ALIKE),
            row_backward=(300.0, ALIKE),
            lanes=(148, "vendor: multiprocessors"),
            kernel_tile=(128, "measured: the tile of dyncp's kernels"),
            call_seconds=(2e-6, "assumed"),
            dense=(1600e12, "assumed: 0.65 of the vendor's 2,500 TFLOP/s"),
            copy=(2.25e12, "assumed: the H200's share of the vendor's memory bandwidth"),
            launch_seconds=(0.25e-6, ALIKE),
            host_seconds=(15e-6, HOST),
            host_seconds_eager=(120e-6, EAGER),
            overlap_slowdown=(1.07, ALIKE),
        ),
        _profile(
            "cpu_gloo",
            attention_forward=(50e9, NO_GPU),
            attention_backward=(40e9, NO_GPU),
            kernel_tile=(32, NO_GPU),
            call_seconds=(100e-6, NO_GPU),
            dense=(60e9, NO_GPU),
            copy=(4e9, NO_GPU),
            launch_seconds=(50e-6, NO_GPU),
        ),
    )
}


def find_profile(name: str) -> Profile:
    one_of("profile", name, (*PROFILES, *ALIASES))
    return PROFILES[ALIASES.get(name, name)]


def profile_for_device(device: str | None) -> Profile:
    """The preset for a device: a GPU's name ("NVIDIA H200"), "cpu", or None if it is unknown. None
    and GPUs without a preset get `DEFAULT_PROFILE`."""
    return find_profile(_preset_of(device) or DEFAULT_PROFILE)


@cache
def tell_profile(device: str | None, change: str) -> None:
    """Logs, once per process, which profile a device gets, why, and how to `change` that."""
    name = profile_for_device(device).name
    logger.info("planning for %s: %s; %s", name, _reason(device), change)


def _preset_of(device: str | None) -> str | None:
    if device == CPU:
        return "cpu_gloo"
    return next((preset for part, preset in PRESETS_BY_DEVICE if part in (device or "")), None)


def _reason(device: str | None) -> str:
    if device is None:
        return "no device is known here"
    if device == CPU:
        return "there is no GPU in this process"
    return f"the device is {device}" + ("" if _preset_of(device) else ", which has no preset")

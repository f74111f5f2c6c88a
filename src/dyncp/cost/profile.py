"""Profile: the rates of one kind of machine, from presets, device names or files."""

import json
import logging
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from dyncp.checks import one_of, read_json_file
from dyncp.topology import Link, Topology, preset

FORMAT = "dyncp-profile-1"
DEFAULT_PROFILE = "p4de"  # if the device is unknown
CPU = "cpu"
# Parts of torch's device names, and the preset for each.
PRESETS_BY_DEVICE = (
    ("B200", "gb200_nvl72"),  # GB200 as well
    ("H200", "h200"),
    ("H100", "h200"),  # the same processors, with 0.7 of the memory bandwidth
    ("A100", "p4de"),
)
_RATES = ("attention_forward", "attention_backward", "dense", "copy")
_AT_LEAST = {
    "call_seconds": 0, "launch_seconds": 0, "host_seconds": 0, "host_seconds_eager": 0,
    "row_forward": 0, "row_backward": 0, "lanes": 0, "overlap_slowdown": 1, "edge_forward": 1,
    "edge_backward": 1, "kernel_tile": 1, "ranks_per_node": 1, "nics": 1,
    "fit_error": 0,
}  # fmt: skip
Speeds = tuple[float, ...]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of one rank, and the links of a node with `ranks_per_node` ranks.

    - `attention_forward`, `attention_backward`: FLOP/s of the attention kernel on full kernel
      tiles; `kernel_tile` is the side of these in rows.
    - `call_seconds`: overhead of a kernel call on top of its tiles.
    - `dense`: FLOP/s of the linear layers.
    - `copy`: bytes per second of packing and unpacking; a byte read and written is counted once.
    - `intra`, `inter`, `nics`, `ordered_phases`: as in `Topology`.
    - `overlap_slowdown`: how many times longer attention takes while messages are in flight.
    - `edge_forward`, `edge_backward`: how many times longer a partial kernel tile takes, which
      contains an edge of the mask or the end of a block.
    - `row_forward`, `row_backward`: fixed cost of every row of kernel tiles in a call (backward:
      column), in keys; `lanes` is the number of rows that run at once, one per processor.
    - `launch_seconds`: gap between consecutive kernels. If it is 0, only attention kernels and
      message copies are priced (see `RowCosts`).
    - `host_seconds`, `host_seconds_eager`: host time to issue one instruction, with CUDA graphs
      and without.
    - `fit_error`: mean relative error of the worst of the fits that these numbers are from.

    The defaults leave the last five groups out.
    """

    name: str
    attention_forward: float
    attention_backward: float
    dense: float
    copy: float
    call_seconds: float
    kernel_tile: int
    ranks_per_node: int
    intra: Link
    inter: Link
    nics: int
    ordered_phases: bool = True
    overlap_slowdown: float = 1.0
    edge_forward: float = 1.0
    edge_backward: float = 1.0
    row_forward: float = 0.0
    row_backward: float = 0.0
    lanes: int = 0
    launch_seconds: float = 0.0
    host_seconds: float = 0.0
    host_seconds_eager: float = 0.0
    fit_error: float = 0.0

    def __post_init__(self) -> None:
        for field, least in _AT_LEAST.items():
            value = getattr(self, field)
            if not least <= value < math.inf:
                limits = f"it must be finite and at least {least}"
                raise ValueError(f"Profile.{field} is {value}; {limits}")
        for field in _RATES:
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"Profile.{field} is {value}; it must be finite and above 0")

    def topology(
        self, nodes: int = 1, ranks_per_node: int | None = None, speeds: Speeds = ()
    ) -> Topology:
        """A cluster of such nodes; `ranks_per_node` overrides the profile's."""
        ranks = self.ranks_per_node if ranks_per_node is None else ranks_per_node
        links = self.intra, self.inter, self.nics
        return Topology(nodes, ranks, *links, speeds, self.ordered_phases, self.name)


def _profile(
    name: str, attention: tuple[float, float], dense: float, copy: float, call: float, tile: int
) -> Profile:
    of = preset(name)
    rates = *attention, dense, copy, call
    per_node, ordered = of.ranks_per_node, of.ordered_phases
    return Profile(name, *rates, tile, per_node, of.intra, of.inter, of.nics, ordered)


def _with_launches(profile: Profile) -> Profile:
    """The profile with launch and host times estimated from an H200: consecutive kernels of a graph
    are 1.5 µs apart. Replaying the graph of an attention call took the host 17 to 71 µs, so an
    instruction takes 15. Launched from Python, calls of 15 to 60 instructions took 2 to 8 ms."""
    return replace(profile, launch_seconds=1.5e-6, host_seconds=15e-6, host_seconds_eager=120e-6)


# Copying both reads and writes: about 0.4 of the vendor's memory bandwidth.
PROFILES = {
    profile.name: profile
    for profile in (
        # Estimates: 0.6 and 0.5 of the vendor's 312 TFLOP/s for attention, 0.65 for linear layers;
        # 2.0 TB/s memory.
        _profile("p4de", (190e12, 150e12), 200e12, 0.8e12, 20e-6, 128),
        # Measured by `dyncp calibrate --kernel flash4:fast` on one H200, rounded. Linear layers: an
        # estimate below the 803 TFLOP/s measured for one large matrix product. Host time: a fast
        # host, which runs ahead of the GPU inside a model.
        replace(
            _with_launches(_profile("h200", (845e12, 713e12), 650e12, 1.35e12, 0.0, 128)),
            edge_forward=1.21,
            edge_backward=1.39,
            row_forward=530.0,
            row_backward=300.0,
            lanes=132,
            launch_seconds=0.25e-6,
            overlap_slowdown=1.07,
        ),
        # Estimates: the H200's shares of its vendor's 989 TFLOP/s, applied to 2,500; 8 TB/s memory.
        _with_launches(_profile("gb200_nvl72", (1400e12, 1100e12), 1600e12, 3.2e12, 4e-6, 128)),
        # Estimates for one core of a server CPU in fp32.
        _profile("cpu_gloo", (50e9, 40e9), 60e9, 4e9, 100e-6, 32),
    )
}


# Mean relative error above which the fit of a profile is poor. On an idle CPU it was 0.3 to 0.36,
# since the cost model describes GPU kernels; on a busy one, 0.55.
POOR_FIT = 0.45


def find_profile(name: str) -> Profile:
    one_of("profile", name, PROFILES)
    return PROFILES[name]


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


def save_profile(profile: Profile, path: str | Path) -> None:
    text = json.dumps({"format": FORMAT} | asdict(profile), indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"profile {path} cannot be written: {error.strerror}") from error


def load_profile(path: str | Path) -> Profile:
    """Loads a file of `save_profile`. A ValueError names the file and the wrong field."""
    entries = read_json_file("profile", Path(path))
    try:
        if not isinstance(entries, dict) or entries.pop("format", None) != FORMAT:
            raise ValueError(f'it must be a JSON object with "format": "{FORMAT}"')
        _check_fields(Profile, entries, "")
        for field in ("intra", "inter"):
            if not isinstance(entries[field], dict):
                needed = "it must be an object with latency and bandwidth"
                raise ValueError(f"{field} is {entries[field]!r}; {needed}")
            _check_fields(Link, entries[field], f"{field}.")
            entries[field] = Link(**entries[field])
        profile = Profile(**entries)
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from error
    if not profile.fit_error <= POOR_FIT:
        logger.warning(
            "profile %s was fitted with a mean error of %.0f %%: plans and predictions made with "
            "it may be poor; run `dyncp calibrate` again on an idle machine",
            path,
            100 * profile.fit_error,
        )
    return profile


_TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    bool: ("true or false", (bool,)),
}


def _check_fields(kind: type[Profile] | type[Link], entries: dict[str, Any], prefix: str) -> None:
    """Raises ValueError for fields that are unknown, missing or of the wrong type."""
    known = {field.name: field for field in fields(kind)}
    for name in entries:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not a field; allowed are {', '.join(known)}")
    for name, field in known.items():
        if name not in entries and field.default is MISSING:
            raise ValueError(f"{prefix}{name} is missing; needed are {', '.join(known)}")
    for name, hint in get_type_hints(kind).items():
        expected, types = _TYPES.get(hint, ("", ()))
        if types and name in entries and type(entries[name]) not in types:
            raise ValueError(f"{prefix}{name} is {entries[name]!r}; expected {expected}")

"""Profile: the rates of one kind of machine. Presets, the preset of a device, and profile files."""

import json
import logging
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dyncp.checks import parse_json
from dyncp.topology import Link, Topology, preset

FORMAT = "dyncp-profile-1"
DEFAULT_PROFILE = "p4de"  # for plans of which nobody says what they run on
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
    0: ("call_seconds", "launch_seconds", "host_seconds", "host_seconds_eager", "row_forward",
        "row_backward", "lanes"),
    1: ("overlap_slowdown", "edge_forward", "edge_backward", "kernel_tile", "ranks_per_machine",
        "nics"),
}  # fmt: skip
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates of one rank, and the links of a machine with `ranks_per_machine` ranks.

    - `attention_forward`, `attention_backward`: FLOP/s of the attention kernel on full kernel
      tiles; `kernel_tile` is the side of these in rows.
    - `call_seconds`: overhead of a kernel call on top of its tiles.
    - `dense`: FLOP/s of the linear layers.
    - `copy`: bytes per second of packing and unpacking; a byte read and written counts once.
    - `intra`, `inter`, `nics`, `ordered_phases`: as in `Topology`.
    - `overlap_slowdown`: how many times longer attention takes while messages are in flight.
    - `edge_forward`, `edge_backward`: how many times longer a partial kernel tile takes, one with
      an edge of the mask or the end of a block in it.
    - `row_forward`, `row_backward`: fixed cost of every row of kernel tiles in a call (backward:
      column), in keys; `lanes` is how many rows run at once, one per processor.
    - `launch_seconds`: gap between consecutive kernels. At 0, only attention kernels and message
      copies are priced (see row_work.py).
    - `host_seconds`, `host_seconds_eager`: host time to issue one instruction, with CUDA graphs
      and without.

    The defaults price none of the last four groups.
    """

    name: str
    attention_forward: float
    attention_backward: float
    dense: float
    copy: float
    call_seconds: float
    kernel_tile: int
    ranks_per_machine: int
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

    def __post_init__(self) -> None:
        for least, names in _AT_LEAST.items():
            for field in names:
                value = getattr(self, field)
                if not least <= value < math.inf:
                    raise ValueError(
                        f"Profile.{field} is {value}; it must be finite and at least {least}"
                    )
        for field in _RATES:
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ValueError(f"Profile.{field} is {value}; it must be finite and above 0")

    def topology(
        self,
        machines: int = 1,
        ranks_per_machine: int | None = None,
        speeds: tuple[float, ...] = (),
    ) -> Topology:
        """A cluster of such machines, with another number of ranks in each if given."""
        ranks = self.ranks_per_machine if ranks_per_machine is None else ranks_per_machine
        return Topology(
            machines,
            ranks,
            self.intra,
            self.inter,
            self.nics,
            speeds,
            self.ordered_phases,
            self.name,
        )


def _profile(
    name: str, attention: tuple[float, float], dense: float, copy: float, call: float, tile: int
) -> Profile:
    machine = preset(name)
    return Profile(
        name=name,
        attention_forward=attention[0],
        attention_backward=attention[1],
        dense=dense,
        copy=copy,
        call_seconds=call,
        kernel_tile=tile,
        ranks_per_machine=machine.ranks_per_machine,
        intra=machine.intra,
        inter=machine.inter,
        nics=machine.nics,
        ordered_phases=machine.ordered_phases,
    )


def _with_launches(profile: Profile) -> Profile:
    """Estimates after an H200: consecutive kernels of a graph are 1.5 µs apart; replaying the graph
    of an attention call took the host 17 to 71 µs, so an instruction gets 15; launched from Python,
    calls of 15 to 60 instructions took it 2 to 8 ms."""
    return replace(profile, launch_seconds=1.5e-6, host_seconds=15e-6, host_seconds_eager=120e-6)


# Copying reads and writes: about 0.4 of the memory's vendor figure.
PROFILES = {
    profile.name: profile
    for profile in (
        # Estimates: 0.6 and 0.5 of the 312 TFLOP/s vendor figure for attention, 0.65 for linear
        # layers; 2.0 TB/s memory.
        _profile("p4de", (190e12, 150e12), 200e12, 0.8e12, 20e-6, 128),
        # What `dyncp calibrate --kernel flash4:fast` measured on one H200, rounded. Linear layers:
        # an estimate below the 803 TFLOP/s measured for one large matrix product. Host time: that
        # of a fast host; inside a model it runs ahead of the GPU.
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
        # Estimates: the H200's shares of the vendor figure (989 TFLOP/s), applied to 2,500; 8 TB/s.
        _with_launches(_profile("gb200_nvl72", (1400e12, 1100e12), 1600e12, 3.2e12, 4e-6, 128)),
        # Estimates for one core of a server CPU in fp32.
        _profile("cpu_gloo", (50e9, 40e9), 60e9, 4e9, 100e-6, 32),
    )
}


def find_profile(name: str) -> Profile:
    if name not in PROFILES:
        raise ValueError(f"profile is {name!r}; choose one of {', '.join(PROFILES)}")
    return PROFILES[name]


def profile_for_device(device: str | None) -> Profile:
    """The preset for a device: a GPU's name ("NVIDIA H200"), "cpu", or None where none is known.
    GPUs without a preset of their own get that of `DEFAULT_PROFILE`, as None does."""
    return find_profile(_preset_of(device) or DEFAULT_PROFILE)


def tell_profile(device: str | None, change: str) -> None:
    """Logs, once in a process, which profile a device gets, why, and how to `change` that."""
    _tell(f"planning for {profile_for_device(device).name}: {_reason(device)}; {change}")


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


@cache
def _tell(text: str) -> None:
    logger.info(text)


def save_profile(profile: Profile, path: str | Path) -> None:
    text = json.dumps({"format": FORMAT} | asdict(profile), indent=2)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"profile {path} cannot be written: {error.strerror}") from error


def load_profile(path: str | Path) -> Profile:
    """The profile of `save_profile`; raises ValueError that names the file and the field."""
    try:
        entries = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    try:
        return _read(entries)
    except ValueError as error:
        raise ValueError(f"profile {path}: {error}") from error


def _read(entries: Any) -> Profile:
    if not isinstance(entries, dict) or entries.get("format") != FORMAT:
        raise ValueError(f'it has to be a JSON object with "format": "{FORMAT}"')
    values = {key: value for key, value in entries.items() if key != "format"}
    _check_names(Profile, values, "")
    for field in ("intra", "inter"):
        values[field] = _read_link(values[field], field)
    for field, value in values.items():
        if not isinstance(value, Link):
            _check_type(field, value, _PROFILE_TYPES.get(field, "number"))
    return Profile(**values)


def _read_link(entries: Any, field: str) -> Link:
    if not isinstance(entries, dict):
        raise ValueError(f"{field} is {entries!r}; an object with latency and bandwidth is needed")
    _check_names(Link, entries, f"{field}.")
    for name, value in entries.items():
        _check_type(f"{field}.{name}", value, "number")
    return Link(**entries)


_PROFILE_TYPES = {
    "name": "text",
    "kernel_tile": "integer",
    "ranks_per_machine": "integer",
    "nics": "integer",
    "ordered_phases": "true or false",
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
}


def _check_type(field: str, value: Any, expected: str) -> None:
    if type(value) not in _PYTHON_TYPES[expected]:
        raise ValueError(f"{field} is {value!r}; expected is {expected}")


def _check_names(kind: type[Profile] | type[Link], entries: dict[str, Any], prefix: str) -> None:
    known = {field.name: field for field in fields(kind)}
    for name in entries:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not a field; allowed are {', '.join(known)}")
    for name, field in known.items():
        if name not in entries and field.default is MISSING:
            raise ValueError(f"{prefix}{name} is missing; needed are {', '.join(known)}")

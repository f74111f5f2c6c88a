"""Profile: the rates of one kind of machine, and its file."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from dyncp.checks import read_json_file
from dyncp.topology import Link, Topology

FORMAT = "dyncp-profile-1"
_RATES = ("attention_forward", "attention_backward", "dense", "copy")
_AT_LEAST = {
    "call_seconds": 0, "launch_seconds": 0, "host_seconds": 0, "host_seconds_eager": 0,
    "row_forward": 0, "row_backward": 0, "lanes": 0, "overlap_slowdown": 1, "edge_forward": 1,
    "edge_backward": 1, "kernel_tile": 1, "ranks_per_node": 1, "nics": 1,
    "deterministic_backward": 0, "deterministic_edge": 1, "deterministic_row": 0, "fit_error": 0,
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
    - `deterministic_backward`, `deterministic_edge`, `deterministic_row`: what replaces
      `attention_backward`, `edge_backward` and `row_backward` in executors with
      `deterministic=True`. If the first is 0, deterministic kernels cost the same.
    - `fit_error`: mean relative error of the worst of the fits that these numbers are from.
    - `sources`: by field, where its number is from: measured, published or assumed.

    The defaults leave out all that follows `ordered_phases`.
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
    deterministic_backward: float = 0.0
    deterministic_edge: float = 1.0
    deterministic_row: float = 0.0
    fit_error: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if not least <= value < math.inf:
                limits = f"it must be finite and at least {least}"
                raise ValueError(f"Profile.{name} is {value}; {limits}")
        for name in _RATES:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"Profile.{name} is {value}; it must be finite and above 0")

    def topology(
        self, nodes: int = 1, ranks_per_node: int | None = None, speeds: Speeds = ()
    ) -> Topology:
        """A cluster of such nodes; `ranks_per_node` overrides the profile's."""
        ranks = self.ranks_per_node if ranks_per_node is None else ranks_per_node
        links = self.intra, self.inter, self.nics
        return Topology(nodes, ranks, *links, speeds, self.ordered_phases, self.name)


# Mean relative error above which the fit of a profile is poor. On an idle CPU it was 0.3 to 0.36,
# since the cost model describes GPU kernels; on a busy one, 0.55.
POOR_FIT = 0.45


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
        for link in ("intra", "inter"):
            if not isinstance(entries[link], dict):
                needed = "it must be an object with latency and bandwidth"
                raise ValueError(f"{link} is {entries[link]!r}; {needed}")
            _check_fields(Link, entries[link], f"{link}.")
            entries[link] = Link(**entries[link])
        _check_sources(entries.get("sources", {}))
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


def _check_sources(sources: Any) -> None:
    known = {one.name for one in fields(Profile)}
    if not isinstance(sources, dict) or not all(isinstance(v, str) for v in sources.values()):
        raise ValueError(f"sources is {sources!r}; it must be an object with a text for each field")
    for name in sources:
        if name not in known:
            raise ValueError(f"sources names {name!r}, which is not a field")


_TYPES: dict[type, tuple[str, tuple[type, ...]]] = {
    str: ("text", (str,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    bool: ("true or false", (bool,)),
}


def _check_fields(kind: type[Profile] | type[Link], entries: dict[str, Any], prefix: str) -> None:
    """Raises ValueError for fields that are unknown, missing or of the wrong type."""
    known = {one.name: one for one in fields(kind)}
    for name in entries:
        if name not in known:
            raise ValueError(f"{prefix}{name} is not a field; allowed are {', '.join(known)}")
    for name, one in known.items():
        missing = one.default is MISSING and one.default_factory is MISSING
        if name not in entries and missing:
            raise ValueError(f"{prefix}{name} is missing; needed are {', '.join(known)}")
    for name, hint in get_type_hints(kind).items():
        expected, types = _TYPES.get(hint, ("", ()))
        if types and name in entries and type(entries[name]) not in types:
            raise ValueError(f"{prefix}{name} is {entries[name]!r}; expected {expected}")

"""The profile of the device at hand, by its name. Whoever has torch says the name: planning never
looks for a device."""

import logging
from functools import cache

from dyncp.cost.presets import DEFAULT_PROFILE, find_profile
from dyncp.cost.profile import Profile

logger = logging.getLogger(__name__)

CPU = "cpu"
# Parts of the names that torch gives devices, and the presets for these.
PRESETS_BY_DEVICE = (
    ("B200", "gb200_nvl72"),  # GB200 as well
    ("H200", "h200"),
    ("H100", "h200"),  # the same processors, with 0.7 of the memory bandwidth
    ("A100", "p4de"),
)


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

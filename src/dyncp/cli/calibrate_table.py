"""The table of `dyncp calibrate`: what was measured beside what the preset assumes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dyncp.cost import Profile

if TYPE_CHECKING:
    from dyncp.measure.calibrate import Calibration


def draw_calibration(base: Profile, found: "Calibration") -> Iterator[str]:
    profile = found.profile
    yield f"{'':<34}{'measured':>14}{base.name:>14}"
    for label, field in (
        ("attention forward, TFLOP/s", "attention_forward"),
        ("attention backward, TFLOP/s", "attention_backward"),
        ("linear layers, TFLOP/s", "dense"),
    ):
        yield f"{label:<34}{getattr(profile, field) / 1e12:>14.4g}{getattr(base, field) / 1e12:>14.4g}"
    yield f"{'kernel call, µs':<34}{1e6 * profile.call_seconds:>14.1f}{1e6 * base.call_seconds:>14.1f}"
    yield f"{'packing, GB/s':<34}{profile.copy / 1e9:>14.4g}{base.copy / 1e9:>14.4g}"
    for label, name in (("inside a machine", "intra"), ("between machines", "inter")):
        mine, theirs = getattr(profile, name), getattr(base, name)
        known = getattr(found, name) is not None
        yield (
            f"{label + ', GB/s':<34}{_known(mine.bandwidth / 1e9, known):>14}"
            f"{theirs.bandwidth / 1e9:>14.4g}"
        )
        yield (
            f"{label + ', µs':<34}{_known(1e6 * mine.latency, known):>14}"
            f"{1e6 * theirs.latency:>14.4g}"
        )
    if found.all_gather is not None:
        yield f"{'all-gather into a rank, GB/s':<34}{found.all_gather / 1e9:>14.4g}"
    for overlap in found.overlaps:
        label = f"attention beside {overlap.kind} copies, ×"
        yield f"{label:<34}{overlap.slowdown:>14.3f}"
    yield ""
    yield (
        f"{len(found.samples)} kernel timings; the fit is off by {100 * found.rates.mean_error:.1f} "
        f"% on average, {100 * found.rates.worst_error:.0f} % at worst; a call takes "
        f"{1e6 * found.rates.host_seconds:.0f} µs of host time"
    )


def _known(value: float, known: bool) -> str:
    """A number, or that it was not measured and is the preset's."""
    return f"{value:.4g}" if known else "as assumed"

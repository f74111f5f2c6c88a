"""The table of `dyncp calibrate`: what was measured beside what the preset assumes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dyncp.cost import Profile

if TYPE_CHECKING:
    from dyncp.measure.calibrate import Calibration


# Label, field of the profile, and how many of its units make one of the label's.
RATES = (
    ("attention forward, TFLOP/s", "attention_forward", 1e12),
    ("attention backward, TFLOP/s", "attention_backward", 1e12),
    ("linear layers, TFLOP/s", "dense", 1e12),
    ("kernel tiles with an edge, forward, ×", "edge_forward", 1),
    ("kernel tiles with an edge, backward, ×", "edge_backward", 1),
    ("a row of kernel tiles, forward, keys", "row_forward", 1),
    ("a row of kernel tiles, backward, keys", "row_backward", 1),
    ("rows of kernel tiles at a time", "lanes", 1),
    ("kernel call, µs", "call_seconds", 1e-6),
    ("between kernels, µs", "launch_seconds", 1e-6),
    ("host per instruction, graphs, µs", "host_seconds", 1e-6),
    ("host per instruction, no graphs, µs", "host_seconds_eager", 1e-6),
    ("copying rows, GB/s", "copy", 1e9),
)


def draw_calibration(base: Profile, found: "Calibration") -> Iterator[str]:
    profile, rates = found.profile, found.rates
    yield f"{'':<40}{'measured':>14}{base.name:>14}"
    for label, field, unit in RATES:
        mine, theirs = (getattr(p, field) / unit for p in (profile, base))
        yield f"{label:<40}{mine:>14.4g}{theirs:>14.4g}"
    for label, name in (("inside a machine", "intra"), ("between machines", "inter")):
        link, assumed = getattr(profile, name), getattr(base, name)
        known = getattr(found, name) is not None
        yield (
            f"{label + ', GB/s':<40}{_known(link.bandwidth / 1e9, known):>14}"
            f"{assumed.bandwidth / 1e9:>14.4g}"
        )
        yield (
            f"{label + ', µs':<40}{_known(1e6 * link.latency, known):>14}"
            f"{1e6 * assumed.latency:>14.4g}"
        )
    if found.all_gather is not None:
        yield f"{'all-gather into a rank, GB/s':<40}{found.all_gather / 1e9:>14.4g}"
    for overlap in found.overlaps:
        label = f"attention beside {overlap.kind} copies, ×"
        yield f"{label:<40}{overlap.slowdown:>14.3f}"
    yield ""
    yield (
        f"{len(found.samples)} kernel timings; the fit is off by {100 * rates.mean_error:.1f} % on "
        f"average, {100 * rates.worst_error:.0f} % at worst; a call takes "
        f"{1e6 * rates.host_seconds:.0f} µs of host time"
    )
    if found.rows is not None:
        yield (
            f"{len(found.calls)} whole calls; what they take besides kernels is off by "
            f"{100 * found.rows.mean_error:.1f} % on average, {100 * found.rows.worst_error:.0f} % "
            "at worst"
        )


def _known(value: float, known: bool) -> str:
    """A number, or that it was not measured and is the preset's."""
    return f"{value:.4g}" if known else "as assumed"

"""Calibration: everything that a profile says, measured on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dyncp.blocks import AttentionShape
from dyncp.calibrate.calls import (
    KernelChoice,
    forward,
    make_executor,
    make_inputs,
    mask_case,
    one_rank_attention,
)
from dyncp.calibrate.environment import World
from dyncp.calibrate.fit import (
    AttentionRates,
    CallSample,
    RowRates,
    WholeCall,
    fit_rates,
    fit_rows,
)
from dyncp.calibrate.links import (
    MeasuredLink,
    Overlap,
    all_gather_rate,
    beside_copies,
    beside_messages,
    measure_links,
)
from dyncp.calibrate.samples import copy_rate, dense_rate, num_lanes, sample_attention
from dyncp.calibrate.timing import Repeats
from dyncp.cost import CostModel, Profile
from dyncp.topology import Link

# Tokens of the call that copies run beside: a longer one would outlast them.
MOST_BESIDE_COPIES = 16384

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CalibrateSetting:
    """`base` provides what is not measured: links with one rank, NICs, the kernel tile."""

    base: Profile
    name: str
    shape: AttentionShape
    choice: KernelChoice
    masks: tuple[str, ...]
    sizes: tuple[int, ...]
    world: World
    repeats: Repeats = field(default_factory=lambda: Repeats(timed=5, flush=False))


@dataclass(frozen=True, eq=False)
class Calibration:
    """The profile, and what it was made from. Links are None where there are none, `rows` where
    whole calls cannot be fitted: on CPUs, and where they are few."""

    profile: Profile
    rates: AttentionRates
    rows: RowRates | None
    samples: list[CallSample]
    calls: list[WholeCall]
    intra: MeasuredLink | None
    inter: MeasuredLink | None
    all_gather: float | None
    overlaps: list[Overlap]


def calibrate(setting: CalibrateSetting, tell: Tell = lambda _: None) -> Calibration:
    """Measures this rank's device and the links of the world. All ranks call it together; the
    profile to keep is that of rank 0."""
    world, repeats = setting.world, setting.repeats
    cost = CostModel(setting.base, setting.shape)
    samples, calls = sample_attention(
        setting.masks, setting.sizes, cost, setting.choice, world.device, repeats, tell
    )
    rates = fit_rates(samples, cost, num_lanes(world.device))
    tell("matrix products and copies ...")
    measured: dict[str, Any] = {
        "dense": dense_rate(world.device, setting.shape.dtype, repeats),
        "copy": copy_rate(world.device, repeats),
    }
    rows = fit_rows(calls) if world.device.type == "cuda" else None
    if rows is not None:
        measured |= _row_fields(rows, setting)
    tell("attention beside copies ...")
    overlaps = _overlaps(setting)
    tell("links ...")
    intra, inter = measure_links(world)
    gathered = all_gather_rate(world) if world.num_ranks > 1 else None
    profile = replace(
        setting.base,
        name=setting.name,
        overlap_slowdown=overlaps[0].slowdown,
        **_kernel_fields(rates),
        **measured,
        **_link_fields(intra, inter, world),
    )
    return Calibration(profile, rates, rows, samples, calls, intra, inter, gathered, overlaps)


def _kernel_fields(rates: AttentionRates) -> dict[str, Any]:
    return {
        "attention_forward": rates.forward,
        "attention_backward": rates.backward,
        "call_seconds": rates.call_seconds,
        "edge_forward": rates.edge_forward,
        "edge_backward": rates.edge_backward,
        "row_forward": rates.row_forward,
        "row_backward": rates.row_backward,
        "lanes": rates.lanes,
    }


def _row_fields(rows: RowRates, setting: CalibrateSetting) -> dict[str, Any]:
    """The host's time per instruction is that of graphs where the executor replays graphs here."""
    executor = make_executor(setting.choice, setting.world.device, virtual_ranks=1)
    host = "host_seconds" if executor.engine.graphs.wanted else "host_seconds_eager"
    return {"copy": rows.copy, "launch_seconds": rows.launch_seconds, host: rows.host_seconds}


def _link_fields(
    intra: MeasuredLink | None, inter: MeasuredLink | None, world: World
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if intra is not None:
        fields |= {"intra": intra.link, "ranks_per_machine": world.ranks_per_machine}
    if inter is not None:
        # All ranks of a machine sent at once: a machine's bandwidth is that many times one pair's.
        whole = inter.link.bandwidth * world.ranks_per_machine
        fields["inter"] = Link(inter.link.latency, whole)
    return fields


def _overlaps(setting: CalibrateSetting) -> list[Overlap]:
    """Real messages first, where there are other ranks."""
    case = mask_case("causal", min(max(setting.sizes), MOST_BESIDE_COPIES))
    device = setting.world.device
    attend = one_rank_attention(case.batch, setting.shape, setting.choice, device)
    run = forward(attend, make_inputs(case.tokens, setting.shape, device))
    beside = beside_copies(run, device, setting.repeats)
    if setting.world.num_ranks == 1:
        return beside
    return [beside_messages(run, setting.world, setting.repeats), *beside]

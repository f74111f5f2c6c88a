"""Calibration: everything that a profile says, measured on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dyncp.blocks import AttentionShape
from dyncp.cost import CostModel, Profile
from dyncp.executor import attention
from dyncp.measure.attention_rates import AttentionRates, fit_rates
from dyncp.measure.call_samples import CallSample, sample_attention
from dyncp.measure.device_rates import copy_rate, dense_rate, num_lanes
from dyncp.measure.implementation import forward
from dyncp.measure.inputs import make_inputs
from dyncp.measure.links import (
    MeasuredLink,
    all_gather_rate,
    border_pairs,
    inside_pairs,
    measure_link,
)
from dyncp.measure.mask_cases import mask_case
from dyncp.measure.ours import KernelChoice, make_executor, one_rank_step
from dyncp.measure.overlap import Overlap, beside_copies, beside_messages
from dyncp.measure.row_rates import RowRates, WholeCall, fit_rows
from dyncp.measure.timing import Repeats
from dyncp.measure.world import World
from dyncp.topology import Link

Tell = Callable[[str], None]

# Tokens of the call that copies run beside: longer ones outlast them.
MOST_BESIDE_COPIES = 16384


@dataclass(frozen=True, slots=True)
class CalibrateSetting:
    """`base` says what is not measured: links where there is one rank, NICs, kernel tile."""

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
    """The profile, and what it was made from. Links are None where there was nothing to measure,
    `rows` where whole calls say nothing: on CPUs, and where they are few."""

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
    """Measures this rank's device and the links of the world; all ranks call it together, and the
    profile is that of rank 0."""
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
        host = "host_seconds" if _replays(setting) else "host_seconds_eager"
        measured |= {"copy": rows.copy, "launch_seconds": rows.launch_seconds}
        measured[host] = rows.host_seconds
    tell("attention beside copies ...")
    overlaps = _overlaps(setting)
    tell("links ...")
    intra, inter = _links(world)
    gathered = all_gather_rate(world) if world.num_ranks > 1 else None
    if intra is not None:
        measured |= {"intra": intra.link, "ranks_per_machine": world.ranks_per_machine}
    if inter is not None:
        # Measured with all ranks of a machine at once: a machine has that many times one pair's.
        whole = inter.link.bandwidth * world.ranks_per_machine
        measured["inter"] = Link(inter.link.latency, whole)
    profile = replace(
        setting.base,
        name=setting.name,
        attention_forward=rates.forward,
        attention_backward=rates.backward,
        call_seconds=rates.call_seconds,
        edge_forward=rates.edge_forward,
        edge_backward=rates.edge_backward,
        row_forward=rates.row_forward,
        row_backward=rates.row_backward,
        lanes=rates.lanes,
        overlap_slowdown=overlaps[0].slowdown,
        **measured,
    )
    return Calibration(profile, rates, rows, samples, calls, intra, inter, gathered, overlaps)


def _replays(setting: CalibrateSetting) -> bool:
    """Whether the executor replays plans as graphs here."""
    executor = make_executor(setting.choice, setting.world.device, virtual_ranks=1)
    return executor.engine.graphs.wanted


def _overlaps(setting: CalibrateSetting) -> list[Overlap]:
    """Real messages first, where there are other ranks."""
    case = mask_case("causal", min(max(setting.sizes), MOST_BESIDE_COPIES))
    device = setting.world.device
    step = one_rank_step(case.batch, setting.shape, setting.choice, device)
    inputs = make_inputs(case.tokens, setting.shape, device)
    run = forward(lambda q, k, v: attention(step, q, k, v), inputs)
    beside = beside_copies(run, device, setting.repeats)
    if setting.world.num_ranks == 1:
        return beside
    return [beside_messages(run, setting.world, setting.repeats), *beside]


def _links(world: World) -> tuple[MeasuredLink | None, MeasuredLink | None]:
    intra = measure_link(inside_pairs(), world) if world.ranks_per_machine > 1 else None
    inter = measure_link(border_pairs(world), world) if world.machines > 1 else None
    return intra, inter

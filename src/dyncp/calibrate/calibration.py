"""`calibrate` measures everything that a profile says: it times divisions and whole attention calls
of plans, matrix products, copies and links, and fits rates to the timings by least squares."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from dyncp.arrays import Bool, Float64
from dyncp.blocks import DEFAULT_MASK, Direction
from dyncp.calibrate.calls import batch_of, make_executor, make_inputs, one_rank_attention
from dyncp.calibrate.rates import (
    Fit,
    MeasuredLink,
    Overlap,
    all_gather_rate,
    beside_copies,
    beside_messages,
    copy_rate,
    dense_rate,
    fit_seconds,
    measure_links,
    num_lanes,
)
from dyncp.calibrate.timing import CallTimes, Tools, add_kernels, plan_work, time_calls
from dyncp.calibrate.world import World
from dyncp.cost import POOR_FIT, CostModel, Profile
from dyncp.plan import Op, Plan
from dyncp.planner import plan_batch
from dyncp.simulate.flow import layer_of_plan
from dyncp.simulate.layer import count_row_bytes
from dyncp.topology import Link, Topology

# Most tokens of the call that is timed during copies: a longer call would outlast the copies.
MOST_BESIDE_COPIES = 16384
# Batches of at least CUT_TOKENS tokens are planned for several ranks of at most TOKENS_PER_RANK
# tokens, since kernels have faster paths for whole sequences, which plans seldom use. TIMED_RANKS
# of the ranks are timed.
CUT_TOKENS, TOKENS_PER_RANK, TIMED_RANKS = 1024, 4096, 4
# With fewer timings per coefficient, or a larger condition number of the columns, the fit of edges
# and rows would only follow noise.
TIMINGS_PER_COEFFICIENT, MOST_ALIKE = 4, 30.0
MOST_FITS = 20
# With fewer whole calls, or if bytes take a smaller share of their time, the fit cannot separate
# bytes from launches.
LEAST_TIMINGS, LEAST_SHARE = 8, 0.01
# How often attention is measured while its fit is poor, and the difference between two measurements
# of the same calls from which on the machine counts as busy.
ATTEMPTS, BUSY = 3, 0.15
# Least seconds between kernels in a profile: 0 would make row work free.
LEAST_LAUNCH = 1e-7

# Fields that AttentionRates and Profile share.
KERNEL_FIELDS = (
    "call_seconds", "lanes", "edge_forward", "edge_backward", "row_forward", "row_backward"
)  # fmt: skip

Tell = Callable[[str], None]
About = tuple[str, int, str]  # mask, tokens of the batch, direction


@dataclass(frozen=True, slots=True)
class CallSample:
    """The kernel calls of one division in one direction: their summed work in the cost model's
    terms (see `CallWork`), and the measured seconds."""

    mask: str
    tokens: int
    direction: str
    area: float
    edge: float
    rows: float
    longest: float
    pairs: int
    calls: int
    seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """What a profile says about kernels, with the relative errors of the fit and the host's seconds
    per attention call.

    `forward` and `backward` are FLOP/s on full kernel tiles, `edge_*` how many times longer partial
    tiles take, `row_*` the fixed cost of a row of kernel tiles in keys, and `lanes` the number of
    rows that run at once."""

    forward: float
    backward: float
    edge_forward: float
    edge_backward: float
    row_forward: float
    row_backward: float
    lanes: int
    call_seconds: float
    mean_error: float
    worst_error: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class WholeCall:
    """One rank's attention call: the bytes that its row work reads and writes, its launches of row
    work and kernels, its instructions (including start and end), and the seconds of the whole call,
    of its attention kernels and of the host."""

    mask: str
    tokens: int
    direction: str
    moved_bytes: float
    launches: int
    instructions: int
    seconds: float
    kernel_seconds: float
    host_seconds: float


@dataclass(frozen=True, slots=True)
class RowRates:
    """Row work: bytes copied per second, seconds between kernels, the host's seconds per
    instruction, and the relative errors of the fit."""

    copy: float
    launch_seconds: float
    host_seconds: float
    mean_error: float
    worst_error: float


@dataclass(frozen=True, eq=False)
class Calibration:
    """The profile, and what it was made from. `intra`, `inter` and `all_gather` are None if there
    are no such ranks to measure; `rows` is None on CPUs and if whole calls could not be fitted.
    `errors` are the mean relative errors of all fits. `spread` is by how much the same calls differ
    between two measurements; None if the first one was good."""

    profile: Profile
    rates: AttentionRates
    rows: RowRates | None
    samples: list[CallSample]
    calls: list[WholeCall]
    intra: MeasuredLink | None
    inter: MeasuredLink | None
    all_gather: float | None
    overlaps: list[Overlap]
    errors: dict[str, float]
    spread: float | None

    @property
    def complaint(self) -> str:
        """What is wrong with the fit, and what to do; empty if it is good."""
        poor = [f"{100 * x:.0f} % for {name}" for name, x in self.errors.items() if x > POOR_FIT]
        if not poor:
            return ""
        differ = ""
        if self.spread is not None and self.spread > BUSY:
            differ = (
                f" Two measurements of the same calls differ by {100 * self.spread:.0f} % in the "
                "mean: the machine is busy."
            )
        return (
            f"the fit is off in the mean by {', '.join(poor)}; at most {100 * POOR_FIT:.0f} % is "
            f"good.{differ} Stop other programs and calibrate again, with more --repeats or "
            "larger --sizes"
        )


def calibrate(
    world: World,
    tools: Tools,
    base: Profile,
    masks: Sequence[str],
    sizes: Sequence[int],
    *,
    name: str = "calibrated",
    tell: Tell = lambda _: None,
) -> Calibration:
    """Measures this rank's device and the links between ranks. All ranks call it together; keep the
    profile of rank 0.

    Attention is timed with `tools` on batches of every mask and number of tokens (`sizes`). `base`
    provides what cannot be measured: links if there is one rank, NICs, the kernel tile."""
    cost = CostModel(base, tools.shape)
    lanes = num_lanes(world.device)
    samples, calls, rates, spread = measure_attention(masks, sizes, tools, cost, lanes, tell)
    tell("matrix products and copies ...")
    measured: dict[str, Any] = {
        "dense": dense_rate(world.device, tools.shape.dtype, tools.repeats),
        "copy": copy_rate(world.device, tools.repeats),
    }
    rows = fit_rows(calls) if world.device.type == "cuda" else None
    if rows is not None:
        measured |= _row_fields(rows, tools)
    tell("attention during copies ...")
    overlaps = _overlaps(world, tools, min(max(sizes), MOST_BESIDE_COPIES))
    tell("links ...")
    intra, inter = measure_links(world)
    gathered = all_gather_rate(world) if world.num_ranks > 1 else None
    errors = {"attention kernels": rates.mean_error}
    errors |= {} if rows is None else {"row work": rows.mean_error}
    links = {"links inside a node": intra, "links between nodes": inter}
    errors |= {name: link.mean_error for name, link in links.items() if link is not None}
    measured |= {
        "overlap_slowdown": overlaps[0].slowdown,
        "attention_forward": rates.forward,
        "attention_backward": rates.backward,
        **{field: getattr(rates, field) for field in KERNEL_FIELDS},
        **_link_fields(intra, inter, world),
    }
    if ":fast" not in tools.kernel:  # what was measured is what deterministic executors run
        measured["deterministic_backward"] = 0.0
    here = dict.fromkeys(measured, f"measured: dyncp calibrate --kernel {tools.kernel}")
    sources = {**base.sources, **here}
    fit = max(errors.values())
    profile = replace(base, name=name, fit_error=fit, sources=sources, **measured)
    found = (profile, rates, rows, samples, calls, intra, inter, gathered, overlaps)
    return Calibration(*found, errors, spread)


def _row_fields(rows: RowRates, tools: Tools) -> dict[str, Any]:
    """Fields of a profile. The host's seconds are those with graphs if the executor uses graphs."""
    executor = make_executor(tools.kernel, tools.device, virtual_ranks=1)
    host = "host_seconds" if executor.engine.graphs.wanted else "host_seconds_eager"
    return {"copy": rows.copy, "launch_seconds": rows.launch_seconds, host: rows.host_seconds}


def _link_fields(
    intra: MeasuredLink | None, inter: MeasuredLink | None, world: World
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if intra is not None:
        fields |= {"intra": intra.link, "ranks_per_node": world.ranks_per_node}
    if inter is not None:
        # All ranks of a node sent at once: a node's bandwidth is that many times one pair's.
        whole = inter.link.bandwidth * world.ranks_per_node
        fields["inter"] = Link(inter.link.latency, whole)
    return fields


def _overlaps(world: World, tools: Tools, tokens: int) -> list[Overlap]:
    """Times a causal call during messages, if there are other ranks, and then during copies."""
    attend = one_rank_attention(batch_of("causal", tokens), tools.shape, tools.kernel, tools.device)
    run = partial(attend, *make_inputs(tokens, tools.shape, tools.device).qkv)
    beside = beside_copies(run, tools.device, tools.repeats)
    if world.num_ranks == 1:
        return beside
    return [beside_messages(run, world, tools.repeats), *beside]


def measure_attention(
    masks: Sequence[str],
    sizes: Sequence[int],
    tools: Tools,
    cost: CostModel,
    lanes: int,
    tell: Tell,
) -> tuple[list[CallSample], list[WholeCall], AttentionRates, float | None]:
    """Times and fits attention. A poor fit is measured again, up to ATTEMPTS times in all; the
    shorter time of every division counts, because other programs only add to it."""
    samples, calls = sample_attention(masks, sizes, tools, cost, tell)
    spread: float | None = None
    for attempt in range(1, ATTEMPTS + 1):
        try:
            rates = fit_rates(samples, cost, lanes)
            if rates.mean_error <= POOR_FIT or attempt == ATTEMPTS:
                return samples, calls, rates, spread
        except ValueError:  # the times say nothing
            if attempt == ATTEMPTS:
                raise
        tell("the fit is poor; measuring again ...")
        again, calls = sample_attention(masks, sizes, tools, cost, tell)
        spread = max(spread or 0.0, _spread(samples, again))
        pairs = zip(samples, again, strict=True)
        samples = [min(pair, key=lambda sample: sample.seconds) for pair in pairs]
    raise AssertionError("unreachable")


def _spread(samples: Sequence[CallSample], again: Sequence[CallSample]) -> float:
    """The mean relative difference between two measurements of the same divisions, below 1."""
    first, second = (np.asarray([s.seconds for s in group]) for group in (samples, again))
    return float(np.mean(np.abs(second - first) / np.maximum(first, second)))


def sample_attention(
    masks: Sequence[str], sizes: Sequence[int], tools: Tools, cost: CostModel, tell: Tell
) -> tuple[list[CallSample], list[WholeCall]]:
    """Times the divisions and whole calls of plans for all masks and sizes, forward and
    backward."""
    samples, whole, timed = list[CallSample](), list[WholeCall](), []
    for mask, tokens in product(masks, sizes):
        tell(f"attention kernel: {mask}, {tokens:,} tokens ...")
        batch = batch_of(mask, tokens)
        plan = plan_batch(batch, Topology(1, _num_ranks(tokens)), cost.shape, cost=cost)
        parts = plan.parts[:: -(-plan.num_ranks // TIMED_RANKS)]
        calls = {part: time_calls(part, tools) for part in parts}
        timed.append((mask, plan, calls))
    tell("profiling attention kernels ...")
    for mask, plan, calls in timed:
        times = {part.rank: add_kernels(x, part, tools) for part, x in calls.items()}
        for direction in times[0]:
            by_rank = {rank: measured[direction] for rank, measured in times.items()}
            about = mask, int(plan.parts[0].tokens_per_rank.sum()), direction.name.lower()
            samples += _division_samples(plan, by_rank, direction, cost, about)
            whole += _whole_calls(plan, by_rank, direction, cost, about)
    return samples, whole


def _num_ranks(tokens: int) -> int:
    """Ranks that a batch is planned for: 4 for 16,384 tokens, 16 for 65,536."""
    return max(TIMED_RANKS, tokens // TOKENS_PER_RANK) if tokens >= CUT_TOKENS else 1


def _division_samples(
    plan: Plan, times: dict[int, CallTimes], direction: Direction, cost: CostModel, about: About
) -> Iterator[CallSample]:
    """One sample per division of the ranks in `times`."""
    for work in plan_work(plan, direction, cost):
        if work.rank in times:
            measured = times[work.rank]
            yield CallSample(
                *about,
                area=work.area,
                edge=work.edge,
                rows=work.tile_rows,
                longest=work.longest,
                pairs=work.pairs,
                calls=work.calls,
                seconds=float(measured.division_seconds[work.division]),
                host_seconds=measured.host_seconds,
            )


def _whole_calls(
    plan: Plan, times: dict[int, CallTimes], direction: Direction, cost: CostModel, about: About
) -> Iterator[WholeCall]:
    """One call per rank in `times`."""
    layer, _ = layer_of_plan(plan, DEFAULT_MASK, direction, cost)
    moved, launches = count_row_bytes(layer, cost).per_rank
    for rank, measured in times.items():
        program = plan.parts[rank].mask_plan(DEFAULT_MASK).program(direction)
        groups = len(plan.parts[rank].groups_for(cost.shape))
        kernels = groups * int((program.instructions[:, 0] == Op.COMPUTE).sum())
        yield WholeCall(
            *about,
            moved_bytes=float(moved[rank]),
            launches=int(launches[rank]) + kernels,
            instructions=len(program.instructions) + 2,
            seconds=measured.seconds,
            kernel_seconds=measured.kernel_seconds,
            host_seconds=measured.host_seconds,
        )


def fit_rates(samples: Sequence[CallSample], cost: CostModel, lanes: int) -> AttentionRates:
    """Fits the cost model's rates to the measured seconds: one overhead per call for both
    directions, everything else per direction. If the timings cannot separate rows and lanes from
    full tiles, these are left out, and then edges, too."""
    for terms in (3, 2, 1):
        model = KernelModel(samples, terms, lanes if terms == 3 else 0, cost.profile.kernel_tile)
        if terms > 1 and not model.tells_apart():
            continue
        fit = model.fit()
        work = np.zeros((2, 3))
        work[:, :terms] = fit.coefficients[:-1].reshape(2, terms)
        if work[:, 0].all():
            return _rates(work, fit, model, cost)
    raise ValueError(
        "the attention kernel's time does not grow with its work: too short or too noisy; "
        "measure larger sizes or more repeats"
    )


class KernelModel:
    """The cost model's seconds as a linear function with `terms` coefficients per direction (for
    pairs, pairs of edges, pairs of rows) and one per call. `lanes` rows of `side` tokens run at
    once."""

    def __init__(self, samples: Sequence[CallSample], terms: int, lanes: int, side: int) -> None:
        self.lanes = lanes
        self.seconds = np.asarray([s.seconds for s in samples])
        self.host_seconds = float(np.median([s.host_seconds for s in samples]))
        self.backward = np.asarray(
            [s.direction == Direction.BACKWARD.name.lower() for s in samples]
        )
        fields = ("area", "edge", "rows", "longest", "calls")
        area, edge, rows, longest, calls = (
            np.asarray([getattr(s, field) for s in samples], np.float64) for field in fields
        )
        idle = 1 + lanes * calls / (2 * np.maximum(rows, calls))
        spread = idle * np.stack([area, edge, side * rows])
        row = lanes * side * np.stack([longest, np.zeros(len(samples)), calls])
        # Columns of the work if a call takes as long as all of its work, and if it takes as long as
        # its longest row.
        self.spread, self.row = (self._columns(work[:terms].T, calls) for work in (spread, row))

    def _columns(self, work: Float64, calls: Float64) -> Float64:
        """Separate columns for forward and backward work, then calls: float64[samples,
        2 × terms + 1]."""
        forward, back = (work * own[:, None] for own in (~self.backward, self.backward))
        return np.column_stack([forward, back, calls])

    def tells_apart(self) -> bool:
        """Whether there are enough timings, and their work differs enough."""
        if len(self.spread) < TIMINGS_PER_COEFFICIENT * self.spread.shape[1]:
            return False
        relative = self.spread / self.seconds[:, None]
        size = np.linalg.norm(relative, axis=0)
        return bool(size.all() and np.linalg.cond(relative / size) < MOST_ALIKE)

    def fit(self) -> Fit:
        """Which calls take as long as their longest row depends on the coefficients, so this fits
        until these calls no longer change, at most `MOST_FITS` times."""
        seconds, spread, row = self.seconds, self.spread, self.row
        alone: Bool = np.zeros(len(seconds), np.bool_)
        for _ in range(MOST_FITS):
            fit = fit_seconds(np.where(alone[:, None], row, spread), seconds)
            longer = row @ fit.coefficients > spread @ fit.coefficients
            if (alone == longer).all():
                break
            alone = longer
        fitted = np.maximum(spread @ fit.coefficients, row @ fit.coefficients)
        return Fit(fit.coefficients, fitted / seconds - 1)


def _rates(work: Float64, fit: Fit, model: KernelModel, cost: CostModel) -> AttentionRates:
    (forward, edge_forward, row_forward), (backward, edge_backward, row_backward) = work.tolist()
    flops = [float(cost.flops(np.ones(1), 1, direction)[0]) for direction in Direction]
    return AttentionRates(
        forward=flops[0] / forward,
        backward=flops[1] / backward,
        edge_forward=1 + edge_forward / forward,
        edge_backward=1 + edge_backward / backward,
        row_forward=row_forward / forward,
        row_backward=row_backward / backward,
        lanes=model.lanes,
        call_seconds=float(fit.coefficients[-1]),
        mean_error=fit.mean_error,
        worst_error=fit.worst_error,
        host_seconds=model.host_seconds,
    )


def fit_rows(calls: Sequence[WholeCall]) -> RowRates | None:
    """Fits the seconds that calls spend outside attention kernels by bytes and launches. None if
    there are too few calls, or if bytes explain almost nothing."""
    some = [c for c in calls if c.seconds > c.kernel_seconds and c.moved_bytes]
    if len(some) < LEAST_TIMINGS:
        return None
    columns = np.asarray([(c.moved_bytes / 2, c.launches) for c in some], np.float64)
    seconds = np.asarray([c.seconds - c.kernel_seconds for c in some])
    fit = fit_seconds(columns, seconds)
    per_byte, per_launch = fit.coefficients.tolist()
    if np.median(per_byte * columns[:, 0] / seconds) < LEAST_SHARE:
        return None
    host = float(np.median([c.host_seconds / c.instructions for c in calls]))
    launch = max(per_launch, LEAST_LAUNCH)
    return RowRates(1 / per_byte, launch, host, fit.mean_error, fit.worst_error)

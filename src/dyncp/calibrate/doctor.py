"""The doctor: versions, messages between all ranks, and one plan against dense attention."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from dyncp.calibrate.calls import first_line
from dyncp.calibrate.environment import (
    World,
    describe_devices,
    describe_machine,
    describe_versions,
    peer_access,
)
from dyncp.calibrate.links import bandwidth_matrix
from dyncp.calibrate.rank_checks import GroupCheck, PlanCheck, check_groups, check_plan
from dyncp.kernels import reason_for

logger = logging.getLogger(__name__)

# Bytes of the messages between pairs of ranks, by kind of device.
MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
# A link this many times slower than the median of its kind is reported.
SLOW_LINK = 4.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `sentence` says what was found, or what is wrong and what to do."""

    name: str
    passed: bool
    sentence: str


NOT_RUN = Finding("plan", False, "not run: the grouped calls between ranks have to work first")


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What was found; `facts` are values for JSON."""

    facts: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return all(finding.passed for finding in self.findings)


def diagnose(world: World, kernel: str = "auto", tell: Tell = lambda _: None) -> Diagnosis:
    """All ranks call it together."""
    facts: dict[str, Any] = {
        "versions": describe_versions(),
        "machine": describe_machine(),
        "devices": describe_devices(),
        "peer_access": peer_access(),
        "ranks": world.num_ranks,
        "ranks_per_machine": world.ranks_per_machine,
        "device": str(world.device),
    }
    findings = [check_versions(facts["versions"], world)]
    matrix, groups, in_groups = None, None, True
    if world.num_ranks > 1:
        tell("messages between ranks ...")
        matrix = bandwidth_matrix(world, MESSAGE_BYTES[world.device.type], tell)
        findings.append(check_bandwidths(matrix, world))
        tell("all ranks to all ranks in grouped calls ...")
        finding, groups = check_messages(world)
        findings.append(finding)
        in_groups = all(one.passed for one in _of_all_ranks([finding], world))
    facts["bytes_per_second"] = matrix
    facts["groups"] = None if groups is None else asdict(groups)
    tell("one plan against dense attention ...")
    finding, check = check_results(world, kernel) if in_groups else (NOT_RUN, None)
    findings += [finding, check_graphs(check)]
    facts["plan"] = None if check is None else asdict(check)
    reason = reason_for(kernel, world.device)
    facts["kernel"] = None if check is None else {"name": check.kernel, "reason": reason}
    return Diagnosis(facts, _of_all_ranks(findings, world))


def check_graphs(check: PlanCheck | None) -> Finding:
    """Whether replaying the plan as CUDA graphs gives the right results too."""
    if check is None:
        return Finding("graphs", False, "not run: the plan has to work first")
    if check.replayed is None:
        return Finding("graphs", True, "not used: CUDA graphs need a GPU")
    worst = max(check.replayed.values())
    text = f"the same plan replayed as CUDA graphs: relative error {worst:.1e}"
    if check.allows(check.replayed):
        return Finding("graphs", True, text)
    return Finding(
        "graphs", False, f"{text}, allowed is {check.tolerance:.0e}: use DCPExecutor(graphs=False)"
    )


def _of_all_ranks(findings: list[Finding], world: World) -> list[Finding]:
    """This rank's findings, each replaced by that of the first rank where it failed."""
    if world.num_ranks == 1:
        return findings
    every: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(every, findings)
    return [worst_finding(of_ranks) for of_ranks in zip(*every, strict=True)]


def worst_finding(findings: Sequence[Finding]) -> Finding:
    """Of all ranks' findings of one check: the first that failed, with its rank."""
    for rank, finding in enumerate(findings):
        if not finding.passed:
            return Finding(finding.name, False, f"rank {rank}: {finding.sentence}")
    return findings[0]


def check_versions(versions: dict[str, str | None], world: World) -> Finding:
    every: list[Any] = [versions]
    if world.num_ranks > 1:
        every = [None] * world.num_ranks
        dist.all_gather_object(every, versions)
    odd = [rank for rank, other in enumerate(every) if other != every[0]]
    if not odd:
        shown = ", ".join(f"{name} {found or 'missing'}" for name, found in versions.items())
        return Finding("versions", True, shown)
    names = [name for name in versions if any(other[name] != every[0][name] for other in every)]
    return Finding(
        "versions",
        False,
        f"ranks {', '.join(map(str, odd))} have other versions of {', '.join(names)} than rank 0: "
        "install the same on all ranks",
    )


def check_bandwidths(matrix: list[list[float | None]], world: World) -> Finding:
    """Whether some pair of ranks is much slower than others of its kind."""
    slow = []
    for inside in (True, False):
        rates = sorted(
            (rate, a, b)
            for a, row in enumerate(matrix)
            for b, rate in enumerate(row)
            if rate is not None and a < b
            and (a // world.ranks_per_machine == b // world.ranks_per_machine) is inside
        )  # fmt: skip
        if rates:
            median = rates[len(rates) // 2][0]
            slow += [entry for entry in rates if entry[0] * SLOW_LINK < median]
    known = [rate for row in matrix for rate in row if rate is not None]
    if not slow:
        text = f"{min(known) / 1e9:.2f} to {max(known) / 1e9:.2f} GB/s between ranks"
        return Finding("links", True, text)
    rate, a, b = slow[0]
    return Finding(
        "links",
        False,
        f"ranks {a} and {b} exchange {rate / 1e9:.3f} GB/s, less than a quarter of what others "
        f"reach ({len(slow)} such pairs): look at their cables, switches and NCCL settings",
    )


def check_messages(world: World) -> tuple[Finding, GroupCheck | None]:
    try:
        check = check_groups(world)
    except Exception as error:
        logger.debug("the grouped calls failed", exc_info=True)
        text = f"not all ranks could send to all: {first_line(error)}"
        return Finding("groups", False, text), None
    groups = " and ".join(f"{name} ({ranks})" for name, ranks in check.communicators.items())
    text = (
        f"all {check.ranks} ranks sent to all over {check.backend}, {check.phases} phases at once: "
        f"up to {check.operations} operations in a grouped call, {check.limit} are allowed; "
        f"{check.machines} machine{'s' if check.machines > 1 else ''}, "
        f"communicators (ranks): {groups}"
    )
    if check.passed:
        return Finding("groups", True, text), check
    sender, phase = check.wrong[0]
    return Finding(
        "groups",
        False,
        f"what came from rank {sender} in phase {phase} is not what it sent "
        f"({len(check.wrong)} such messages): do not train over this network",
    ), check


def check_results(world: World, kernel: str) -> tuple[Finding, PlanCheck | None]:
    try:
        check = check_plan(world, kernel)
    except Exception as error:  # a doctor reports what is broken
        logger.debug("the plan failed", exc_info=True)
        text = f"a small plan could not run: {first_line(error)}"
        return Finding("plan", False, text), None
    kind = "virtual" if check.virtual else "real"
    worst = max(check.errors.values())
    text = (
        f"a small plan on {check.ranks} {kind} ranks, kernel {check.kernel}, "
        f"{check.bytes_moved / 1e6:.1f} MB moved: relative error {worst:.1e}"
    )
    if check.passed:
        return Finding("plan", True, text), check
    return Finding(
        "plan", False, f"{text}, allowed is {check.tolerance:.0e}: do not train with it"
    ), check

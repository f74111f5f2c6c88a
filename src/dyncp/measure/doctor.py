"""Doctor: what is installed, what the ranks see of each other, whether all of them can send to all,
and whether a plan runs right."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from dyncp.kernels import reason_for
from dyncp.measure.environment import (
    describe_devices,
    describe_machine,
    describe_versions,
    peer_access,
)
from dyncp.measure.group_check import GroupCheck, check_groups
from dyncp.measure.links import bandwidth_matrix
from dyncp.measure.plan_check import PlanCheck, check_plan
from dyncp.measure.world import World

logger = logging.getLogger(__name__)

# Messages of the peer-to-peer matrix, by kind of device.
MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
# A link this many times slower than the median of its kind is worth a look.
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
    """`facts` is for JSON."""

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
    findings = [_same_versions(facts["versions"], world)]
    matrix, groups, in_groups = None, None, True
    if world.num_ranks > 1:
        tell("messages between ranks ...")
        matrix = bandwidth_matrix(world, MESSAGE_BYTES[world.device.type], tell)
        findings.append(_links(matrix, world))
        tell("all ranks to all ranks in grouped calls ...")
        finding, groups = _groups(world)
        findings.append(finding)
        in_groups = all(one.passed for one in _of_all_ranks([finding], world))
    facts["bytes_per_second"] = matrix
    facts["groups"] = None if groups is None else asdict(groups)
    tell("one plan against dense attention ...")
    finding, check = _plan(world, kernel) if in_groups else (NOT_RUN, None)
    findings += [finding, _graphs(check)]
    facts["plan"] = None if check is None else asdict(check)
    reason = reason_for(kernel, world.device)
    facts["kernel"] = None if check is None else {"name": check.kernel, "reason": reason}
    return Diagnosis(facts, _of_all_ranks(findings, world))


def _graphs(check: PlanCheck | None) -> Finding:
    """Whether the plan gave the same when it was replayed."""
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
    """This rank's findings, each replaced by that of the first rank where it is bad."""
    if world.num_ranks == 1:
        return findings
    every: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(every, findings)
    return [
        _worst([(rank, held[i]) for rank, held in enumerate(every)]) for i in range(len(findings))
    ]


def _worst(findings: list[tuple[int, Finding]]) -> Finding:
    wrong = [(rank, finding) for rank, finding in findings if not finding.passed]
    if not wrong:
        return findings[0][1]
    rank, finding = wrong[0]
    return Finding(finding.name, False, f"rank {rank}: {finding.sentence}")


def _same_versions(versions: dict[str, str | None], world: World) -> Finding:
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
        "install the same everywhere",
    )


def _links(matrix: list[list[float | None]], world: World) -> Finding:
    """Whether some pair is much slower than others of its kind."""
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


def _groups(world: World) -> tuple[Finding, GroupCheck | None]:
    try:
        check = check_groups(world)
    except Exception as error:
        logger.debug("the grouped calls failed", exc_info=True)
        text = f"not all ranks could send to all: {_first_line(error)}"
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


def _plan(world: World, kernel: str) -> tuple[Finding, PlanCheck | None]:
    try:
        check = check_plan(world, kernel)
    except Exception as error:  # a doctor reports what is broken
        logger.debug("the plan failed", exc_info=True)
        text = f"a small plan could not run: {_first_line(error)}"
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


def _first_line(error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {first}"

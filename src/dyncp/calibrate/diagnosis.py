"""`diagnose`, the doctor: versions, links, messages from all ranks to all ranks, and a small plan
compared with dense attention."""

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.calibrate.calls import (
    Inputs,
    OutAndGrads,
    World,
    dense_attention,
    first_line,
    make_inputs,
    relative_errors,
)
from dyncp.calibrate.links import bandwidth_matrix
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.kernels import reason_for
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology
from dyncp.transport import TransportError
from dyncp.transport.distributed import Distributed

logger = logging.getLogger(__name__)

PACKAGES = ("dyncp", "torch", "triton", "numpy", "numba", "flash-attn-4", "mtkahypar")
# Bytes of the messages between pairs of ranks, by kind of device.
LINK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
# A link this many times slower than the median of its kind is reported.
SLOW_LINK = 4.0
NUM_PHASES, MESSAGE_BYTES = 4, 4096  # of the messages from all ranks to all
TIMEOUT = 60.0  # seconds until missing messages and ranks that do not answer are reported
# The plan has several documents, one long enough to be cut, with two ranges per token.
LENGTHS = (1200, 333, 96, 17)
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(4, 2, 128, "bf16")}
# Of relative errors: bf16 has 8 bits, so results are right to about 0.4 %; they are rounded twice.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
VIRTUAL_RANKS = 4
REPLAYS = 2  # the second run of a plan captures its graphs

Tell = Callable[[str], None]
Buffers = dict[int, Tensor]  # by peer rank


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


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """`communicators` has the number of ranks of each, `operations` the sends and receives of the
    largest grouped call, of which `limit` are allowed. `wrong` has (sender, phase) of messages to
    this rank that arrived with other contents than were sent."""

    backend: str
    ranks: int
    nodes: int
    communicators: dict[str, int]
    operations: int
    limit: int
    phases: int
    wrong: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """`kernel` is what ran; `errors` are relative, of output and gradients, and `replayed` those of
    the same plan replayed as CUDA graphs, None where graphs are not used."""

    kernel: str
    ranks: int
    virtual: bool
    bytes_moved: int
    errors: dict[str, float]
    tolerance: float
    replayed: dict[str, float] | None = None

    def finding(self, name: str, errors: dict[str, float], text: str, advice: str) -> Finding:
        """Whether `errors` are within the tolerance."""
        text = f"{text}: relative error {max(errors.values()):.1e}"
        if all(error <= self.tolerance for error in errors.values()):  # False for nan
            return Finding(name, True, text)
        return Finding(name, False, f"{text}, allowed is {self.tolerance:.0e}: {advice}")


def diagnose(world: World, kernel: str = "auto", tell: Tell = lambda _: None) -> Diagnosis:
    """All ranks call it together."""
    facts: dict[str, Any] = {
        "versions": describe_versions(),
        "machine": describe_machine(),
        "devices": describe_devices(),
        "peer_access": peer_access(),
        "ranks": world.num_ranks,
        "ranks_per_node": world.ranks_per_node,
        "device": str(world.device),
    }
    findings = [check_versions(facts["versions"], world)]
    matrix, groups, in_groups = None, None, True
    if world.num_ranks > 1:
        tell("messages between ranks ...")
        matrix = bandwidth_matrix(world, LINK_BYTES[world.device.type], tell)
        findings.append(check_bandwidths(matrix, world))
        tell("all ranks to all ranks in grouped calls ...")
        finding, groups = check_messages(world)
        findings.append(finding)
        in_groups = all(one.passed for one in _of_all_ranks(finding, world))
    tell("one plan against dense attention ...")
    finding, check = check_results(world, kernel) if in_groups else (NOT_RUN, None)
    findings += [finding, check_graphs(check)]
    facts["bytes_per_second"] = matrix
    facts["groups"] = None if groups is None else asdict(groups)
    facts["plan"] = None if check is None else asdict(check)
    reason = reason_for(kernel, world.device)
    facts["kernel"] = None if check is None else {"name": check.kernel, "reason": reason}
    every = zip(*_of_all_ranks(findings, world), strict=True)
    return Diagnosis(facts, [worst_finding(of_ranks) for of_ranks in every])


def _of_all_ranks(mine: Any, world: World) -> list[Any]:
    if world.num_ranks == 1:
        return [mine]
    every: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(every, mine)
    return every


def worst_finding(findings: Sequence[Finding]) -> Finding:
    """Of all ranks' findings of one check: the first that failed, with its rank."""
    for rank, finding in enumerate(findings):
        if not finding.passed:
            named = f"rank {rank}: {finding.sentence}" if len(findings) > 1 else finding.sentence
            return Finding(finding.name, False, named)
    return findings[0]


# Versions and hardware


def check_versions(versions: dict[str, str | None], world: World) -> Finding:
    every = _of_all_ranks(versions, world)
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


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> dict[str, Any]:
    """The host: system, cores, threads, CUDA and communication backends."""
    affinity = getattr(os, "sched_getaffinity", None)
    backends, nccl = [], None
    if dist.is_available():
        known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
        backends = [name for name, there in known.items() if there]
    if torch.cuda.is_available() and "nccl" in backends:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = ".".join(map(str, numbers))
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "backends": backends,
        "nccl": nccl,
    }


def describe_devices() -> list[dict[str, Any]]:
    """All GPUs that this process sees."""
    every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "index": index,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        for index, properties in enumerate(every)
    ]


def peer_access() -> list[list[bool]]:
    """Which GPUs of this machine can access each other's memory; true on the diagonal."""
    gpus = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]


# Links and grouped calls


def check_bandwidths(matrix: list[list[float | None]], world: World) -> Finding:
    """Whether some pair of ranks is much slower than others of its kind."""
    slow = []
    for inside in (True, False):
        rates = sorted(
            (rate, a, b)
            for a, row in enumerate(matrix)
            for b, rate in enumerate(row)
            if rate is not None and a < b
            and (a // world.ranks_per_node == b // world.ranks_per_node) is inside
        )  # fmt: skip
        if rates:
            median = rates[len(rates) // 2][0]
            slow += [entry for entry in rates if entry[0] * SLOW_LINK < median]
    if not slow:
        known = [rate for row in matrix for rate in row if rate is not None]
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
    if check.wrong:
        sender, phase = check.wrong[0]
        return Finding(
            "groups",
            False,
            f"what came from rank {sender} in phase {phase} is not what it sent "
            f"({len(check.wrong)} such messages): do not train over this network",
        ), check
    groups = " and ".join(f"{name} ({ranks})" for name, ranks in check.communicators.items())
    return Finding(
        "groups",
        True,
        f"all {check.ranks} ranks sent to all over {check.backend}, {check.phases} phases at once: "
        f"up to {check.operations} operations in a grouped call, {check.limit} are allowed; "
        f"{check.nodes} node{'s' if check.nodes > 1 else ''}, "
        f"communicators (ranks): {groups}",
    ), check


def check_groups(world: World, limit: float = TIMEOUT) -> GroupCheck:
    """All ranks send to all, in several phases at once; all ranks call it together. Raises
    TransportError where messages do not arrive within `limit` seconds."""
    on_gpu = world.device.type == "cuda"
    # NCCL's watchdog ends the process, so it has to wait longer than we do.
    transport = Distributed(timeout=2 * limit if on_gpu else limit, device=world.device)
    received = _exchange(transport, world)
    if on_gpu:
        _wait_for_gpu(world, limit)
    return GroupCheck(
        backend="nccl" if on_gpu else "gloo",
        ranks=world.num_ranks,
        nodes=len(set(transport.nodes)),
        communicators={one.name: len(one.members) for one in transport.communicators},
        operations=max(one.largest_call for one in transport.communicators),
        limit=transport.grouped_operations,
        phases=NUM_PHASES,
        wrong=tuple(
            (sender, phase)
            for phase, buffers in enumerate(received)
            for sender, buffer in buffers.items()
            if not torch.equal(buffer, _message(sender, world.rank, phase, world))
        ),
    )


def _exchange(transport: Distributed, world: World) -> list[Buffers]:
    """What arrived in every phase; all phases are in flight at once."""
    [channel] = transport.open()
    peers = [rank for rank in range(world.num_ranks) if rank != world.rank]
    phases = range(NUM_PHASES)
    sent = [{peer: _message(world.rank, peer, phase, world) for peer in peers} for phase in phases]
    received = [{peer: torch.zeros_like(one) for peer, one in sends.items()} for sends in sent]
    for phase in phases:
        channel.launch(phase, sent[phase], received[phase])
    for phase in phases:
        channel.wait(phase)
    channel.finish()
    return received


def _message(sender: int, receiver: int, phase: int, world: World) -> Tensor:
    """Bytes that differ from those of nearby senders, receivers and phases."""
    start = 5 * sender + 11 * receiver + 17 * phase
    count = torch.arange(MESSAGE_BYTES, device=world.device)
    return (count * (1 + phase) + start).remainder(251).to(torch.uint8)


def _wait_for_gpu(world: World, limit: float) -> None:
    """So far only its stream has waited for the messages."""
    done = torch.cuda.current_stream(world.device).record_event()
    deadline = time.monotonic() + limit
    while not done.query():
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {world.rank} waited {limit:g} s for messages that did not arrive"
            )
        time.sleep(0.01)


# One plan


def check_results(world: World, kernel: str) -> tuple[Finding, PlanCheck | None]:
    try:
        check = check_plan(world, kernel)
    except Exception as error:  # a doctor reports what is broken
        logger.debug("the plan failed", exc_info=True)
        text = f"a small plan could not run: {first_line(error)}"
        return Finding("plan", False, text), None
    text = (
        f"a small plan on {check.ranks} {'virtual' if check.virtual else 'real'} ranks, kernel "
        f"{check.kernel}, {check.bytes_moved / 1e6:.1f} MB moved"
    )
    return check.finding("plan", check.errors, text, "do not train with it"), check


def check_graphs(check: PlanCheck | None) -> Finding:
    """Whether replaying the plan as CUDA graphs gives the right results too."""
    if check is None:
        return Finding("graphs", False, "not run: the plan has to work first")
    if check.replayed is None:
        return Finding("graphs", True, "not used: CUDA graphs need a GPU")
    text = "the same plan replayed as CUDA graphs"
    return check.finding("graphs", check.replayed, text, "use DCPExecutor(graphs=False)")


def check_plan(world: World, kernel: str = "auto") -> PlanCheck:
    """Runs a small plan; all ranks call it together, and all get the result."""
    shape, virtual = SHAPES[world.device.type], world.num_ranks == 1
    ranks = VIRTUAL_RANKS if virtual else world.num_ranks
    per_node = ranks if virtual else world.ranks_per_node
    batch = Batch.of([masks.lambda_shaped(n, sinks=16, window=200) for n in LENGTHS])
    config = PlannerConfig(solver="bisection")  # `auto` would not cut so small a batch
    plan = plan_batch(batch, Topology(ranks // per_node, per_node), shape, config)
    virtual_ranks = ranks if virtual else None
    executor = DCPExecutor(
        kernel=kernel, device=world.device, virtual_ranks=virtual_ranks, timeout=TIMEOUT
    )
    step = executor.prepare(plan)
    inputs = make_inputs(batch.num_tokens, shape, world.device)
    before = executor.transport.bytes_sent
    given = _run(step, inputs)
    moved = executor.transport.bytes_sent - before
    exact, replayed = dense_attention(batch, inputs), None
    if executor.engine.graphs.wanted:
        for _ in range(REPLAYS):
            replayed = relative_errors(_run(step, inputs), exact)
    errors, name = relative_errors(given, exact), executor.kernel.name
    return PlanCheck(name, ranks, virtual, moved, errors, TOLERANCES[shape.dtype], replayed)


def _run(step: Step, inputs: Inputs) -> OutAndGrads:
    """Output and gradients of all tokens, in batch order."""
    rows = [torch.from_numpy(part.local_coordinates) for part in step.parts]
    mine = inputs.rows(torch.cat(rows).to(inputs.q.device))
    out = attention(step, *mine.qkv)
    grads = torch.autograd.grad(out, mine.qkv, mine.dout)
    return OutAndGrads(*(torch.cat(step.gather(x)) for x in (out.detach(), *grads)))

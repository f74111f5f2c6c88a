"""`diagnose`, the doctor: checks versions, links, messages between all ranks, and a small plan
against dense attention."""

import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp import masks
from dyncp.blocks import DEFAULT_MASK, AttentionShape, Batch
from dyncp.calibrate.calls import Inputs, OutAndGrads, make_inputs, relative_errors, results_of
from dyncp.calibrate.rates import bandwidth_matrix
from dyncp.calibrate.world import World
from dyncp.checks import usable_cores
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.kernels import reason_for
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology
from dyncp.transport import TransportError
from dyncp.transport.distributed import Distributed
from dyncp.verify import dense_attention

logger = logging.getLogger(__name__)

PACKAGES = ("dyncp", "torch", "triton", "numpy", "numba", "flash-attn-4", "mtkahypar")
# Bytes of the messages between pairs of ranks, by kind of device.
LINK_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
# A link is reported if it is this many times slower than the median of its kind.
SLOW_LINK = 4.0
NUM_PHASES, MESSAGE_BYTES = 4, 4096  # of the messages that all ranks send to all
TIMEOUT = 60.0  # seconds until missing messages and ranks that do not answer are reported
# The plan's documents. One is long enough to be cut; the mask has two key ranges per token.
LENGTHS = (1200, 333, 96, 17)
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(4, 2, 128, "bf16")}
# Largest relative errors. bf16 has 8 bits: a result is exact to 0.4 %, and it is rounded twice.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
VIRTUAL_RANKS = 4
REPLAYS = 2  # the second run of a plan captures its graphs

Tell = Callable[[str], None]
Facts = dict[str, Any]  # values for JSON
Buffers = dict[int, Tensor]  # by peer rank


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: `sentence` says what was found, or what is wrong and what to do."""

    name: str
    passed: bool
    sentence: str


NO_GRAPHS = Finding("graphs", False, "not run: the plan must work first")
NOT_RUN = [
    Finding("plan", False, "not run: the grouped calls between ranks must work first"),
    NO_GRAPHS,
]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Facts for the JSON object, and one finding per check."""

    facts: Facts
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        return all(finding.passed for finding in self.findings)


def diagnose(world: World, kernel: str = "auto", tell: Tell = lambda _: None) -> Diagnosis:
    """Runs all checks. All ranks call it together, and all get the same findings."""
    facts: Facts = {
        "versions": describe_versions(),
        "machine": describe_machine(),
        "devices": describe_devices(),
        "peer_access": peer_access(),
        "ranks": world.num_ranks,
        "ranks_per_node": world.ranks_per_node,
        "device": str(world.device),
        "bytes_per_second": None,
        "groups": None,
        "plan": None,
        "kernel": None,
    }
    findings, in_groups = [check_versions(facts["versions"], world)], True
    if world.num_ranks > 1:
        tell("messages between ranks ...")
        matrix = bandwidth_matrix(world, LINK_BYTES[world.device.type], tell)
        facts["bytes_per_second"] = matrix
        findings.append(check_bandwidths(matrix, world))
        tell("all ranks send to all ranks in grouped calls ...")
        finding, facts["groups"] = check_groups(world)
        findings.append(finding)
        in_groups = all(one.passed for one in _of_all_ranks(finding, world))
    tell("one plan against dense attention ...")
    of_plan, facts["plan"] = check_plan(world, kernel) if in_groups else (NOT_RUN, None)
    findings += of_plan
    if facts["plan"] is not None:
        reason = reason_for(kernel, world.device)
        facts["kernel"] = {"name": facts["plan"]["kernel"], "reason": reason}
    every = zip(*_of_all_ranks(findings, world), strict=True)
    return Diagnosis(facts, [worst_finding(of_ranks) for of_ranks in every])


def _of_all_ranks(mine: Any, world: World) -> list[Any]:
    if world.num_ranks == 1:
        return [mine]
    every: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(every, mine)
    return every


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def worst_finding(findings: Sequence[Finding]) -> Finding:
    """The first failed finding of one check with its rank, or rank 0's if none failed; `findings`
    has one per rank."""
    for rank, finding in enumerate(findings):
        if not finding.passed:
            named = f"rank {rank}: {finding.sentence}" if len(findings) > 1 else finding.sentence
            return Finding(finding.name, False, named)
    return findings[0]


# Versions and hardware


def check_versions(versions: dict[str, str | None], world: World) -> Finding:
    """Whether this rank's versions equal those of rank 0."""
    first = _of_all_ranks(versions, world)[0]
    other = ", ".join(name for name in versions if versions[name] != first[name])
    if other:
        text = f"versions of {other} differ from rank 0: install the same versions on all ranks"
        return Finding("versions", False, text)
    shown = ", ".join(f"{name} {found or 'missing'}" for name, found in versions.items())
    return Finding("versions", True, shown)


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None if one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def describe_machine() -> dict[str, Any]:
    """The host: system, cores, threads, CUDA and communication backends."""
    backends, nccl = [x for x in ("gloo", "nccl") if dist.is_backend_available(x)], None
    if torch.cuda.is_available() and "nccl" in backends:
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = ".".join(map(str, numbers))
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": usable_cores(),
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
    """Whether each GPU of this machine can access the memory of each other one; true on the
    diagonal."""
    gpus = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]


# Links and grouped calls


def check_bandwidths(matrix: list[list[float | None]], world: World) -> Finding:
    """Whether any pair of ranks is much slower than other pairs inside, or between, nodes."""
    a, b = np.triu_indices(world.num_ranks, 1)
    rate = np.asarray(matrix, np.float64)[a, b]
    inside = a // world.ranks_per_node == b // world.ranks_per_node
    slow = np.zeros(len(rate), np.bool_)
    for kind in (inside, ~inside):
        if kind.any():
            slow |= kind & (rate * SLOW_LINK < np.median(rate[kind]))
    if not slow.any():
        text = f"{rate.min() / 1e9:.2f} to {rate.max() / 1e9:.2f} GB/s between ranks"
        return Finding("links", True, text)
    worst = np.where(slow, rate, np.inf).argmin()
    return Finding(
        "links",
        False,
        f"ranks {a[worst]} and {b[worst]} exchange {rate[worst] / 1e9:.3f} GB/s, less than a "
        f"quarter of the median of such links ({slow.sum()} such pairs): check their cables, "
        "switches and NCCL settings",
    )


def check_groups(world: World, limit: float = TIMEOUT) -> tuple[Finding, Facts | None]:
    """All ranks send to all ranks, in several phases at once, and messages must arrive within
    `limit` seconds. All ranks call it together.

    Of the facts, `communicators` has the number of ranks of each communicator, `operations` the
    sends and receives of the largest grouped call, of which `limit` are allowed, and `wrong` the
    (sender, phase) of messages to this rank that arrived corrupted."""
    on_gpu = world.device.type == "cuda"
    try:
        # NCCL's watchdog ends the process, so it must wait longer than we do.
        transport = Distributed(timeout=2 * limit if on_gpu else limit, device=world.device)
        received = _exchange(transport, world)
        if on_gpu:
            _wait_for_gpu(world, limit)
    except Exception as error:
        logger.debug("the grouped calls failed", exc_info=True)
        text = f"the all-to-all test failed: {first_line(error)}"
        return Finding("groups", False, text), None
    wrong = [
        (sender, phase)
        for phase, buffers in enumerate(received)
        for sender, buffer in buffers.items()
        if not torch.equal(buffer, _message(sender, world.rank, phase, world))
    ]
    facts = {
        "backend": "nccl" if on_gpu else "gloo",
        "ranks": world.num_ranks,
        "nodes": len(set(transport.nodes)),
        "communicators": {one.name: len(one.members) for one in transport.communicators},
        "operations": max(one.largest_call for one in transport.communicators),
        "limit": transport.grouped_operations,
        "phases": NUM_PHASES,
        "wrong": wrong,
    }
    if wrong:
        sender, phase = wrong[0]
        text = (
            f"data from rank {sender} arrived corrupted in phase {phase} ({len(wrong)} such "
            "messages): do not train over this network"
        )
        return Finding("groups", False, text), facts
    members = [f"{one.name} ({len(one.members)})" for one in transport.communicators]
    text = (
        f"all {facts['ranks']} ranks sent to all over {facts['backend']}, {NUM_PHASES} phases at "
        f"once: up to {facts['operations']} operations in a grouped call, {facts['limit']} are "
        f"allowed; {facts['nodes']} node{'s' if len(set(transport.nodes)) > 1 else ''}, "
        f"communicators (ranks): {' and '.join(members)}"
    )
    return Finding("groups", True, text), facts


def _exchange(transport: Distributed, world: World) -> list[Buffers]:
    """Sends all phases at once and returns the received messages of each phase, by sender."""
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
    """Bytes that differ between senders, receivers and phases with nearby numbers."""
    start = 5 * sender + 11 * receiver + 17 * phase
    count = torch.arange(MESSAGE_BYTES, device=world.device)
    return (count * (1 + phase) + start).remainder(251).to(torch.uint8)


def _wait_for_gpu(world: World, limit: float) -> None:
    """Makes the host wait, at most `limit` seconds: so far only the stream has waited."""
    done = torch.cuda.current_stream(world.device).record_event()
    deadline = time.monotonic() + limit
    while not done.query():
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {world.rank} waited {limit:g} s for messages that did not arrive"
            )
        time.sleep(0.01)


# One plan


def check_plan(world: World, kernel: str = "auto") -> tuple[list[Finding], Facts | None]:
    """Whether a small plan computes the same as dense attention, also when it is replayed as CUDA
    graphs. All ranks call it together.

    Of the facts, `kernel` is the kernel that ran, `errors` are the relative errors of output and
    gradients, and `replayed` those with CUDA graphs, or None if graphs are not used."""
    try:
        facts = _run_plan(world, kernel)
    except Exception as error:  # reported as a finding
        logger.debug("the plan failed", exc_info=True)
        text = f"a small plan could not run: {first_line(error)}"
        return [Finding("plan", False, text), NO_GRAPHS], None
    text = (
        f"a small plan on {facts['ranks']} {'virtual' if facts['virtual'] else 'real'} ranks, "
        f"kernel {facts['kernel']}, {facts['bytes_moved'] / 1e6:.1f} MB moved"
    )
    graphs = Finding("graphs", True, "not used: CUDA graphs need a GPU")
    if facts["replayed"] is not None:
        again = "the same plan, replayed as CUDA graphs"
        graphs = _compared("graphs", again, facts, "replayed", "use DCPExecutor(graphs=False)")
    return [_compared("plan", text, facts, "errors", "do not train with it"), graphs], facts


def _compared(name: str, text: str, facts: Facts, field: str, advice: str) -> Finding:
    """Whether all errors in this field of the facts are within the tolerance."""
    errors, allowed = facts[field].values(), facts["tolerance"]
    text = f"{text}: relative error {max(errors):.1e}"
    if all(error <= allowed for error in errors):  # False for NaN
        return Finding(name, True, text)
    return Finding(name, False, f"{text}, at most {allowed:.0e} is allowed: {advice}")


def _run_plan(world: World, kernel: str) -> Facts:
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
    given = _results(step, inputs)
    moved = executor.transport.bytes_sent - before
    q, k, v, dout = (x.detach().double().cpu().numpy() for x in (*inputs.qkv, inputs.dout))
    dense = dense_attention(batch, DEFAULT_MASK, (q, k, v), dout)
    exact = OutAndGrads(*(torch.from_numpy(getattr(dense, x)) for x in OutAndGrads._fields))
    replayed = None
    if executor.engine.graphs.wanted:
        for _ in range(REPLAYS):
            replayed = relative_errors(_results(step, inputs), exact)
    return {
        "kernel": executor.kernel.name,
        "ranks": ranks,
        "virtual": virtual,
        "bytes_moved": moved,
        "errors": relative_errors(given, exact),
        "tolerance": TOLERANCES[shape.dtype],
        "replayed": replayed,
    }


def _results(step: Step, inputs: Inputs) -> OutAndGrads:
    """Output and gradients of all tokens in batch order, in fp64 on the CPU."""
    rows = [torch.from_numpy(part.local_coordinates) for part in step.parts]
    mine = inputs.rows(torch.cat(rows).to(inputs.q.device))
    results = results_of(partial(attention, step), mine)
    return OutAndGrads(*(torch.cat(step.gather(x)).double().cpu() for x in results))

"""The doctor's runs on all ranks: messages from all to all, and a plan against dense attention."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp import masks
from dyncp.blocks import AttentionShape, Batch
from dyncp.calibrate.calls import Inputs, make_inputs
from dyncp.calibrate.dense import Results, dense_attention, relative_errors
from dyncp.calibrate.environment import World
from dyncp.executor import DCPExecutor, Step, attention
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology
from dyncp.transport import Channel, Distributed, TransportError

# Several documents, one of them long enough to be cut, with two ranges per token.
LENGTHS = (1200, 333, 96, 17)
SHAPES = {"cpu": AttentionShape(4, 2, 64, "fp32"), "cuda": AttentionShape(4, 2, 128, "bf16")}
# Of relative errors: bf16 has 8 bits, so results are right to about 0.4 %; they are rounded twice.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
VIRTUAL_RANKS = 4
REPLAYS = 2  # the second run of a plan captures its graphs
NUM_PHASES = 4
MESSAGE_BYTES = 4096
TIMEOUT = 60.0  # seconds until missing messages and ranks that do not answer are reported

Buffers = dict[int, Tensor]  # by peer rank


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

    @property
    def passed(self) -> bool:
        return self.allows(self.errors)

    def allows(self, errors: dict[str, float]) -> bool:
        return all(error <= self.tolerance for error in errors.values())  # False for nan


def check_plan(world: World, kernel: str = "auto") -> PlanCheck:
    """Runs a small plan; all ranks call it together, and all get the result."""
    shape, virtual = SHAPES[world.device.type], world.num_ranks == 1
    ranks = VIRTUAL_RANKS if virtual else world.num_ranks
    per_machine = ranks if virtual else world.ranks_per_machine
    batch = Batch.of([masks.lambda_shaped(n, sinks=16, window=200) for n in LENGTHS])
    config = PlannerConfig(solver="bisection")  # `auto` would not cut so small a batch
    plan = plan_batch(batch, Topology(ranks // per_machine, per_machine), shape, config)
    executor = DCPExecutor(
        kernel=kernel,
        device=world.device,
        virtual_ranks=ranks if virtual else None,
        timeout=TIMEOUT,
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
    return PlanCheck(
        kernel=executor.kernel.name,
        ranks=ranks,
        virtual=virtual,
        bytes_moved=moved,
        errors=relative_errors(given, exact),
        tolerance=TOLERANCES[shape.dtype],
        replayed=replayed,
    )


def _run(step: Step, inputs: Inputs) -> Results:
    """Output and gradients of all tokens, in batch order."""
    rows = [torch.from_numpy(part.local_coordinates) for part in step.parts]
    mine = inputs.rows(torch.cat(rows).to(inputs.q.device))
    out = attention(step, *mine.qkv)
    grads = torch.autograd.grad(out, mine.qkv, mine.dout)
    return Results(*(torch.cat(step.gather(x)) for x in (out.detach(), *grads)))


@dataclass(frozen=True, slots=True)
class GroupCheck:
    """`communicators` has the number of ranks of each, `operations` the sends and receives of the
    largest grouped call, of which `limit` are allowed. `wrong` has (sender, phase) of messages to
    this rank that arrived with other contents than were sent."""

    backend: str
    ranks: int
    machines: int
    communicators: dict[str, int]
    operations: int
    limit: int
    phases: int
    wrong: tuple[tuple[int, int], ...]

    @property
    def passed(self) -> bool:
        return not self.wrong


def check_groups(world: World, limit: float = TIMEOUT) -> GroupCheck:
    """All ranks send to all, in several phases at once; all ranks call it together. Raises
    TransportError where messages do not arrive within `limit` seconds."""
    on_gpu = world.device.type == "cuda"
    # NCCL's watchdog ends the process, so it has to wait longer than we do.
    transport = Distributed(timeout=2 * limit if on_gpu else limit, device=world.device)
    peers = [rank for rank in range(world.num_ranks) if rank != world.rank]
    [channel] = transport.open()
    received = _exchange(channel, world, peers)
    _wait_for_device(world, limit)
    return GroupCheck(
        backend="nccl" if on_gpu else "gloo",
        ranks=world.num_ranks,
        machines=len(set(transport.machines)),
        communicators={one.name: len(one.members) for one in transport.communicators},
        operations=max(one.largest_call for one in transport.communicators),
        limit=transport.grouped_operations,
        phases=NUM_PHASES,
        wrong=_wrong(received, world),
    )


def _exchange(channel: Channel, world: World, peers: list[int]) -> list[Buffers]:
    """What arrived in every phase; all phases are in flight at once."""
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


def _wrong(received: list[Buffers], world: World) -> tuple[tuple[int, int], ...]:
    return tuple(
        (sender, phase)
        for phase, buffers in enumerate(received)
        for sender, buffer in buffers.items()
        if not torch.equal(buffer, _message(sender, world.rank, phase, world))
    )


def _wait_for_device(world: World, limit: float) -> None:
    """Waits until the GPU is done: so far only its stream has waited."""
    if world.device.type != "cuda":
        return
    done = torch.cuda.current_stream(world.device).record_event()
    deadline = time.monotonic() + limit
    while not done.query():
        if time.monotonic() > deadline:
            raise TransportError(
                f"rank {world.rank} waited {limit:g} s for messages that did not arrive"
            )
        time.sleep(0.01)

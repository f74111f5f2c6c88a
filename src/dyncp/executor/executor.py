"""DCPExecutor: makes plans ready to run on a group of ranks."""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dyncp.checks import finite_number, instance_of, whole_number
from dyncp.executor.engine import CLOSED, HEADROOM, Engine
from dyncp.executor.graphs import Graphs
from dyncp.executor.step import PreparedPlan, Step
from dyncp.executor.warm_up import check_kernel, warm_up
from dyncp.kernels import Kernel, RowOps, choose_kernel, choose_row_ops
from dyncp.plan import AttentionShape, MemoryUse, Plan, RankPlan
from dyncp.transport import InProcess, Transport
from dyncp.transport.distributed import Distributed, ranks_text

logger = logging.getLogger(__name__)

MOST_AHEAD = 64  # plans that are prepared ahead: some are never asked for


class DCPExecutor:
    """Runs plans on the ranks of `group` (ProcessGroup or one-dimensional DeviceMesh).

    Without a group it takes the world, or one rank where torch.distributed is not initialised.
    `virtual_ranks=N` drives N ranks in this process instead. `device` is where q, k and v are: by
    default this process's current GPU where the group has NCCL (or the mesh is one of GPUs), and
    the CPU everywhere else; the log says which. `timeout` bounds every wait, seconds.
    `deterministic` asks for a kernel that gives the same bits every time. `row_ops` replaces what
    moves and merges rows, which is otherwise chosen by device. `graphs` says whether what a plan
    launches between two communication points is captured and replayed as one CUDA graph: "auto"
    does so on GPUs, "serial" with one launch after the other (for profiles). All ranks of the group
    create it together.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        kernel: str | Kernel = "auto",
        transport: Transport | None = None,
        virtual_ranks: int | None = None,
        device: torch.device | str | None = None,
        deterministic: bool = True,
        timeout: float = 600.0,
        row_ops: RowOps | None = None,
        graphs: bool | str = "auto",
    ) -> None:
        if sum(choice is not None for choice in (group, transport, virtual_ranks)) > 1:
            raise ValueError("pass only one of group=, transport= and virtual_ranks=")
        if finite_number("timeout", timeout) <= 0:
            raise ValueError(f"timeout is {timeout}; it must be positive (seconds)")
        if transport is not None and not hasattr(transport, "agree"):
            raise ValueError(f"transport is {type(transport).__name__}; expected a Transport")
        if device is None:
            with_processes = transport is None and virtual_ranks is None and dist.is_initialized()
            device = _default_device(group, with_processes=with_processes)
        self.device = _with_index(device)
        chosen = (group, transport, virtual_ranks)
        self._is_alone = all(x is None for x in chosen) and not dist.is_initialized()
        self.kernel = choose_kernel(kernel, self.device, deterministic)
        self.transport = transport or _transport(group, virtual_ranks, timeout, self.device)
        row_ops = choose_row_ops(self.device) if row_ops is None else row_ops
        replay = Graphs.choose(graphs, self.device, self.kernel)
        shared = (self.transport, self.device, row_ops, replay)
        check, other = check_kernel if self.device.type == "cuda" else None, None
        if kernel == "auto" and self.kernel.name == "flash4":
            triton = choose_kernel("triton", self.device, deterministic)
            other = Engine(triton, *shared, check=check)
        self.engine = Engine(self.kernel, *shared, alternative=other, check=check)
        self._is_closed, self._owns_transport = False, transport is None
        self._latest: Step | None = None
        self._unused = UnusedSteps()
        self._ahead: OrderedDict[int, PreparedPlan] = OrderedDict()  # by id of the first part

    @property
    def latest(self) -> Step:
        """The handle of the latest `prepare`."""
        if self._latest is None:
            raise ValueError("attention before prepare: call executor.prepare(plan) first")
        return self._latest

    def prepare(self, plan: Plan | RankPlan) -> Step:
        """An immutable handle for one plan: the ranks have agreed on it, its calls are lowered.

        All ranks of the group call it together; ranks that hold different plans all get the error.
        Plans of a DCPDataLoader over the same ranks were agreed on before: nothing is sent.
        """
        instance_of("the plan of prepare()", plan, (Plan, RankPlan), "a Plan or a RankPlan")
        if self._is_closed:
            raise ValueError(CLOSED)
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this executor was made before torch.distributed was initialised and runs one rank "
                f"alone, but there are {dist.get_world_size()}; make it after init_process_group, "
                "or give virtual_ranks=1"
            )
        self._unused.check()
        parts = self._local_parts(plan)
        self._agree(parts[0])
        prepared = self._ahead.pop(id(parts[0]), None)
        if prepared is None or prepared.parts != parts:
            prepared = PreparedPlan(parts, self.engine)
        self._unused.add(prepared.send())
        self._latest = Step(prepared)
        return self._latest

    def prepare_ahead(self, plan: Plan | RankPlan) -> None:
        """Does most of what `prepare` will do for this very plan, in any thread: it asks neither
        the other ranks nor the device. `DCPDataLoader(..., executor=executor)` does it for every
        batch in the background."""
        instance_of("the plan of prepare_ahead()", plan, (Plan, RankPlan), "a Plan or a RankPlan")
        parts = self._local_parts(plan)
        self._ahead[id(parts[0])] = PreparedPlan(parts, self.engine)
        while len(self._ahead) > MOST_AHEAD:
            self._ahead.popitem(last=False)

    def warm_up(self, shape: AttentionShape, *, head_groups: int = 1, most_ranges: int = 4) -> None:
        """Compiles what attention of this shape can need on ranks with more than 128 rows, so that
        no step does later: for plans with up to `head_groups`, and rows with up to `most_ranges`
        ranges of key rows (at most 64; usual masks in blocks of 128 tokens or more have no more
        than 4).

        Every rank may call it alone. It runs small plans on virtual ranks, sends nothing, and
        compares every result with dense attention: a kernel that is wrong is not used.
        """
        instance_of("shape", shape, AttentionShape, "an AttentionShape")
        head_groups = whole_number("head_groups", head_groups, 1)
        most_ranges = whole_number("most_ranges", most_ranges, 1)
        for engine in self._engines():
            try_it = partial(warm_up, engine, shape, head_groups, most_ranges)
            if not engine.examine(shape, try_it):
                break
        self.engine.fitting(shape)

    def close(self) -> None:
        """Gives back its memory; its process groups serve the next executor over the same ranks.
        All ranks of the group call it together; no plan can be prepared or run after that.
        `with DCPExecutor(...) as executor:` does it."""
        if not self._is_closed:
            self._is_closed, self._latest = True, None
            self._ahead.clear()
            for engine in self._engines():
                engine.close()
            if self._owns_transport:
                self.transport.close()

    @property
    def num_ranks(self) -> int:
        """Ranks that plans have to be made for."""
        return self.transport.num_ranks

    def __enter__(self) -> "DCPExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engines(self) -> list[Engine]:
        other = self.engine.alternative
        return [self.engine] if other is None else [self.engine, other]

    def reserve(self, plans: Sequence[Plan], shape: AttentionShape | None = None) -> int:
        """Takes memory for calls on the current stream now, so that it need not grow later: 25 %
        more than the largest of these plans takes, on whichever rank. Returns the bytes.

        The plans are samples of batches to come; `shape` is that of the calls (default: the plans'
        own). They are not run, and ranks may have different ones.
        """
        if not plans:
            raise ValueError("reserve() got no plans; give some of batches like those to come")
        for plan in plans:
            instance_of("a plan of reserve()", plan, Plan, "a Plan")
        shape = plans[0].parts[0].shape if shape is None else shape
        instance_of("shape", shape, AttentionShape, "an AttentionShape")
        engine = self.engine.fitting(shape)
        arena = engine.arena()
        needed = max(self._needed(plan.memory(shape, engine.style)) for plan in plans)
        arena.reserve(int(needed * HEADROOM))
        return arena.capacity

    def _needed(self, memory: MemoryUse) -> int:
        """Bytes of a plan's largest call, on as many ranks as this process has: those that take
        most, since ranks change places from batch to batch."""
        count = len(self.transport.ranks)
        return max(int(np.sort(of)[-count:].sum()) for of in (memory.forward, memory.backward))

    def _local_parts(self, plan: Plan | RankPlan) -> tuple[RankPlan, ...]:
        ranks = self.transport.ranks
        if isinstance(plan, Plan):
            parts = tuple(part for part in plan.parts if part.rank in ranks)
        else:
            parts = (plan,)
        if plan.num_ranks != self.transport.num_ranks:
            raise ValueError(
                f"the plan is for {plan.num_ranks} ranks; this executor's group has "
                f"{self.transport.num_ranks}"
            )
        if tuple(part.rank for part in parts) != ranks:
            raise ValueError(
                f"got the part of rank {', '.join(str(part.rank) for part in parts)}; this process "
                f"runs rank {', '.join(map(str, ranks))}"
                + (" (give the whole Plan)" if len(ranks) > 1 else "")
            )
        return parts

    def _agree(self, part: RankPlan) -> None:
        """Asks all ranks, unless the loader did so while it prefetched the plan."""
        if part.agreed_by and part.agreed_by == self.transport.global_ranks:
            return
        words = self.transport.agree(bytes.fromhex(part.fingerprint + part.digest))
        plans: dict[bytes, list[int]] = {}
        for rank, word in enumerate(words):
            plans.setdefault(word, []).append(rank)
        if len(plans) > 1:
            held = "; ".join(
                f"{ranks_text(ranks)}: batch {word[:16].hex()}, plan {word[16:].hex()}"
                for word, ranks in plans.items()
            )
            batches = len({word[:16] for word in plans})
            what = "different batches" if batches > 1 else "different plans of the same batch"
            raise ValueError(f"ranks hold {what}: {held}")


def _default_device(group: Any, *, with_processes: bool) -> str:
    """CUDA for processes that talk over NCCL. Inputs would tell, but kernel, groups and memory are
    chosen before the first call."""
    if not torch.cuda.is_available():
        return "cpu"
    device, reason = "cpu", "the ranks are not processes"
    if with_processes and hasattr(group, "get_group"):
        device, reason = group.device_type, "the DeviceMesh has this type"
    elif with_processes and (group is None or isinstance(group, dist.ProcessGroup)):
        has_nccl = "cuda:nccl" in dist.get_backend_config(group)
        device = "cuda" if has_nccl else "cpu"
        reason = f"the process group has {'NCCL' if has_nccl else 'no NCCL'}"
    logger.info("device %r: %s; pass device= for another", device, reason)
    return device


def _with_index(device: torch.device | str) -> torch.device:
    """Tensors say `cuda:0` where users say `cuda`."""
    try:
        found = torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device is {device!r}, which is not available: {reason}") from error
    return found


def _transport(
    group: Any, virtual_ranks: int | None, timeout: float, device: torch.device
) -> Transport:
    if virtual_ranks is not None:
        return InProcess(virtual_ranks)
    if group is None and not dist.is_initialized():
        return InProcess(1)
    return Distributed(group, timeout, device)


WARNED, MOST = 3, 16  # dropped in a row: a few may be skipped, or prepared for another purpose
UNUSED = (
    "%d steps in a row were prepared and dropped, and attention was called with none of them: if "
    "this is training, the model sees this rank's tokens alone. A Transformers model needs "
    "attach(model); layers of your own call attention(step, q, k, v)"
)


class UnusedSteps:
    """Notices a model that takes an executor's steps and never calls attention with them.

    A Transformers model swallows keywords that it does not know: one that was never attached trains
    on each rank's rows alone, without an error. Its steps are dropped unused, one after the other.
    Only plans of a loader over several ranks are watched: others may well be prepared for another
    purpose."""

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[PreparedPlan], set[Any]]] = []
        self._dropped = 0

    def add(self, prepared: PreparedPlan) -> None:
        if len(prepared.parts[0].agreed_by) > 1:
            self._watched.append((weakref.ref(prepared), prepared.accepted))

    def check(self) -> None:
        """Warns if the latest steps that are gone were unused; raises ValueError if many were."""
        waiting = []
        for reference, accepted in self._watched:
            if accepted:
                self._dropped = 0
            elif reference() is None:
                self._dropped += 1
            else:
                waiting.append((reference, accepted))
        self._watched = waiting
        if self._dropped == WARNED:
            logger.warning(UNUSED, self._dropped)
        if self._dropped >= MOST:
            dropped, self._dropped = self._dropped, 0
            raise ValueError(UNUSED % dropped)

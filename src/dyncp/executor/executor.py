"""DCPExecutor: prepares plans to run on a group of ranks."""

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
from dyncp.executor.engine import HEADROOM, Engine
from dyncp.executor.graphs import Graphs
from dyncp.executor.step import PreparedPlan, Step
from dyncp.executor.warm_up import MOST_RANGES, check_kernel, warm_up
from dyncp.gradients import GradientCheck
from dyncp.kernels import Kernel, RowOps, choose_kernel, choose_row_ops
from dyncp.plan import AgreedPlan, AttentionShape, MemoryUse, Plan, RankPlan
from dyncp.topology import data_dimensions
from dyncp.transport import InProcess, Transport
from dyncp.transport.distributed import Distributed, ranks_text

logger = logging.getLogger(__name__)

MOST_AHEAD = 64  # plans that are prepared ahead; some of them are never used


class DCPExecutor:
    """Runs plans on the ranks of `group` (a ProcessGroup, or a DeviceMesh: its dimension "cp" if it
    has several). All ranks of the group create the executor together.

    Without a group it uses the world, or one rank if torch.distributed is not initialised.
    `virtual_ranks=N` runs N ranks in this process instead. `device` is the device of q, k and v.
    The default is this process's current GPU if the group uses NCCL (or the mesh consists of GPUs),
    and the CPU otherwise; the log says which. `timeout` limits every wait, in seconds.
    `deterministic` requests a kernel that always computes the same bits. `row_ops` replaces the
    operations that move and merge rows, which otherwise depend on the device. `graphs` says whether
    the work between two communication points is captured and replayed as a CUDA graph: "auto" does
    so on GPUs; "serial" does so without parallel streams, for profiling. `check_gradients` checks
    in the first optimiser steps that gradients are sums over ranks and that weights are equal.
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
        check_gradients: bool = True,
    ) -> None:
        chosen = [x for x in (group, transport, virtual_ranks) if x is not None]
        if len(chosen) > 1:
            raise ValueError("pass only one of group=, transport= and virtual_ranks=")
        if finite_number("timeout", timeout) <= 0:
            raise ValueError(f"timeout is {timeout}; it must be positive (seconds)")
        if transport is not None and not hasattr(transport, "agree"):
            raise ValueError(f"transport is {type(transport).__name__}; expected a Transport")
        if device is None:
            with_processes = transport is None and virtual_ranks is None and dist.is_initialized()
            device = _default_device(group, with_processes=with_processes)
        self.device = _with_index(device)
        self._is_alone = not chosen and not dist.is_initialized()
        self._deterministic = deterministic
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
        self._owns_transport = transport is None
        self._gradients = _gradient_check(group, self.transport) if check_gradients else None
        for engine in self._engines():
            engine.gradients = self._gradients
        self._latest: Step | None = None
        self._unused = UnusedSteps()
        self._ahead: OrderedDict[int, PreparedPlan] = OrderedDict()  # by id of the first part

    @property
    def priced(self) -> tuple[bool, bool]:
        """What a `CostModel` must know: whether calls are replayed as CUDA graphs, and whether the
        kernel always computes the same bits."""
        return self.engine.graphs.wanted, self._deterministic

    @property
    def latest(self) -> Step:
        """The handle that `prepare` returned last."""
        if self._latest is None:
            raise ValueError("attention before prepare: call executor.prepare(plan) first")
        return self._latest

    def prepare(self, plan: Plan | RankPlan) -> Step:
        """Makes a plan ready to run and returns its handle.

        All ranks of the group call it together and check that they hold the same plan; if not, all
        of them raise. Plans of a DCPDataLoader over the same ranks were checked by the loader.
        """
        self.engine.check_open()
        if self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "this executor was made before torch.distributed was initialised, for a single "
                f"rank, but the world has {dist.get_world_size()}; create it after "
                "init_process_group, or pass virtual_ranks=1"
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
        """Does most of the work of `prepare` for this plan object in advance. It may run in any
        thread, since it uses neither other ranks nor the device. `DCPDataLoader(...,
        executor=executor)` calls it for every batch in the background."""
        parts = self._local_parts(plan)
        self._ahead[id(parts[0])] = PreparedPlan(parts, self.engine)
        while len(self._ahead) > MOST_AHEAD:
            self._ahead.popitem(last=False)

    def warm_up(self, shape: AttentionShape, *, head_groups: int = 1, most_ranges: int = 4) -> None:
        """Compiles all kernels that attention of this shape may need on ranks with more than 128
        rows, so that no training step has to. Covers plans with up to `head_groups` head groups and
        rows with up to `most_ranges` ranges of key rows (at most 64; usual masks in blocks of 128
        tokens or more have no more than 4).

        It needs no other rank: it runs small plans on virtual ranks and sends nothing. Every result
        is compared with dense attention, and a kernel with wrong results is not used.
        """
        instance_of("shape", shape, AttentionShape, "an AttentionShape")
        head_groups = whole_number("head_groups", head_groups, 1)
        most_ranges = whole_number("most_ranges", most_ranges, 1, MOST_RANGES)
        for engine in self._engines():
            try_it = partial(warm_up, engine, shape, head_groups, most_ranges)
            if not engine.examine(shape, try_it):
                break
        self.engine.fitting(shape)

    def close(self) -> None:
        """Frees its memory and keeps its process groups for the next executor over the same ranks.
        All ranks of the group call it together; afterwards no plan can be prepared or run.
        `with DCPExecutor(...) as executor:` calls it at the end."""
        self._latest = None
        self._ahead.clear()
        if self._gradients is not None:
            self._gradients.close()
        for engine in self._engines():
            engine.close()
        if self._owns_transport:
            self.transport.close()

    @property
    def num_ranks(self) -> int:
        """The number of ranks that plans must be made for."""
        return self.transport.num_ranks

    def __enter__(self) -> "DCPExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engines(self) -> list[Engine]:
        other = self.engine.alternative
        return [self.engine] if other is None else [self.engine, other]

    def reserve(self, plans: Sequence[Plan], shape: AttentionShape | None = None) -> int:
        """Allocates memory for calls on the current stream now, so that it need not grow later:
        25 % more than the largest of these plans needs on any rank. Returns the size in bytes.

        The plans are samples of future batches; they are not run, and may differ between ranks.
        `shape` is the shape of the calls (default: that of the plans).
        """
        if not plans:
            raise ValueError("reserve() got no plans; pass plans of typical batches")
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
        """Bytes of a plan's largest call. This process runs `count` ranks and may get the largest
        parts of any batch, so the `count` largest ranks are added up."""
        count = len(self.transport.ranks)
        return max(int(np.sort(of)[-count:].sum()) for of in (memory.forward, memory.backward))

    def _local_parts(self, plan: Plan | RankPlan) -> tuple[RankPlan, ...]:
        instance_of("the plan of prepare()", plan, (Plan, RankPlan), "a Plan or a RankPlan")
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
                + (" (pass the whole Plan)" if len(ranks) > 1 else "")
            )
        return parts

    def _agree(self, part: RankPlan) -> None:
        """Checks that all ranks hold the same plan, unless the loader has checked it already."""
        if isinstance(part, AgreedPlan) and part.agreed_by == self.transport.global_ranks:
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


def _gradient_check(group: Any, transport: Transport) -> GradientCheck | None:
    """The check of gradient sums over all ranks with different tokens; None if there is one rank.
    If the group is smaller than the world, it may be one of several replicas, which only a mesh
    tells: the executor's, or that of the loader."""
    if not isinstance(transport, Distributed):
        return None
    if hasattr(group, "get_group"):
        group = group._get_root_mesh()
        known = group.size() if group.ndim == 1 or data_dimensions(group) else 0
    else:
        known = transport.num_ranks
    ranks = dist.get_world_size()
    return GradientCheck(group, is_known=known == ranks) if ranks > 1 else None


def _default_device(group: Any, *, with_processes: bool) -> str:
    """CUDA for processes that communicate over NCCL. The device of the inputs would be a better
    guide, but kernel, groups and memory are chosen before the first call."""
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
    """The device as tensors report it: `cuda:0` for `cuda`."""
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


# Unused steps in a row that lead to a warning, and to an error. A few may be unused on purpose.
WARNED, MOST = 3, 16
UNUSED = (
    "%d steps in a row were prepared and dropped, and attention was called with none of them: if "
    "this is training, the model sees only this rank's tokens. A Transformers model needs "
    "attach(model); layers of your own call attention(step, q, k, v)"
)


class UnusedSteps:
    """Detects a model that is passed an executor's steps but never calls attention with them.

    A Transformers model ignores unknown keywords, so a model that was never attached trains on each
    rank's rows separately, without an error; every step is dropped unused. Only plans of a loader
    over several ranks are watched: other plans may be prepared for other purposes."""

    def __init__(self) -> None:
        self._watched: list[tuple[weakref.ref[PreparedPlan], set[Any]]] = []
        self._dropped = 0

    def add(self, prepared: PreparedPlan) -> None:
        part = prepared.parts[0]
        if isinstance(part, AgreedPlan) and len(part.agreed_by) > 1:
            self._watched.append((weakref.ref(prepared), prepared.accepted))

    def check(self) -> None:
        """Warns if the last few dropped steps were unused; raises ValueError if many were."""
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

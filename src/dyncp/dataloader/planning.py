"""Plans of batches: what they are made for (model, nodes, costs), the planning process that makes
them (both ends), and the static method that replaces it. `SampleSeconds` predicts what a sample
takes.

The planning process imports this module, and neither torch nor CUDA. It is started as a program of
its own, not by `multiprocessing`, so the user's script is not imported again. A request is a call
with numpy arguments, pickled over a socket pair, and so is its reply. The process exits when its
parent is gone, even in the middle of a plan.
"""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

import dyncp
from dyncp.blocks import AttentionShape, Batch, Direction, dtype_name
from dyncp.cost import (
    PROFILES,
    CostModel,
    ModelConfig,
    Profile,
    from_transformers_config,
    profile_for_device,
    tell_profile,
)
from dyncp.cost.profile import CPU
from dyncp.dataloader.options import LoaderConfig
from dyncp.masks import Mask, MaskFunction, NamedMasks
from dyncp.plan import Plan, encode_part
from dyncp.planner import PlannerConfig, plan_batch
from dyncp.topology import Topology

if TYPE_CHECKING:
    from dyncp.dataloader.ranks import LoaderRanks

logger = logging.getLogger(__name__)

STATIC_SOLVER = "zigzag"  # fits every batch, mask and number of ranks
# Of a decoder of unknown sizes, in units of its hidden size: those of Llama-3-8B.
LAYERS, FFN, VOCAB = 32, 3.5, 32
OVERRIDE_HINT = (
    "pass topology=preset(name, nodes, ranks), or cost=CostModel(profile, shape), for another"
)


ATTEMPTS = 3  # a batch that kills the planner this often gets a static plan
KILL_SECONDS = 5.0
PARENT_CHECK_SECONDS = 1.0
START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from dyncp.dataloader.planning import main; main(int(sys.argv[1]))"
)


def model_shape(
    model: Any, dtype: Any = None, parts: int = 1
) -> tuple[AttentionShape, ModelConfig | None]:
    """The attention shape of `model` on one rank, and its sizes there if they are known.

    `dtype` is that of q and kv ("bf16", or torch's); by default the model's or its config's.
    `parts` tensor-parallel ranks share a model; an AttentionShape is that of one rank already.
    """
    if model is None or isinstance(model, AttentionShape):
        shape = AttentionShape.assumed() if model is None else model
        return (replace(shape, dtype=dtype) if dtype else shape), None
    if isinstance(model, ModelConfig):
        model = model.divided(parts)
        return model.attention_shape(dtype or "bf16"), model
    config = getattr(model, "config", model)  # a Transformers model, or a config
    entries = config.to_dict() if hasattr(config, "to_dict") else config
    chosen = dtype or _dtype_of(model) or _dtype_of(config) or _dtype_of(entries) or "bf16"
    if hasattr(config, "attention_shape"):
        return config.attention_shape(chosen).divided(parts), None
    if isinstance(entries, Mapping):
        sizes = from_transformers_config(entries).divided(parts)
        return sizes.attention_shape(chosen), sizes
    raise ValueError(
        f"model is {type(model).__name__}; expected an AttentionShape, a ModelConfig, a "
        "Transformers config (object or dict), or a model whose .config is one"
    )


def _dtype_of(model: Any) -> str | None:
    """The name of the dtype of a model's config or weights."""
    of = model.get if isinstance(model, Mapping) else partial(getattr, model)
    found = of("dtype", None) or of("torch_dtype", None)
    if found is None and hasattr(model, "parameters"):
        found = next((weight.dtype for weight in model.parameters()), None)
    return dtype_name(found)


def topology_and_cost(
    ranks: "LoaderRanks", topology: Topology | None, cost: CostModel | None, shape: AttentionShape
) -> tuple[Topology, CostModel]:
    """What is given is used, and determines the other if it can: a topology with a preset's name
    has that preset's costs. By default, nodes with devices like this process's. All ranks need
    the same; ranks with different profiles get BatchMismatch (see Peers)."""
    if cost is None:
        named = None if topology is None else PROFILES.get(topology.name)
        cost = CostModel(named or _device_profile(ranks), shape)
    if topology is None:
        found = ranks.topology()
        topology = cost.profile.topology(found.nodes, found.ranks_per_node)
    topology.check_ranks(ranks.num_ranks, "loader")
    return topology, cost


def _device_profile(ranks: "LoaderRanks") -> Profile:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else CPU
    if not ranks.rank and ranks.num_ranks > 1:  # one rank has nothing to choose
        tell_profile(device, OVERRIDE_HINT)
    return profile_for_device(device)


class PlanFailed(RuntimeError):  # noqa: N818 (the run goes on: the batch gets a static plan)
    """The planner produced no plan for a batch; the text is the reason."""


class Closed(Exception):  # noqa: N818 (never leaves the loader)
    """The iteration is closing: threads stop waiting."""


@dataclass(frozen=True)
class PlanReply:
    """Every rank's encoded part of a plan."""

    parts: tuple[bytes, ...]
    digest: str
    fingerprint: str
    solver: str
    most_tokens: int  # on any rank
    seconds: float


class PlanProcess:
    """One planning process, started on first use. One thread asks for plans; any may close it."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._closing = False
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        """None unless the process is running."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self) -> None:
        """Starts the process ahead of the first request. A failure to start shows in `plan`."""
        if self._connection is None:
            with suppress(OSError):
                self._start()

    def plan(self, make_plan: Callable[[], Plan]) -> PlanReply:
        """The plan that a call, which can be pickled, gives there. A process that dies is replaced
        and asked again. PlanFailed gives the reason if the call raises, does not return in time, or
        keeps killing the process."""
        request = pickle.dumps(pickle.dumps(make_plan))  # twice: read there before it is unpickled
        deadline = monotonic() + self.timeout
        for _ in range(ATTEMPTS):
            try:
                reply = self._ask(request, deadline)
            except TimeoutError:
                self._end()
                self.restarts += 1
                raise PlanFailed(f"the planner did not answer within {self.timeout:g} s") from None
            except (EOFError, OSError, pickle.UnpicklingError):
                self._note_death()
            else:
                if isinstance(reply, str):
                    raise PlanFailed(f"the planner raised {reply}")
                return reply
        raise PlanFailed(f"the planning process died {ATTEMPTS} times")

    def interrupt(self) -> None:
        """Makes a `plan` that another thread is waiting in raise Closed, and all later ones."""
        with self._starting:
            self._closing = True
            process, connection = self._process, self._connection
        if process is not None:
            process.kill()
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process. The next `plan` starts a new one."""
        self.interrupt()
        self._end()
        self._closing = False

    def _ask(self, request: bytes, deadline: float) -> PlanReply | str:
        connection = self._connection or self._start()
        connection.settimeout(max(1e-3, deadline - monotonic()))
        connection.sendall(request)
        connection.settimeout(max(1e-3, deadline - monotonic()))
        reply: PlanReply | str = pickle.load(connection.makefile("rb"))
        return reply

    def _start(self) -> socket.socket:
        with self._starting:
            if self._closing:
                raise Closed
            mine, theirs = socket.socketpair()
            # A process group of its own: Ctrl-C in a terminal reaches only the training process.
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), *_search_path()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
            theirs.close()
            self._connection = mine
            return mine

    def _note_death(self) -> None:
        """After the process died; the next request starts another."""
        if self._closing:
            raise Closed
        code = self._end()
        self.restarts += 1
        how = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        logger.info("the planning process ended (%s); restarting it", how)

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        code = None
        if process is not None:
            process.kill()
            code = process.wait(KILL_SECONDS)
        if connection is not None:
            connection.close()
        return code


def _search_path() -> list[str]:
    """This process's module path, with the directory of this dyncp first."""
    own = str(Path(dyncp.__file__).resolve().parents[1])
    return [own, *(entry or os.getcwd() for entry in sys.path if entry != own)]


# Inside it


def main(file_descriptor: int) -> None:
    exit_with_parent()
    connection = socket.socket(fileno=file_descriptor)
    requests = connection.makefile("rb")
    with suppress(EOFError, OSError):  # the parent closed the connection
        while True:
            connection.sendall(pickle.dumps(answer(pickle.load(requests))))


def answer(request: bytes) -> PlanReply | str:
    """The plan of a pickled call, or the error as text."""
    start = perf_counter()
    where = "reading the request"
    try:
        make_plan = pickle.loads(request)  # may need a module that this process cannot import
        where = ""
        plan = make_plan()
        return PlanReply(
            parts=tuple(encode_part(part) for part in plan.parts),
            digest=plan.digest,
            fingerprint=plan.fingerprint,
            solver=plan.parts[0].solver,
            most_tokens=int(plan.parts[0].tokens_per_rank.max()),
            seconds=perf_counter() - start,
        )
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where or f'{last.name}, line {last.lineno}'})"


def exit_with_parent() -> None:
    """Ends this process soon after its parent: one that was killed cannot do so, and a forked child
    of it may keep the socket open."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


class BatchPlanner:
    """Plans batches. `config` is the planner's, with the loader's options put into it."""

    def __init__(
        self,
        options: LoaderConfig,
        topology: Topology,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: CostModel | None = None,
        model: ModelConfig | None = None,
    ) -> None:
        if options.local_multiple > 1:
            layout = replace(config.layout, local_multiple=options.local_multiple)
            config = replace(config, layout=layout)
        if options.evaluation:
            config = replace(config, forward_only=True)
        limits = [options.max_tokens_per_rank, config.max_tokens_per_rank]
        lowest = min((tokens for tokens in limits if tokens is not None), default=None)
        self.config = replace(config, max_tokens_per_rank=lowest)
        self._plan_function = options.plan_function
        self._topology, self._shape, self._cost, self._model = topology, shape, cost, model

    def plan(self, process: PlanProcess, batch: Batch) -> PlanReply:
        """Every rank's part, from the planning process; PlanFailed gives the reason if it fails."""
        args = (batch, self._topology, self._shape, self.config)
        costs = {"cost": self._cost, "model": self._model}
        reply = process.plan(partial(self._plan_function, *args, **costs))
        most = self.config.max_tokens_per_rank  # a user's plan_function may ignore it
        if most is not None and reply.most_tokens > most:
            raise PlanFailed(
                f"the planner assigned {reply.most_tokens} tokens to a rank, more than "
                f"max_tokens_per_rank={most}"
            )
        return reply

    def static_plan(self, batch: Batch) -> Plan:
        """The plan of the static method, made in this process; the same on every rank."""
        most = self.config.max_tokens_per_rank
        plain = replace(self.config, block_size=None, head_groups=1, max_tokens_per_rank=None)
        config = replace(plain, solver=STATIC_SOLVER)
        plan = plan_batch(batch, self._topology, self._shape, config, cost=self._cost)
        found = int(plan.parts[0].tokens_per_rank.max())
        if most is not None and found > most:
            raise ValueError(
                f"the static plan assigns {found} tokens to a rank, more than max_tokens_per_rank="
                f"{most}; raise it, or lower tokens_per_batch"
            )
        return plan

    def shared_settings(self) -> dict[str, str]:
        """What must be equal on all ranks, as texts."""
        return {
            "profile": "" if self._cost is None else self._cost.profile.name,
            "topology": repr(self._topology),
            "model": repr((self._shape, self._model)),
            "planner": repr(self.config),
        }

    def check_tokens(self, tokens: int, batch: int | None = None) -> None:
        """Raises ValueError for more tokens than all ranks together may hold."""
        most = self.config.max_tokens_per_rank
        if most is not None and tokens > most * self._topology.num_ranks:
            what = "tokens_per_batch is" if batch is None else f"batch {batch} has"
            raise ValueError(
                f"{what} {tokens}, but {self._topology.num_ranks} ranks with max_tokens_per_rank="
                f"{most} hold {most * self._topology.num_ranks}; lower tokens_per_batch, or raise "
                "max_tokens_per_rank"
            )


class SampleSeconds:
    """Predicted seconds of training on a sample of a given length: all layers of a model on one
    rank, attention by the cost model, other work by tokens.

    Attention pairs are those of the mask of that length; of a causal mask if the mask function
    needs the sample itself. They are counted at powers of two and keys per token are interpolated
    linearly between these, which is exact for causal and full masks. Only operations that IEEE
    arithmetic rounds in one way are used: ranks that predicted other times would deal other
    batches.
    """

    def __init__(
        self, mask_fn: Any, cost: CostModel, model: ModelConfig | None, *, forward_only: bool
    ) -> None:
        model = model or _assumed_model(cost.shape)
        self._mask_fn, self._cost, self._layers = mask_fn, cost, model.layers
        self._directions = [Direction.FORWARD] + [Direction.BACKWARD] * (not forward_only)
        profile = cost.profile
        self._per_token = sum(model.seconds_per_token(profile, d) for d in self._directions)
        self._keys: dict[int, float] = {}  # per token, by length: powers of two
        self._known: dict[int, float] = {}

    def __call__(self, length: int) -> float:
        if length not in self._known:
            self._known[length] = self._seconds(length)
        return self._known[length]

    def _seconds(self, length: int) -> float:
        rows = np.array([length])
        pairs = rows * self._keys_per_token(length)
        heads = self._cost.shape.q_heads
        attention = sum(
            float(self._cost.tile_seconds(pairs, rows, rows, heads, direction)[0])
            for direction in self._directions
        )
        return self._layers * attention + length * self._per_token

    def _keys_per_token(self, length: int) -> float:
        if length not in self._keys and length.bit_count() == 1:
            self._keys[length] = _num_pairs(self._mask_fn, length) / length
        if length in self._keys:
            return self._keys[length]
        below = 1 << length.bit_length() - 1
        keys, more = self._keys_per_token(below), self._keys_per_token(2 * below)
        return keys + (more - keys) * (length - below) / below


def _num_pairs(mask_fn: Any, length: int) -> float:
    """Mean over a sample's masks; those of a causal mask if the length does not determine them."""
    if isinstance(mask_fn, MaskFunction | NamedMasks):
        try:
            given = mask_fn(length)
        except Exception:  # a parameter comes from the sample, or does not fit this length
            given = None
        masks = given.values() if isinstance(given, dict) else [given]
        pairs = [mask.num_pairs for mask in masks if isinstance(mask, Mask)]
        if pairs:
            return sum(pairs) / len(pairs)
    return length * (length + 1) / 2


def _assumed_model(shape: AttentionShape) -> ModelConfig:
    hidden = shape.q_heads * shape.head_dim
    sizes = (hidden, LAYERS, round(FFN * hidden), VOCAB * hidden)
    return ModelConfig(*sizes, shape.q_heads, shape.kv_heads, shape.head_dim)

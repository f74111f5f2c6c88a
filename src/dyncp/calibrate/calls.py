"""Attention calls to measure: the ranks and devices that they run on, batches by the name of their
mask, random inputs, dyncp's kernels on one rank, and one rank of a plan without its peers."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dyncp import masks
from dyncp.blocks import DTYPE_NAMES, AttentionShape, Batch
from dyncp.executor import DCPExecutor, attention
from dyncp.kernels import IndexArrays, Kernel, KernelCall
from dyncp.planner import plan_batch
from dyncp.samplers import sample_lengths
from dyncp.topology import Topology
from dyncp.transport import Buffers, Null, NullChannel

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for full, name in DTYPE_NAMES.items()}
# Windows of 4,096 tokens; a quarter of shorter sequences, which would be causal otherwise.
WINDOW, WINDOW_SHARE = 4096, 4
# Documents of a long-tailed mix, scaled down in batches of fewer tokens than this.
WHOLE_DOCUMENTS = 16384
# Hosts take seconds for tens of millions of random numbers: larger inputs repeat these rows.
DRAWN_ROWS = 512
# Whether a kernel is deterministic, as its name may say.
ORDERS = {"deterministic": True, "fast": False}
# From q [tokens, q heads, dim], k and v [tokens, kv heads, dim] to an output like q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class World:
    """This process is rank `rank` of `num_ranks`, with `ranks_per_node` on every node."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device

    @staticmethod
    def alone(device: torch.device) -> "World":
        return World(0, 1, 1, device)

    @property
    def nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    @property
    def first(self) -> bool:
        """Whether this is rank 0, the one that prints."""
        return self.rank == 0


def open_device(name: str | None, local_rank: int = 0) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1"), made the current one; by default a GPU
    where there is one. "cuda" without an index is the GPU of the process's local rank."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; choose cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch sees no CUDA GPU here; choose cpu")
    device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    if kind == "cuda":
        seen = torch.cuda.device_count()
        if device.index >= seen:
            raise ValueError(
                f"GPU {device.index} was asked for, but torch sees {seen}: start one rank per GPU, "
                "or check CUDA_VISIBLE_DEVICES"
            )
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


def device_text(device: torch.device) -> str:
    """The GPU's name, or the CPU's number of threads."""
    if device.type == "cuda":
        return device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


class Unavailable(ValueError):  # noqa: N818 - mostly a reason to leave something out
    """Why an implementation cannot run here, or not with this mask."""


def executor_options(kernel: str) -> dict[str, Any]:
    """What an executor is told for "flash4", "flash4:fast" or "flash4:deterministic"."""
    name, colon, order = kernel.partition(":")
    if not name or (colon and order not in ORDERS):
        forms = " or ".join(["NAME", *(f"NAME:{order}" for order in ORDERS)])
        raise ValueError(f"kernel is {kernel!r}; write {forms}")
    return {"kernel": name} | ({"deterministic": ORDERS[order]} if colon else {})


def make_executor(kernel: str, device: torch.device, **options: Any) -> DCPExecutor:
    """An executor with this kernel; raises Unavailable with the reason where it cannot run here."""
    options |= executor_options(kernel)
    try:
        return DCPExecutor(device=device, **options)
    except (ImportError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0]) from error


def one_rank_attention(
    batch: Batch, shape: AttentionShape, kernel: str, device: torch.device
) -> Attend:
    """Attention of the whole batch on one rank, tokens in batch order."""
    plan = plan_batch(batch, Topology(), shape)
    executor = make_executor(kernel, device, virtual_ranks=1)
    order = plan.parts[0].local_coordinates
    assert (order == range(batch.num_tokens)).all(), "one rank keeps the batch's order"
    try:
        step = executor.prepare(plan)
    except ValueError as error:  # the kernel cannot run on this device
        raise Unavailable(str(error)) from error
    return lambda q, k, v: attention(step, q, k, v)


def _window(length: int) -> int:
    return max(1, min(WINDOW, length // WINDOW_SHARE))


def _documents(tokens: int) -> list[masks.Mask]:
    scale = min(1.0, tokens / WHOLE_DOCUMENTS)
    return [masks.causal(length) for length in sample_lengths(f"ldc_x{scale:.4f}", tokens)]


MASKS: dict[str, Callable[[int], list[masks.Mask]]] = {
    "causal": lambda n: [masks.causal(n)],
    "full": lambda n: [masks.full(n)],
    "document_causal": _documents,
    "lambda_shaped": lambda n: [masks.lambda_shaped(n, window=_window(n))],
    "shared_question": lambda n: [masks.shared_question(n)],
    "causal_blockwise": lambda n: [masks.causal_blockwise(n)],
    "sliding_window": lambda n: [masks.sliding_window(n, window=_window(n))],
}


def find_mask(name: str) -> Callable[[int], list[masks.Mask]]:
    """Makes the masks of the sequences of a batch from its number of tokens."""
    if name not in MASKS:
        raise ValueError(f"mask is {name!r}; choose from {', '.join(MASKS)}")
    return MASKS[name]


def batch_of(mask: str, tokens: int) -> Batch:
    return Batch.of(find_mask(mask)(tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """q, dout: [tokens, q heads, dim]; k, v: [tokens, kv heads, dim]. q, k, v require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def rows(self, rows: Tensor) -> "Inputs":
        """The inputs of some tokens."""
        q, k, v = (x.detach()[rows].requires_grad_() for x in self.qkv)
        return Inputs(q, k, v, self.dout[rows])


def make_inputs(
    tokens: int, shape: AttentionShape, device: torch.device | str, seed: int = 0
) -> Inputs:
    """Normally distributed; the same on every device for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        rows = min(tokens, DRAWN_ROWS)
        drawn = torch.randn(rows, heads * shape.head_dim, generator=generator)
        drawn = _repeated(drawn.to(device, DTYPES[shape.dtype]), tokens)
        return drawn.view(tokens, heads, shape.head_dim)

    q, k, v, dout = (
        draw(heads) for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    )
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def _repeated(drawn: Tensor, tokens: int) -> Tensor:
    """`tokens` rows: each repetition is rolled by one column more, so that no two are equal."""
    if len(drawn) == tokens:
        return drawn
    pieces = [drawn.roll(i, dims=-1) for i in range(-(-tokens // len(drawn)))]
    return torch.cat(pieces)[:tokens]


def forward(attend: Attend, inputs: Inputs) -> Callable[[], Tensor]:
    """A forward call that saves what backward needs."""
    return lambda: attend(*inputs.qkv)


def backward(out: Tensor, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """A backward call that can be repeated; `out` is a result of `forward`."""
    return lambda: torch.autograd.grad(out, inputs.qkv, inputs.dout, retain_graph=True)


class RecordedKernel(Kernel):
    """Wraps a kernel of CPUs, and records the seconds of every `attend` and `attend_backward`."""

    def __init__(self, inner: Kernel) -> None:
        self._inner = inner
        self.seconds: list[float] = []
        for name in Kernel.__annotations__:
            setattr(self, name, getattr(inner, name))

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> Any:
        return self._inner.lower(call, arrays, backward=backward)

    def refuses(self, shape: AttentionShape) -> str:
        return self._inner.refuses(shape)

    def sequence_rows(self, lowered: Any, dim: int) -> Any:
        return self._inner.sequence_rows(lowered, dim)

    def attend(self, *args: Any, **options: Any) -> None:
        start = perf_counter()
        self._inner.attend(*args, **options)
        self.seconds.append(perf_counter() - start)

    def attend_backward(self, *args: Any, **options: Any) -> None:
        start = perf_counter()
        self._inner.attend_backward(*args, **options)
        self.seconds.append(perf_counter() - start)


class Noise(Null):
    """`Null`, but received buffers hold normally distributed numbers: GPUs multiply zeros faster,
    since they draw less power and clocks stay up. The buffers of a phase are adjacent in memory, so
    one copy fills them all. Calls only read them, so a repeated call finds them filled already:
    only the first of several equal calls spends time on it."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._noise: dict[torch.device, Tensor] = {}
        self._fills: dict[int, tuple[Buffers, Tensor, Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None  # of messages
        self._call, self._holds = -1, set[int]()  # buffers that hold numbers since a call's first
        self.filled: dict[int, torch.cuda.Event] = {}  # by phase, on GPUs

    def open(self, call: int = 0) -> "list[NullChannel]":
        if call != self._call:
            self._call, self._holds = call, set()
        return [NoiseChannel(self)]

    def fill(self, receives: Buffers) -> None:
        """The executor passes the same mapping in every call, so its extent is computed once."""
        if id(receives) in self._holds:
            return
        self._holds.add(id(receives))
        kept = self._fills.get(id(receives))
        if kept is None:
            buffers = list(receives.values())
            first, last = buffers[0], buffers[-1]
            span = last.data_ptr() + last.nbytes - first.data_ptr()
            whole = first.as_strided((span,), (1,))
            kept = self._fills[id(receives)] = receives, whole, self._bytes(span, first.device)
        _, target, source = kept
        target.copy_(source)

    def stream(self) -> torch.cuda.Stream:
        """That of messages; cached, since asking torch for it is slow."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream()
        return self._stream

    def filled_event(self, phase: int, receives: Buffers) -> Any:
        """What `wait` waits for; None on CPUs."""
        if phase not in self.filled and next(iter(receives.values())).is_cuda:
            self.filled[phase] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self.filled.get(phase)

    def _bytes(self, count: int, device: torch.device) -> Tensor:
        """Random bf16 numbers, whose bits are ordinary numbers as fp32 and fp16 too."""
        held = self._noise.get(device)
        if held is None or held.nbytes < count:
            numbers = torch.randn(-(-count // 2), device=device)
            held = self._noise[device] = numbers.bfloat16().view(torch.uint8)
        return held[:count]


class NoiseChannel(NullChannel):
    def __init__(self, transport: Noise) -> None:
        super().__init__(transport)
        self._noise = transport

    def launch(self, phase: int, sends: Buffers, receives: Buffers, arrived: Any = None) -> None:
        super().launch(phase, sends, {})
        if not receives:
            return
        self._noise.fill(receives)
        if arrived is None:
            arrived = self._noise.filled_event(phase, receives)
        if arrived is not None:  # messages have a stream of their own
            arrived.record(self._noise.stream())

    def wait(self, phase: int) -> None:
        filled = self._noise.filled.get(phase)
        if filled is not None:
            filled.wait()

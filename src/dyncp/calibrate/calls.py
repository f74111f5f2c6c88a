"""Attention calls to measure: batches by mask name, random inputs, dyncp's kernels on one rank, and
one rank of a plan without its peers."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dyncp import masks
from dyncp.blocks import DTYPE_NAMES, AttentionShape, Batch, Direction
from dyncp.executor import DCPExecutor, attention
from dyncp.kernels import IndexArrays, Kernel, KernelCall
from dyncp.planner import plan_batch
from dyncp.samplers import sample_lengths
from dyncp.topology import Topology
from dyncp.transport import Buffers, Null, NullChannel

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for full, name in DTYPE_NAMES.items()}
# Windows have 4,096 tokens, but at most a quarter of the sequence, so that they differ from causal.
WINDOW, WINDOW_SHARE = 4096, 4
# Document lengths have a long tail. Batches of fewer tokens than this get shorter documents.
WHOLE_DOCUMENTS = 16384
# Drawing tens of millions of random numbers takes seconds, so larger inputs repeat these rows.
DRAWN_ROWS = 512
# Suffixes of kernel names, and whether each asks for the deterministic kernel.
ORDERS = {"deterministic": True, "fast": False}
# Takes q [tokens, q heads, dim], k and v [tokens, kv heads, dim]; returns an output shaped like q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Run = Callable[[], Any]


class Unavailable(ValueError):  # noqa: N818 - usually a reason to skip something, not an error
    """Says why an implementation cannot run on this device or with this mask."""


def executor_options(kernel: str) -> dict[str, Any]:
    """Keyword arguments of DCPExecutor for "flash4", "flash4:fast" or "flash4:deterministic"."""
    name, colon, order = kernel.partition(":")
    if not name or (colon and order not in ORDERS):
        forms = " or ".join(["NAME", *(f"NAME:{order}" for order in ORDERS)])
        raise ValueError(f"kernel is {kernel!r}; write {forms}")
    return {"kernel": name} | ({"deterministic": ORDERS[order]} if colon else {})


def make_executor(kernel: str, device: torch.device, **options: Any) -> DCPExecutor:
    """Makes an executor with this kernel; raises Unavailable if the kernel cannot run here."""
    options |= executor_options(kernel)
    try:
        return DCPExecutor(device=device, **options)
    except (ImportError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0]) from error


def one_rank_attention(
    batch: Batch, shape: AttentionShape, kernel: str, device: torch.device
) -> Attend:
    """Attention over the whole batch on one rank; tokens are in batch order."""
    plan = plan_batch(batch, Topology(), shape)
    executor = make_executor(kernel, device, virtual_ranks=1)
    order = plan.parts[0].local_coordinates
    assert (order == range(batch.num_tokens)).all(), "one rank keeps the batch's order"
    try:
        step = executor.prepare(plan)
    except ValueError as error:  # the kernel cannot run this plan
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
    """The function that makes a batch's masks, one per sequence, from its number of tokens."""
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
        """The inputs of these tokens."""
        q, k, v = (x.detach()[rows].requires_grad_() for x in self.qkv)
        return Inputs(q, k, v, self.dout[rows])


def make_inputs(
    tokens: int, shape: AttentionShape, device: torch.device | str, seed: int = 0
) -> Inputs:
    """Normally distributed inputs. The same seed gives the same numbers on every device."""
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
    """`tokens` rows: each repetition is rolled by one more column, so that no two are equal."""
    if len(drawn) == tokens:
        return drawn
    pieces = [drawn.roll(i, dims=-1) for i in range(-(-tokens // len(drawn)))]
    return torch.cat(pieces)[:tokens]


def both_directions(attend: Attend, inputs: Inputs) -> dict[Direction, Run]:
    """A forward and a backward call; both can be repeated. Backward uses one retained graph."""
    out = attend(*inputs.qkv)
    return {
        Direction.FORWARD: lambda: attend(*inputs.qkv),
        Direction.BACKWARD: lambda: torch.autograd.grad(
            out, inputs.qkv, inputs.dout, retain_graph=True
        ),
    }


class OutAndGrads(NamedTuple):
    """Output and gradients of one call; rows are in the order of the inputs."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def results_of(attend: Attend, inputs: Inputs) -> OutAndGrads:
    out = attend(*inputs.qkv)
    return OutAndGrads(out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.dout))


def relative_errors(given: OutAndGrads, expected: OutAndGrads) -> dict[str, float]:
    """‖given − expected‖ / ‖expected‖ of the output and of each gradient."""
    errors = {}
    for name, one, wanted in zip(OutAndGrads._fields, given, expected, strict=True):
        size, error = wanted.norm().item(), (one.double() - wanted).norm().item()
        errors[name] = error / size if size else error
    return errors


class RecordedKernel(Kernel):
    """Wraps a CPU kernel and records the seconds of every `attend` and `attend_backward`."""

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
    """`Null`, but received buffers hold normally distributed numbers instead of zeros: GPUs
    multiply zeros faster, because they draw less power and keep their clocks up.

    The receive buffers of a phase are adjacent in memory, so one copy fills them all. A call only
    reads them, so they are filled in the first of several equal calls only."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._noise = torch.empty(0, dtype=torch.uint8)
        self._fills: dict[int, tuple[Buffers, Tensor, Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None  # the stream of messages
        self._call, self._filled = -1, set[int]()  # this call's buffers that are filled already
        self.arrived: dict[int, torch.cuda.Event] = {}  # by phase; on GPUs

    def open(self, call: int = 0) -> "list[NullChannel]":
        if call != self._call:
            self._call, self._filled = call, set()
        return [NoiseChannel(self)]

    def fill(self, receives: Buffers) -> None:
        """Fills the buffers unless an equal call did. The executor passes the same mapping in every
        call, so its extent in memory is computed once."""
        if id(receives) in self._filled:
            return
        self._filled.add(id(receives))
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
        """The stream of messages, cached because asking torch for it is slow."""
        if self._stream is None:
            self._stream = torch.cuda.current_stream()
        return self._stream

    def arrival(self, phase: int, receives: Buffers) -> Any:
        """The event that `wait` waits for; None on CPUs."""
        if phase not in self.arrived and next(iter(receives.values())).is_cuda:
            self.arrived[phase] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return self.arrived.get(phase)

    def _bytes(self, count: int, device: torch.device) -> Tensor:
        """Random bf16 numbers; their bits are ordinary numbers in fp32 and fp16, too."""
        if self._noise.nbytes < count:
            numbers = torch.randn(-(-count // 2), device=device)
            self._noise = numbers.bfloat16().view(torch.uint8)
        return self._noise[:count]


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
            arrived = self._noise.arrival(phase, receives)
        if arrived is not None:  # on GPUs, where messages have their own stream
            arrived.record(self._noise.stream())

    def wait(self, phase: int) -> None:
        arrived = self._noise.arrived.get(phase)
        if arrived is not None:
            arrived.wait()

"""Attention calls to measure: the ranks and devices that they run on, masks by name, random inputs,
dyncp's kernels on one rank, and dense attention in fp64, which says what they should give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dyncp import masks
from dyncp.blocks import DEFAULT_MASK, DTYPE_NAMES, AttentionShape, Batch
from dyncp.executor import DCPExecutor, attention
from dyncp.planner import plan_batch
from dyncp.samplers import sample_lengths
from dyncp.topology import Topology

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
# Scores of one chunk of rows, over all heads: 512 MiB in fp64.
CHUNK_SCORES = 1 << 26


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
        _use_gpu(device)
    return device


def _use_gpu(device: torch.device) -> None:
    seen = torch.cuda.device_count()
    assert device.index is not None
    if device.index >= seen:
        raise ValueError(
            f"GPU {device.index} was asked for, but torch sees {seen}: start one rank per GPU, or "
            "check CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(device)


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


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A kernel by name. `deterministic` None leaves the executor's default."""

    kernel: str
    deterministic: bool | None = None

    @staticmethod
    def of(text: str) -> "KernelChoice":
        """Parses "flash4", "flash4:fast" or "flash4:deterministic"."""
        kernel, colon, order = text.strip().partition(":")
        if not kernel or (colon and order not in ORDERS):
            forms = " or ".join(["NAME", *(f"NAME:{order}" for order in ORDERS)])
            raise ValueError(f"kernel is {text!r}; write {forms}")
        return KernelChoice(kernel, ORDERS.get(order))

    def __str__(self) -> str:
        order = [f":{name}" for name, fixed in ORDERS.items() if fixed is self.deterministic]
        return "".join([self.kernel, *order])


def make_executor(choice: KernelChoice, device: torch.device, **options: Any) -> DCPExecutor:
    """An executor with this kernel; raises Unavailable with the reason where it cannot run here."""
    if choice.deterministic is not None:
        options["deterministic"] = choice.deterministic
    try:
        return DCPExecutor(device=device, kernel=choice.kernel, **options)
    except (ImportError, ValueError) as error:
        raise Unavailable(str(error).splitlines()[0]) from error


def kernel_name(choice: KernelChoice, device: torch.device) -> str:
    """The kernel's name; that of the kernel chosen here for "auto"."""
    return make_executor(choice, device, virtual_ranks=1).kernel.name


def one_rank_attention(
    batch: Batch, shape: AttentionShape, choice: KernelChoice, device: torch.device
) -> Attend:
    """Attention of the whole batch on one rank, tokens in batch order."""
    plan = plan_batch(batch, Topology(), shape)
    executor = make_executor(choice, device, virtual_ranks=1)
    order = plan.parts[0].local_coordinates
    assert (order == range(batch.num_tokens)).all(), "one rank keeps the batch's order"
    try:
        step = executor.prepare(plan)
    except ValueError as error:  # the kernel cannot run on this device
        raise Unavailable(str(error)) from error
    return lambda q, k, v: attention(step, q, k, v)


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


@dataclass(frozen=True, slots=True, eq=False)
class MaskCase:
    """A batch to attend over, and the name of its mask."""

    name: str
    batch: Batch

    @property
    def tokens(self) -> int:
        return self.batch.num_tokens

    @property
    def num_pairs(self) -> int:
        return sum(mask.num_pairs for mask in self.batch.masks[DEFAULT_MASK])


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


def mask_case(name: str, tokens: int) -> MaskCase:
    """A batch of `tokens` tokens with the mask called `name`."""
    return MaskCase(name, Batch.of(find_mask(name)(tokens)))


def find_mask(name: str) -> Callable[[int], list[masks.Mask]]:
    if name not in MASKS:
        raise ValueError(f"mask is {name!r}; choose from {', '.join(MASKS)}")
    return MASKS[name]


class OutAndGrads(NamedTuple):
    """Output and gradients, rows as in the inputs."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def results_of(attend: Attend, inputs: Inputs) -> OutAndGrads:
    """Output and gradients of one call."""
    out = attend(*inputs.qkv)
    return OutAndGrads(out.detach(), *torch.autograd.grad(out, inputs.qkv, inputs.dout))


def relative_errors(given: OutAndGrads, expected: OutAndGrads) -> dict[str, float]:
    """‖given − expected‖ / ‖expected‖ of output and gradients."""
    errors = {}
    for name, one, wanted in zip(OutAndGrads._fields, given, expected, strict=True):
        size, error = wanted.norm().item(), (one.double() - wanted).norm().item()
        errors[name] = error / size if size else error
    return errors


def dense_attention(batch: Batch, inputs: Inputs) -> OutAndGrads:
    """Attention of all sequences, tokens in batch order, in fp64, some query rows at a time."""
    q, k, v, dout = (x.detach().double() for x in (*inputs.qkv, inputs.dout))
    found = OutAndGrads(*(torch.zeros_like(x) for x in (q, q, k, v)))
    for start, mask in zip(batch.offsets.tolist(), batch.masks[DEFAULT_MASK], strict=False):
        keys = slice(start, start + mask.length)
        ranges = torch.from_numpy(mask.ranges.copy()).to(q.device)
        chunk = max(1, CHUNK_SCORES // (q.shape[1] * mask.length))
        for first in range(0, mask.length, chunk):
            own = ranges[first : first + chunk]
            rows = slice(start + first, start + first + len(own))
            out, dq, dk, dv = _attend(own, q[rows], k[keys], v[keys], dout[rows])
            found.out[rows], found.dq[rows] = out, dq
            found.dk[keys] += dk
            found.dv[keys] += dv
    return found


def _attend(ranges: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> OutAndGrads:
    """By torch's plain attention, of keys inside `ranges`; rows without keys give 0."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    key = torch.arange(len(k), device=q.device)
    allowed = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(dim=1)
    queries, keys, values = (x.transpose(0, 1) for x in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(queries, keys, values, allowed, enable_gqa=True)
    out = out.transpose(0, 1)
    return OutAndGrads(out.detach(), *torch.autograd.grad(out, leaves, dout))

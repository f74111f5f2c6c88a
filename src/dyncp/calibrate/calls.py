"""Attention calls to measure: masks by name, random inputs, and dyncp's kernels on one rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

"""Plans on virtual ranks of one GPU, and dense attention to compare them with."""

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from cases import TORCH
from dense import dense_attention
from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    Layout,
    Plan,
    PlannerConfig,
    Step,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.kernels import why_not
from dyncp.plan import Direction, batch_order

GPU = torch.device("cuda")
LENGTHS = (700, 129, 1, 65, 1900, 256, 40)
SHAPE = AttentionShape(8, 2, 128, "bf16")
MASKS = {
    "causal": masks.causal,
    "full": masks.full,
    "lambda": masks.lambda_shaped(sinks=20, window=300),
    "shared": masks.shared_question,
    "blockwise": masks.causal_blockwise(block=64),
    "window": masks.sliding_window(window=200),
}
MORE_MASKS = {
    "prefix lm": lambda n: masks.prefix_lm(n, prefix=n // 4),
    "packed": lambda n: masks.document_packed(n, documents=thirds(n)),
    "global": masks.global_sliding(num_global=30, window=170, causal=False),
    "block causal": masks.block_causal(chunk=90),
    "union": lambda n: masks.sliding_window(n, window=60) | masks.prefix_lm(n, prefix=n // 3),
    "intersection": lambda n: masks.shared_question(n) & masks.causal_blockwise(n, block=64),
    "tree": lambda n: masks.prefix_tree([-1, 0, 0], thirds(n)) if n > 2 else masks.causal(n),
    "window by position": lambda n: masks.within(masks.shared_question(n), window=90),
    "mask_mod": lambda n: masks.from_mask_mod(
        lambda _, __, q, kv: (q >= kv) & ((q - kv < 50) | (kv % 128 < 7)), n
    ),
}

TRITON = pytest.param("triton", True, id="triton")
DETERMINISTIC = pytest.param("flash4", True, id="flash4-deterministic")
FAST = pytest.param("flash4", False, id="flash4-fast")
# flash4-deterministic has the forward of flash4-fast and the backward of triton: most tests
# omit it.
each_kernel = pytest.mark.parametrize(("kernel", "deterministic"), [TRITON, FAST])
each_choice = pytest.mark.parametrize(("kernel", "deterministic"), [TRITON, DETERMINISTIC, FAST])
only_triton = pytest.mark.parametrize("kernel", ["triton"])


def plan_of(batch: Batch, solver: str, shape=SHAPE, ranks: int = 4, **options) -> Plan:
    """Several divisions, blocks that end inside kernel tiles, padded rows; 4 ranks are two
    nodes."""
    given = {"block_size": 200, "divisions": 3, "layout": Layout(128, 8)} | options
    topology = Topology(2, 2) if ranks == 4 else Topology(1, ranks)
    return plan_batch(batch, topology, shape, PlannerConfig(solver, **given))


def has_relays(plan: Plan) -> bool:
    """Whether ranks relay blocks or sums of other ranks, in forward and in backward."""
    owner = plan.parts[0].blocks.owner
    return all(
        any(
            ((owner[sends.block] != part.rank) & (owner[sends.block] != sends.peer)).any()
            for part in plan.parts
            for sends in [part.masks["default"].program(direction).sends]
        )
        for direction in Direction
    )


def prepare(plan: Plan, kernel: str, deterministic: bool = True) -> Step:
    missing = why_not(kernel, GPU)
    if missing:
        pytest.skip(missing)
    executor = DCPExecutor(
        virtual_ranks=plan.num_ranks, device=GPU, kernel=kernel, deterministic=deterministic
    )
    return executor.prepare(plan)


def draw_rows(step: Step, shape: AttentionShape) -> list[Tensor]:
    """q, k and v, which require gradients, and dout, of all ranks."""
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    options = {"device": GPU, "dtype": TORCH[shape.dtype]}
    rows = [torch.randn(step.num_rows, h, shape.head_dim, **options) for h in heads]
    return [*(x.requires_grad_() for x in rows[:3]), rows[3]]


def run(step: Step, rows: list[Tensor], sink: Tensor | None = None, **options) -> list[Tensor]:
    """Output and gradients; the gradient of the sinks is last."""
    *inputs, dout = rows
    out = attention(step, *inputs, sink=sink, **options)
    wanted = inputs if sink is None else [*inputs, sink]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout)]


@dataclass(frozen=True, eq=False)
class Reference:
    """q, k, v and dout of a batch, tokens in order; output and gradients in fp64, and those of
    dense attention in the inputs' dtype."""

    batch: Batch
    inputs: list[Tensor]
    exact: list[Tensor]
    plain: list[Tensor]


def thirds(length: int) -> list[int]:
    return [part for part in (length - 2 * (length // 3), length // 3, length // 3) if part]


@lru_cache(maxsize=2)  # cases of the same mask run consecutively
def reference_of(mask: str, shape=SHAPE, lengths: tuple[int, ...] = LENGTHS) -> Reference:
    batch = Batch.of([(MASKS | MORE_MASKS)[mask](length) for length in lengths])
    generator = torch.Generator(GPU).manual_seed(0)
    inputs = [
        torch.randn(batch.num_tokens, heads, shape.head_dim, device=GPU, generator=generator)
        .to(TORCH[shape.dtype])
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    ]  # fmt: skip
    exact = dense(batch, [x.double() for x in inputs])
    return Reference(batch, inputs, exact, dense(batch, inputs))


def dense(batch: Batch, inputs: list[Tensor], mask: str = "default") -> list[Tensor]:
    """Output and gradients, computed in the inputs' dtype."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = dense_attention(batch, mask, q, k, v, scale=q.shape[2] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def dense_with_sinks(
    batch: Batch, inputs: list[Tensor], sink: Tensor, scale: float
) -> list[Tensor]:
    """Like `dense`, plus the gradient of the sinks."""
    wanted = [x.detach().requires_grad_() for x in (*inputs[:3], sink)]
    out = dense_attention(batch, "default", *wanted[:3], scale=scale, sink=wanted[3])
    return [out.detach(), *torch.autograd.grad(out, wanted, inputs[3])]


def check(step: Step, reference: Reference, **options) -> None:
    """The plan's results are as good as those of plain attention."""
    found = run_on_tokens(step, reference.inputs, **options)
    everything = zip(found, reference.plain, reference.exact, strict=True)
    for name, (given, plain, exact) in zip(("out", "dq", "dk", "dv"), everything, strict=True):
        assert_as_good(name, given, plain, exact)


def run_on_tokens(step: Step, tokens: list[Tensor], **options) -> list[Tensor]:
    """Output and gradients in batch order; `options` are passed to `attention`."""
    order = torch.from_numpy(batch_order(step.plan)).to(GPU)

    def place(tokens: Tensor) -> Tensor:
        rows = tokens.new_ones(step.num_rows, *tokens.shape[1:])  # padding may hold anything
        rows[order] = tokens
        return rows

    *inputs, dout = map(place, tokens)
    results = run(step, [*(x.requires_grad_() for x in inputs), dout], **options)
    return [rows[order] for rows in results[:4]] + results[4:]


def assert_as_good(name: str, given: Tensor, plain: Tensor, exact: Tensor) -> None:
    """The norm of the error is at most 1.5 times that of plain attention (fp32: twice), the largest
    error at most twice (fp32: 4 times), plus one rounding of a partial result."""
    mine, theirs = given.double() - exact, plain.double() - exact
    of_norm, of_largest = (2.0, 4.0) if given.dtype == torch.float32 else (1.5, 2.0)
    assert mine.norm() <= of_norm * theirs.norm(), f"norm of {name}"
    rounding = exact.abs().max() * torch.finfo(given.dtype).eps / 2
    assert mine.abs().max() <= of_largest * theirs.abs().max() + rounding, f"largest of {name}"

"""Warming up: runs small plans that make kernels compile all that batches of an attention shape can
need, and compares every result with dense attention. No other rank takes part."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product

import numpy as np
import torch
from torch import Tensor

from dyncp.executor.call import attend_backward, attend_forward
from dyncp.executor.engine import Engine, WrongResultsError
from dyncp.executor.layout import dtypes_of
from dyncp.executor.step import PreparedPlan
from dyncp.plan import (
    DEFAULT_MASK,
    AttentionShape,
    Mask,
    Plan,
    batch_order,
    causal,
    sample_plan,
    sample_ring,
)
from dyncp.transport import InProcess

logger = logging.getLogger(__name__)

BLOCK = 256  # rows: two kernel tiles, since some kernels are compiled apart for a single one
MOST_RANGES = 64  # that lie apart in the first of them
NUM_RANKS = 2
RING_RANKS, RING_BLOCK = 4, 150  # blocks end inside kernel tiles
# Norm of the error over that of the result. bf16 keeps 8 bits: a right kernel is off by 0.3 %, one
# that adds up the wrong rows by 100 %.
TOLERANCES = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 1e-3, "fp64": 1e-9}


def warm_up(engine: Engine, shape: AttentionShape, head_groups: int, most_ranges: int) -> None:
    """For plans of up to `head_groups`, calls of up to `most_ranges`. Raises WrongResultsError."""
    if not 1 <= most_ranges <= MOST_RANGES:
        raise ValueError(f"most_ranges is {most_ranges}; from 1 to {MOST_RANGES} are allowed")
    counts = [1 << power for power in range((most_ranges - 1).bit_length() + 1)]
    groups = range(1, min(head_groups, shape.kv_heads) + 1)
    _apart(engine.device, lambda: _try_plans(engine, shape, counts, groups, (True, False)))
    if engine.on_gpu:
        torch.cuda.synchronize(engine.device)


def _try_plans(
    engine: Engine,
    shape: AttentionShape,
    counts: Sequence[int],
    head_groups: Sequence[int],
    packings: Sequence[bool],
) -> None:
    """One causal sequence, two, ranges that lie apart, and a ring."""
    sequences = ([2 * BLOCK], [BLOCK + 40, BLOCK - 40])
    cases = [[causal(length) for length in lengths] for lengths in sequences]
    cases += [[_stripes(count)] for count in counts]
    for masks, groups, packed in product(cases, head_groups, packings):
        _try(engine, masks, shape, groups, packed=packed)
    _try_ring(engine, shape)


def check_kernel(engine: Engine, shape: AttentionShape) -> None:
    """The least that says whether a kernel is right for a shape: its own path for one sequence and
    for several, lists of tiles, and a ring. Once per process is enough. Raises
    WrongResultsError."""
    key = (engine.kernel.name, engine.kernel.collects, engine.device, shape)
    if key in _right:
        return
    if engine.on_gpu and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"kernel {engine.kernel.name!r} was not checked for this attention shape before a CUDA "
            "graph was captured: call executor.warm_up(shape) first"
        )
    logger.info(
        "kernel %r is compared with dense attention before its first use with %d q heads, %d kv "
        "heads, head dim %d, %s; compiling may take a minute, and warm_up does it ahead",
        engine.kernel.name,
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        shape.dtype,
    )
    _apart(engine.device, lambda: _try_plans(engine, shape, [2], [1], [False]))
    _right.add(key)


def _apart(device: torch.device, check: Callable[[], None]) -> None:
    """Runs it in a thread of its own. Modes belong to threads: whatever the caller is in, results
    are compared as they are (autocast, inference), and nobody else gets to see them: checkpointing
    records what a layer computes, and would miss it when the layer is computed again."""

    def run() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            check()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


_right: set[tuple[str, bool, torch.device, AttentionShape]] = set()


def _stripes(num_ranges: int) -> Mask:
    """Ranges that lie apart in the first kernel tile, so that none can be left out, and all keys of
    the second block: rows get several contributions."""
    step = BLOCK // 2 // num_ranges
    start = np.arange(num_ranges) * step
    stripes = np.stack([start, start + step // 2], axis=1)
    ranges = np.append(stripes, [[BLOCK, 2 * BLOCK]], axis=0).astype(np.int32)
    return Mask(np.tile(ranges, (2 * BLOCK, 1, 1)))


def _try(
    engine: Engine, masks: list[Mask], shape: AttentionShape, groups: int, *, packed: bool
) -> None:
    """On one rank, and on several with everything that travels between them."""
    inputs = _draw(sum(len(mask.ranges) for mask in masks), shape, engine.device, packed=packed)
    exact = _dense(masks, inputs)
    for ranks in (1, NUM_RANKS):
        plan = sample_plan(masks, ranks, shape, BLOCK, groups)
        _compare(_run(engine, plan, inputs), exact, engine.kernel.name, shape, ranks)


def _try_ring(engine: Engine, shape: AttentionShape) -> None:
    """Slots that get one block after the other."""
    masks = [causal(RING_RANKS * RING_BLOCK)]
    inputs = _draw(RING_RANKS * RING_BLOCK, shape, engine.device, packed=False)
    plan = sample_ring(masks, RING_RANKS, shape, RING_BLOCK)
    results = _run(engine, plan, inputs)
    _compare(results, _dense(masks, inputs), engine.kernel.name, shape, RING_RANKS)


def _compare(
    results: list[Tensor], exact: list[Tensor], kernel: str, shape: AttentionShape, ranks: int
) -> None:
    for name, given, expected in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = float((given.double() - expected).norm() / expected.norm())
        if not error <= TOLERANCES[shape.dtype]:  # nan, too
            raise WrongResultsError(
                f"kernel {kernel!r} is wrong here for {shape.q_heads} q heads, "
                f"{shape.kv_heads} kv heads, head dim {shape.head_dim}, {shape.dtype}: "
                f"relative error {error:.1g} of {name} on {ranks} rank{'s' * (ranks > 1)} "
                f"(allowed is {TOLERANCES[shape.dtype]:g})"
            )


def _draw(
    rows: int, shape: AttentionShape, device: torch.device, *, packed: bool
) -> tuple[Tensor, ...]:
    """q, k, v and dout; k and v lie packed, or each by itself."""
    generator = torch.Generator().manual_seed(rows)
    dtype = dtypes_of(shape).input

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    q, dout = (draw(rows, shape.q_heads, shape.head_dim) for _ in range(2))
    size = (rows, 2) if packed else (2, rows)
    k, v = draw(*size, shape.kv_heads, shape.head_dim).unbind(1 if packed else 0)
    return q, k, v, dout


def _run(engine: Engine, plan: Plan, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of all rows, in the order of the batch."""
    small = engine.like(InProcess(plan.num_ranks))
    prepared = PreparedPlan(tuple(plan.parts), small).send()
    order = torch.from_numpy(batch_order(plan.parts[0])).to(engine.device)
    place: Callable[[Tensor], Tensor] = lambda x: torch.empty_like(x).index_copy_(0, order, x)  # noqa: E731
    packed = inputs[1].stride(0) != inputs[1].stride(1) * inputs[1].shape[1]
    q, dout = place(inputs[0]), place(inputs[3])
    pair = torch.stack([place(x) for x in inputs[1:3]], 1 if packed else 0)
    k, v = pair.unbind(1 if packed else 0)
    dk, dv = torch.empty_like(pair).unbind(1 if packed else 0)
    options = DEFAULT_MASK, q.shape[2] ** -0.5
    out, lse = attend_forward(prepared, *options, q, k, v)
    results = (torch.empty_like(q), dk, dv)
    attend_backward(prepared, *options, (q, k, v), (out, lse), dout, results)
    return [x[order] for x in (out, *results)]


def _dense(masks: list[Mask], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients in fp64, sequence by sequence."""
    of_masks, first = [], 0
    for mask in masks:
        rows = slice(first, first + len(mask.ranges))
        first = rows.stop
        of_masks.append(_attend(mask, *(x[rows].double() for x in inputs)))
    return [torch.cat(parts) for parts in zip(*of_masks, strict=True)]


def _attend(mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of one sequence. By hand: the caller's backward may be under way."""
    ranges = torch.from_numpy(mask.ranges.astype(np.int64)).to(q.device)
    key = torch.arange(len(k), device=q.device)
    start, end = ranges[:, :, 0, None], ranges[:, :, 1, None]
    allowed = ((key >= start) & (key < end)).any(dim=1)
    scale, heads = q.shape[2] ** -0.5, k.shape[1]
    # [rows, kv heads, q heads of a kv head, dim]
    q, dout = (x.reshape(len(x), heads, -1, x.shape[2]) for x in (q, dout))
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * scale
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).nan_to_num(0.0)
    out = torch.einsum("hgqk,khd->qhgd", weights, v)
    delta = (dout * out).sum(dim=-1).permute(1, 2, 0).unsqueeze(-1)
    dscores = weights * (torch.einsum("qhgd,khd->hgqk", dout, v) - delta) * scale
    dq = torch.einsum("hgqk,khd->qhgd", dscores, k)
    dk, dv = (torch.einsum("hgqk,qhgd->khd", *pair) for pair in ((dscores, q), (weights, dout)))
    return out.flatten(1, 2), dq.flatten(1, 2), dk, dv

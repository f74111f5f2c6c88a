"""Warming up: runs small plans that compile all kernels that batches of an attention shape may
need, and compares every result with dense attention. Involves no other rank."""

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
from dyncp.executor.step import PreparedPlan, describe
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

BLOCK = 256  # rows: two kernel tiles, since some kernels are compiled differently for a single one
MOST_RANGES = 64  # distinct ranges that fit into the first kernel tile
NUM_RANKS = 2
RING_RANKS, RING_BLOCK = 4, 150  # blocks end inside kernel tiles
# Norm of the error / norm of the result. bf16 keeps 8 bits: a correct kernel is off by 0.3 %, one
# that adds up the wrong rows by 100 %.
TOLERANCES = {"bf16": 2e-2, "fp16": 5e-3, "fp32": 1e-3, "fp64": 1e-9}


def warm_up(engine: Engine, shape: AttentionShape, head_groups: int, most_ranges: int) -> None:
    """Covers plans with up to `head_groups` head groups and calls with up to `most_ranges` key
    ranges per row. Raises WrongResultsError."""
    counts = [1 << power for power in range((most_ranges - 1).bit_length() + 1)]
    groups = range(1, min(head_groups, shape.kv_heads) + 1)
    _in_thread(engine.device, lambda: _try_plans(engine, shape, counts, groups, (True, False)))
    if engine.on_gpu:
        torch.cuda.synchronize(engine.device)


def _try_plans(
    engine: Engine,
    shape: AttentionShape,
    counts: Sequence[int],
    head_groups: Sequence[int],
    packings: Sequence[bool],
) -> None:
    """One causal sequence, two causal sequences, rows with several ranges, and a ring."""
    sequences = ([2 * BLOCK], [BLOCK + 40, BLOCK - 40])
    cases = [[causal(length) for length in lengths] for lengths in sequences]
    cases += [[_stripes(count)] for count in counts]
    for masks, groups, packed in product(cases, head_groups, packings):
        plans = [sample_plan(masks, ranks, shape, BLOCK, groups) for ranks in (1, NUM_RANKS)]
        _try(engine, shape, masks, plans, packed=packed)
    masks = [causal(RING_RANKS * RING_BLOCK)]
    ring = sample_ring(masks, RING_RANKS, shape, RING_BLOCK)  # its slots are filled several times
    _try(engine, shape, masks, [ring], packed=False)


def check_kernel(engine: Engine, shape: AttentionShape) -> None:
    """A short check of a kernel for a shape, made once per process: its paths for one sequence and
    for several, tile lists, and a ring. Raises WrongResultsError."""
    key = (engine.kernel.name, engine.kernel.collects, engine.device, shape)
    if key in _checked:
        return
    if engine.on_gpu and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"kernel {engine.kernel.name!r} is used with this attention shape for the first time "
            "while a CUDA graph is being captured: call executor.warm_up(shape) first"
        )
    logger.info(
        "kernel %r is compared with dense attention before its first use with %s; compiling may "
        "take a minute, unless warm_up did it in advance",
        engine.kernel.name,
        describe(shape),
    )
    _in_thread(engine.device, lambda: _try_plans(engine, shape, [2], [1], [False]))
    _checked.add(key)


def _in_thread(device: torch.device, check: Callable[[], None]) -> None:
    """Runs the check in a thread of its own, where torch's modes are off: neither autocast nor
    inference mode of the caller affects it, and checkpointing does not record it as part of the
    layer (it would miss it when the layer is recomputed)."""

    def run() -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            check()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()


# Checks that passed in this process: kernel name, whether it collects, device, shape.
_checked: set[tuple[str, bool, torch.device, AttentionShape]] = set()


def _stripes(num_ranges: int) -> Mask:
    """A mask with separate ranges in the first kernel tile, so that none can be merged or skipped,
    and with all keys of the second block, so that rows get several contributions."""
    step = BLOCK // 2 // num_ranges
    start = np.arange(num_ranges) * step
    stripes = np.stack([start, start + step // 2], axis=1)
    ranges = np.append(stripes, [[BLOCK, 2 * BLOCK]], axis=0).astype(np.int32)
    return Mask(np.tile(ranges, (2 * BLOCK, 1, 1)))


def _try(
    engine: Engine,
    shape: AttentionShape,
    masks: list[Mask],
    plans: Sequence[Plan],
    *,
    packed: bool,
) -> None:
    """Runs plans of the same batch and compares their results with dense attention."""
    inputs = _draw(sum(len(mask.ranges) for mask in masks), shape, engine.device)
    exact = _dense(masks, inputs)
    for plan in plans:
        results = _run(engine, plan, inputs, packed=packed)
        _compare(results, exact, engine.kernel.name, shape, plan.num_ranks)


def _compare(
    results: list[Tensor], exact: list[Tensor], kernel: str, shape: AttentionShape, ranks: int
) -> None:
    for name, given, expected in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = float((given.double() - expected).norm() / expected.norm())
        if not error <= TOLERANCES[shape.dtype]:  # also for nan
            raise WrongResultsError(
                f"kernel {kernel!r} is wrong here for {describe(shape)}: relative error "
                f"{error:.1g} of {name} on {ranks} rank{'s' * (ranks > 1)} "
                f"(allowed is {TOLERANCES[shape.dtype]:g})"
            )


def _draw(rows: int, shape: AttentionShape, device: torch.device) -> tuple[Tensor, ...]:
    """Random q, k, v and dout."""
    generator = torch.Generator().manual_seed(rows)
    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
    return tuple(
        torch.randn(rows, h, shape.head_dim, generator=generator).to(device, dtypes_of(shape).input)
        for h in heads
    )


def _run(engine: Engine, plan: Plan, inputs: tuple[Tensor, ...], *, packed: bool) -> list[Tensor]:
    """Output and gradients of all rows, in batch order. k and v are packed into one tensor, or
    separate."""
    small = engine.like(InProcess(plan.num_ranks))
    prepared = PreparedPlan(tuple(plan.parts), small).send()
    order = torch.from_numpy(batch_order(plan.parts[0])).to(engine.device)
    q, k, v, dout = (torch.empty_like(x).index_copy_(0, order, x) for x in inputs)
    pair = torch.stack([k, v], 1 if packed else 0)
    k, v = pair.unbind(1 if packed else 0)
    dk, dv = torch.empty_like(pair).unbind(1 if packed else 0)
    options = DEFAULT_MASK, q.shape[2] ** -0.5
    out, lse = attend_forward(prepared, *options, q, k, v)
    results = (torch.empty_like(q), dk, dv)
    attend_backward(prepared, *options, (q, k, v), (out, lse), dout, results)
    return [x[order] for x in (out, *results)]


def _dense(masks: list[Mask], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of dense attention in fp64, sequence by sequence."""
    of_masks, first = [], 0
    for mask in masks:
        rows = slice(first, first + len(mask.ranges))
        first = rows.stop
        of_masks.append(_attend(mask, *(x[rows].double() for x in inputs)))
    return [torch.cat(parts) for parts in zip(*of_masks, strict=True)]


def _attend(mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of one sequence, without autograd: the caller may be in backward."""
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

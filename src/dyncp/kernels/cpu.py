"""Kernel `cpu`: torch's CPU flash kernels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.kernels.kernel import BackwardInputs, KernelCall, RowState
from dyncp.kernels.reference import (
    PlainCall,
    ReferenceKernel,
    RowTile,
    Three,
    attend_tile,
    attend_tile_backward,
)
from dyncp.kernels.row_ops import merge_partial

PIECE = 256


class Shape(Enum):
    FULL = "every query attends every key"
    CAUSAL = "query i attends keys 0..i"
    MASKED = "queries attend the keys in their ranges"


@dataclass(frozen=True, eq=False)
class Job:
    """Query rows × key rows that one flash kernel computes. `ranges` is None unless the shape is
    MASKED; ranges are relative to the first key row. If `first`, the rows' sums are still empty, so
    nothing needs merging."""

    rows: slice
    keys: slice
    shape: Shape
    ranges: Int64 | None = None
    first: bool = False


def cut_into_jobs(call: KernelCall) -> list[Job]:
    """A rectangle that is full, or causal from its first row, becomes one job. Any other is cut
    into pieces of 256 × 256: empty pieces are dropped, neighbouring full ones are joined, and only
    pieces on the edges of the mask get a mask."""
    jobs: list[Job] = []
    empty = call.q_states.before == RowState.NOTHING
    for q0, q1, k0, k1 in call.rectangles.tolist():
        relative = call.ranges[q0:q1] - call.k_coordinates[k0]
        for job in _cut_rectangle(relative.clip(0, k1 - k0), q0, k0, k1 - k0):
            if jobs and _continues(jobs[-1], job):
                keys = slice(jobs[-1].keys.start, job.keys.stop)
                jobs[-1] = replace(jobs[-1], keys=keys)
            else:
                jobs.append(replace(job, first=bool(empty[job.rows].all())))
                empty[job.rows] = False
    return jobs


def _continues(last: Job, job: Job) -> bool:
    """Whether both jobs are full, have the same rows, and the keys of `job` follow those of
    `last`."""
    full = last.shape is Shape.FULL and job.shape is Shape.FULL
    return full and last.rows == job.rows and last.keys.stop == job.keys.start


def _cut_rectangle(ranges: Int64, row: int, key: int, num_keys: int) -> Iterator[Job]:
    """`ranges` are the rows' ranges, relative to the first of the `num_keys` key rows."""
    whole = _job(ranges, row, key, num_keys)
    if whole.shape is not Shape.MASKED:
        yield whole
        return
    for first in range(0, len(ranges), PIECE):
        part = ranges[first : first + PIECE]
        for k0, k1 in _key_pieces(part, num_keys):
            yield _job(part.clip(k0, k1) - k0, row + first, key + k0, k1 - k0)


def _job(ranges: Int64, row: int, key: int, num_keys: int) -> Job:
    shape = _shape(ranges, num_keys)
    kept = ranges if shape is Shape.MASKED else None
    return Job(slice(row, row + len(ranges)), slice(key, key + num_keys), shape, kept)


def _key_pieces(ranges: Int64, num_keys: int) -> Iterator[tuple[int, int]]:
    """The pieces [first, end) of the keys that at least one row attends."""
    edges = np.append(np.arange(0, num_keys, PIECE), num_keys)
    below = np.minimum(ranges[:, :, 1, None], edges) - np.minimum(ranges[:, :, 0, None], edges)
    allowed = np.diff(below.sum(axis=(0, 1)))
    for i in np.flatnonzero(allowed).tolist():
        yield int(edges[i]), int(edges[i + 1])


def _shape(ranges: Int64, num_keys: int) -> Shape:
    count = (ranges[:, :, 1] - ranges[:, :, 0]).sum(axis=1)
    if (count == num_keys).all():
        return Shape.FULL
    causal = np.minimum(np.arange(1, len(ranges) + 1), num_keys)
    within = np.where(ranges[:, :, 1] > ranges[:, :, 0], ranges[:, :, 1], 0).max(axis=1) <= causal
    return Shape.CAUSAL if (count == causal).all() and within.all() else Shape.MASKED


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# If the largest entry of dO is in this range, no square that matters leaves the range of fp32.
SAFE_TO_SQUARE = (1e-10, 1e15)
FEW = 8  # entries of every row of dO that are searched for the largest


class CpuKernel(ReferenceKernel):
    """Runs one of torch's flash kernels per job, over [kv heads, q heads per kv head, rows, dim].

    Torch's kernels multiply masked values by 0, which turns NaN and infinity into NaN. A job whose
    results are not finite is therefore computed again row by row, over the keys that each row may
    attend.
    """

    name = "cpu"

    def list_tiles(self, call: KernelCall, device: torch.device) -> list[Job]:
        if device.type != "cpu":
            raise ValueError(f"kernel 'cpu' runs on CPU tensors; the executor's device is {device}")
        return cut_into_jobs(call)

    def add_outputs(
        self, call: PlainCall, inputs: Three, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        q, k, v = inputs
        for job in call.tiles:
            queries, keys, values = _inputs(job, q, k, v)
            mask, empty = _mask(job, q.dtype)
            job_out, job_lse = _flash(
                queries, keys, values, 0.0, job.shape is Shape.CAUSAL, attn_mask=mask, scale=scale
            )
            if not _all_finite(job_out):
                for tile in _row_by_row(job):
                    attend_tile(tile, inputs, scale, out, lse)
                continue
            job_lse = job_lse.flatten(0, 1).T
            if empty is not None:  # torch returns log-sum-exp 0 for fully masked rows
                job_lse = job_lse.masked_fill(empty.unsqueeze(-1), -torch.inf)
            rows_first = job_out.permute(2, 0, 1, 3).flatten(1, 2)
            if job.first:
                out[job.rows], lse[job.rows] = rows_first, job_lse
            else:
                merge_partial(out[job.rows], lse[job.rows], rows_first.to(out.dtype), job_lse)

    def add_gradients(
        self, call: PlainCall, inputs: BackwardInputs, scale: float, grads: Three
    ) -> None:
        (q, k, v, dout, lse, delta), (dq, dk, dv) = inputs, grads
        kv_heads = k.shape[1]
        out = torch.empty_like(dout)
        for run in call.q_runs:  # other rows are not initialised
            out[run.rows] = _output_with_row_sum(dout[run.rows], delta[run.rows])
        flash_lse = lse.masked_fill(lse == -torch.inf, 0.0)
        for job in call.tiles:
            queries, keys, values = _inputs(job, q, k, v)
            mask, _ = _mask(job, q.dtype)
            job_dq, job_dk, job_dv = _flash_backward(
                _heads_first(dout[job.rows], kv_heads),
                queries,
                keys,
                values,
                _heads_first(out[job.rows], kv_heads),
                _heads_first(flash_lse[job.rows].unsqueeze(-1), kv_heads).squeeze(-1).contiguous(),
                0.0,
                job.shape is Shape.CAUSAL,
                attn_mask=mask,
                scale=scale,
            )
            if not _all_finite(job_dq, job_dk, job_dv):
                for tile in _row_by_row(job):
                    attend_tile_backward(tile, inputs, scale, grads)
                continue
            dq[job.rows] += job_dq.permute(2, 0, 1, 3).flatten(1, 2)
            dk[job.keys] += job_dk.sum(dim=1, dtype=dk.dtype).transpose(0, 1)
            dv[job.keys] += job_dv.sum(dim=1, dtype=dv.dtype).transpose(0, 1)


def _heads_first(rows: Tensor, kv_heads: int) -> Tensor:
    """[rows, q heads, dim] as [kv heads, q heads per kv head, rows, dim], a view."""
    num_rows, q_heads, dim = rows.shape
    return rows.view(num_rows, kv_heads, q_heads // kv_heads, dim).permute(1, 2, 0, 3)


def _inputs(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Three:
    kv_heads = k.shape[1]
    queries = _heads_first(q[job.rows], kv_heads)
    shape = (-1, queries.shape[1], -1, -1)
    keys, values = (x[job.keys].transpose(0, 1).unsqueeze(1).expand(shape) for x in (k, v))
    return queries, keys, values


def _mask(job: Job, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Additive mask [rows, keys] in q's dtype (torch misreads other dtypes), and the rows that
    attend nothing."""
    if job.ranges is None:
        return None, None
    allowed = _allowed(job)
    mask = torch.zeros(allowed.shape, dtype=dtype, device="cpu").masked_fill_(~allowed, -torch.inf)
    return mask, ~allowed.any(dim=1)


def _allowed(job: Job) -> Tensor:
    """bool [rows, keys]: the pairs that the job computes."""
    size = (job.rows.stop - job.rows.start, job.keys.stop - job.keys.start)
    if job.ranges is None:
        everything = torch.ones(size, dtype=torch.bool, device="cpu")
        return everything.tril() if job.shape is Shape.CAUSAL else everything
    ranges = torch.from_numpy(job.ranges).unsqueeze(-1)
    key = torch.arange(size[1], device="cpu")
    return ((key >= ranges[:, :, 0]) & (key < ranges[:, :, 1])).any(dim=1)


def _row_by_row(job: Job) -> Iterator[RowTile]:
    columns = torch.arange(job.keys.start, job.keys.stop, device="cpu")
    yield from RowTile(job.rows, columns, _allowed(job)).single_rows()


def _all_finite(*tensors: Tensor) -> bool:
    """Looks at sums only, which is fast; fp16 is summed in fp32 because its range is too small."""
    wide = torch.float32 if tensors[0].dtype == torch.float16 else None
    return all(math.isfinite(x.sum(dtype=wide).item()) for x in tensors)


def _output_with_row_sum(dout: Tensor, delta: Tensor) -> Tensor:
    """An output O whose row sums of dO·O are `delta`.

    Torch's backward takes O but uses it only for these row sums. The executor passes the sums
    instead of O, so this returns the projection of O onto dO, which has the same row sums and is
    never larger than O.
    """
    largest = dout.abs().amax().item() if dout.numel() else 0.0
    wide = dout.to(delta.dtype)
    if not SAFE_TO_SQUARE[0] < largest < SAFE_TO_SQUARE[1]:
        unit = wide.abs().amax(dim=-1)
        unit = torch.where(unit == 0, 1.0, unit)
        wide, delta = wide / unit.unsqueeze(-1), delta / unit
    length = torch.linalg.vecdot(wide, wide)
    share = torch.where(length == 0, 0.0, delta / length)
    out = wide * share.unsqueeze(-1)
    return out if out.dtype == dout.dtype else _rounded(out, wide, delta, dout.dtype)


def _rounded(out: Tensor, wide: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """`out` in 16 bits, with nearly the same row sums. If the entries of dO are alike, all entries
    of `out` are rounded in the same direction; the missing part of the sum is then added to one
    entry."""
    rounded = out.to(dtype)
    missing = delta - torch.linalg.vecdot(wide, rounded.to(wide.dtype))
    factor, at = wide[..., :FEW].abs().max(dim=-1, keepdim=True)  # any entry that is not 0
    factor = torch.copysign(factor, wide.gather(-1, at))
    before = rounded.gather(-1, at)
    after = (before + missing.unsqueeze(-1) / factor).to(dtype)
    return rounded.scatter_(-1, at, torch.where(after.isfinite(), after, before))

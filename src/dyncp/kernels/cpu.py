"""Kernel `cpu`: torch's CPU flash kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dyncp.kernels.accumulate import Run, accumulator, list_runs, open_lse
from dyncp.kernels.call import KernelCall
from dyncp.kernels.cpu_jobs import Job, Shape, cut_into_jobs
from dyncp.kernels.index_arrays import IndexArrays
from dyncp.kernels.kernel import Gradients, Sums
from dyncp.kernels.merge import merge_partial

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Largest gradients for which no square that matters leaves the range of fp32.
SAFE_TO_SQUARE = (1e-10, 1e15)


@dataclass(frozen=True, slots=True)
class CpuCall:
    jobs: list[Job]
    q_runs: list[Run]
    k_runs: list[Run]


class CpuKernel:
    """Every job of a call is one flash kernel over [kv heads, q heads per kv head, rows, dim]."""

    name = "cpu"
    merges = True
    collects = False

    def lower(self, call: KernelCall, arrays: IndexArrays, *, backward: bool) -> CpuCall:  # noqa: ARG002
        if arrays.device.type != "cpu":
            raise ValueError(
                f"kernel 'cpu' runs on CPU tensors; the executor's device is {arrays.device}"
            )
        return CpuCall(cut_into_jobs(call), list_runs(call.q_states), list_runs(call.k_states))

    def attend(
        self,
        lowered: CpuCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        out: Sums,
        lse: Tensor,
    ) -> None:
        open_lse(lse, lowered.q_runs)
        with accumulator(out, lowered.q_runs) as sums:
            self._attend(lowered.jobs, (q, k, v), scale, sums, lse)

    def _attend(
        self,
        jobs: list[Job],
        inputs: tuple[Tensor, Tensor, Tensor],
        scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        q, k, v = inputs
        for job in jobs:
            queries, keys, values = _inputs(job, q, k, v)
            mask, empty = _mask(job, q.dtype)
            job_out, job_lse = _flash(
                queries, keys, values, 0.0, job.shape is Shape.CAUSAL, attn_mask=mask, scale=scale
            )
            job_lse = job_lse.flatten(0, 1).T
            if empty is not None:  # torch gives a fully masked row log-sum-exp 0
                job_lse = job_lse.masked_fill(empty.unsqueeze(-1), -torch.inf)
            rows_first = job_out.permute(2, 0, 1, 3).flatten(1, 2)
            if job.first:
                out[job.rows], lse[job.rows] = rows_first, job_lse
            else:
                merge_partial(out[job.rows], lse[job.rows], rows_first.to(out.dtype), job_lse)

    def attend_backward(
        self,
        lowered: CpuCall,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: Gradients,
    ) -> None:
        with (
            accumulator(grads.dq, lowered.q_runs) as dq,
            accumulator(grads.dk, lowered.k_runs) as dk,
            accumulator(grads.dv, lowered.k_runs) as dv,
        ):
            self._attend_backward(lowered, inputs, dout, lse, delta, scale, (dq, dk, dv))

    def _attend_backward(
        self,
        lowered: CpuCall,
        inputs: tuple[Tensor, Tensor, Tensor],
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        (q, k, v), (dq, dk, dv) = inputs, grads
        kv_heads = k.shape[1]
        out = torch.empty_like(dout)
        for run in lowered.q_runs:  # other rows may hold anything
            out[run.rows] = _output_with_row_sum(dout[run.rows], delta[run.rows])
        lse = lse.masked_fill(lse == -torch.inf, 0.0)
        for job in lowered.jobs:
            queries, keys, values = _inputs(job, q, k, v)
            mask, _ = _mask(job, q.dtype)
            job_dq, job_dk, job_dv = _flash_backward(
                _heads_first(dout[job.rows], kv_heads),
                queries,
                keys,
                values,
                _heads_first(out[job.rows], kv_heads),
                _rows_last(lse[job.rows], kv_heads),
                0.0,
                job.shape is Shape.CAUSAL,
                attn_mask=mask,
                scale=scale,
            )
            dq[job.rows] += job_dq.permute(2, 0, 1, 3).flatten(1, 2)
            dk[job.keys] += job_dk.sum(dim=1, dtype=dk.dtype).transpose(0, 1)
            dv[job.keys] += job_dv.sum(dim=1, dtype=dv.dtype).transpose(0, 1)


def _heads_first(rows: Tensor, kv_heads: int) -> Tensor:
    """[rows, q heads, dim] as [kv heads, q heads per kv head, rows, dim], a view."""
    num_rows, q_heads, dim = rows.shape
    return rows.view(num_rows, kv_heads, q_heads // kv_heads, dim).permute(1, 2, 0, 3)


def _rows_last(values: Tensor, kv_heads: int) -> Tensor:
    """[rows, q heads] as contiguous [kv heads, q heads per kv head, rows]."""
    num_rows, q_heads = values.shape
    return values.view(num_rows, kv_heads, q_heads // kv_heads).permute(1, 2, 0).contiguous()


def _inputs(job: Job, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k.shape[1]
    queries = _heads_first(q[job.rows], kv_heads)
    shape = (-1, queries.shape[1], -1, -1)
    keys, values = (x[job.keys].transpose(0, 1).unsqueeze(1).expand(shape) for x in (k, v))
    return queries, keys, values


def _mask(job: Job, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Additive mask [rows, keys] in q's dtype (torch misreads others), and rows it empties."""
    if job.ranges is None:
        return None, None
    ranges = torch.from_numpy(job.ranges).unsqueeze(-1)
    key = torch.arange(job.keys.stop - job.keys.start)
    allowed = ((key >= ranges[:, :, 0]) & (key < ranges[:, :, 1])).any(dim=1)
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, -torch.inf)
    return mask, ~allowed.any(dim=1)


def _output_with_row_sum(dout: Tensor, delta: Tensor) -> Tensor:
    """An output whose row sums with `dout` are `delta`.

    Torch's backward takes the output, of which it only uses the row sum of dO·O, which we have.
    The output's projection onto dO does as well, and is never larger than the output was.
    """
    largest = dout.abs().amax().item() if dout.numel() else 0.0
    wide = dout.to(delta.dtype)
    if not SAFE_TO_SQUARE[0] < largest < SAFE_TO_SQUARE[1]:
        wide, delta = wide / (largest or 1.0), delta / (largest or 1.0)
    length = torch.linalg.vecdot(wide, wide)
    share = torch.where(length > 0, delta / length, 0.0)
    return (wide * share.unsqueeze(-1)).to(dout.dtype)

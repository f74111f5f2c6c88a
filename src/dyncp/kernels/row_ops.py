"""RowOps: all work on rows outside attention, with one launch for everything that is due at a time.

Copies move rows from the caller's tensors and from received messages into workspaces and messages.
Sums add up the contributions to rows and store them in the caller's results or in messages. A table
describes each launch. Addresses in the executor's memory are byte offsets, so a table stays valid
if that memory is reallocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.kernels.kernel import IndexArrays


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges a partial result into `out` [rows, heads, dim] and `lse` [rows, heads] in place.

    Each partial output is a softmax over its own keys. Its share of the merged output is
    exp(its log-sum-exp − the merged log-sum-exp). A side that attended nothing has log-sum-exp −∞
    and share 0, even if both sides have.
    """
    total = torch.logaddexp(lse, new_lse)
    old_share, new_share = (share_of(side, total) for side in (lse, new_lse))
    out.mul_(old_share.unsqueeze(-1)).add_(new_out * new_share.unsqueeze(-1))
    lse.copy_(total)


def share_of(lse: Tensor, total: Tensor) -> Tensor:
    """The share of a softmax that keys with log-sum-exp `lse` have, if all have `total`. 0 if `lse`
    is −∞, even if `total` is."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of one call: of q and the other inputs, and of partial results in messages."""

    input: torch.dtype
    partial: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return accumulator_dtype(self.input)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The executor's memory, viewed as items of the inputs' dtype, of the dtype of partial results
    in messages, and of the accumulator dtype."""

    input: Tensor
    partial: Tensor
    wide: Tensor

    @staticmethod
    def of(base: Tensor, dtypes: Dtypes) -> "Memory":
        """`base` is uint8; its length is a multiple of 8."""
        return Memory(*(base.view(x) for x in (dtypes.input, dtypes.partial, dtypes.wide)))


IN_MEMORY = -1  # number of the executor's own memory; the caller's tensors have numbers from 0 on
LOG2E = 1.4426950408889634


class Kind(IntEnum):
    """What a copy writes."""

    ROWS = 0
    PER_HEAD = 1  # one value per head and row: log-sum-exps or row sums of dO·O
    BASE_2 = 2  # log-sum-exps in base 2; 0 for rows that attend nothing
    ZEROS = 3  # zeros into rows


class Copy(IntEnum):
    """Columns of a table of copies. Strides are in items."""

    KIND = 0
    COUNT = 1  # rows
    WIDTH = 2  # contiguous items of a row; for per-head values, the number of heads
    SOURCE = 3  # number of one of the caller's tensors, or IN_MEMORY
    FROM = 4  # first row of the caller's tensor, or first byte in memory
    COLUMN = 5  # first item (per-head values: first head) in the rows of the caller's tensor
    FROM_ROW = 6  # stride of rows in memory
    FROM_HEAD = 7  # stride of heads in memory, for per-head values
    TO = 8  # first byte, always in memory
    TO_ROW = 9
    TO_HEAD = 10


class Target(IntEnum):
    """Columns of a table of rows that contributions are added up for."""

    RESULT = 0  # number of one of the caller's results, or IN_MEMORY: a message
    AT = 1  # first row of the result, or first byte of the message
    HEAD = 2  # first head in the result
    HEADS = 3
    COUNT = 4  # rows
    LSE = 5  # first byte of the message's log-sum-exps
    FIRST = 6  # first of its sources
    NUM = 7  # number of its sources


class Form(IntEnum):
    """How a contribution is stored."""

    INPUT = 0  # rows in q's dtype
    PARTIAL = 1  # rows in the dtype of messages
    WIDE = 2  # rows in the accumulator dtype
    PANELS = 3  # gradient sums in the order of `panels_to_rows`


class Source(IntEnum):
    """Columns of a table of contributions, which are all in the executor's memory. Strides are in
    items."""

    FORM = 0
    AT = 1  # byte of the first row; for panels, of the first head
    ROW = 2  # stride of rows; for panels, of heads
    LSE = 3  # first byte of the log-sum-exps
    LSE_ROW = 4
    LSE_HEAD = 5
    PANEL_ROW = 6  # first row in the panels
    DIM = 7  # items of a row of panels
    SCALED = 8  # whether the contribution is multiplied by the scale of scores
    CLEARED = 9  # rows of panels that are set to 0 after reading: those of the whole slot


# int64[targets, columns of `Target`] and int64[sources, columns of `Source`]. The sources of each
# target are in the order in which they are added.
SumTable = tuple[Int64, Int64]

PANEL_ROWS, PANEL_COLUMNS = 64, 8


def panels_to_rows(sums: Tensor) -> Tensor:
    """Reorders gradient sums from flash-attn-4's order on Hopper to [heads, rows, dim].

    Its backward adds the registers of its matrix units to memory in their own order. Every 64 rows
    of a head are stored together, as panels of 8 columns. A panel has 512 numbers, and the numbers
    of one thread are next to each other:

        thread    0: rows 0 and 8, columns 0, 1     then thread 1: the same rows, columns 2, 3
        thread    4: rows 1 and 9, columns 0, 1     ...
        thread   32: rows 16 and 24, columns 0, 1   ...

    This holds for dQ, dK and dV and all head dims up to 128, whatever the size of the kernel's
    tiles. `tests/gpu` compares this function with flash-attn-4's own conversion.
    """
    heads, rows, dim = sums.shape
    # For every 64 rows: [panel, row // 16, row % 8, column pair, row // 8 % 2, column % 2]
    panels = sums.reshape(heads, rows // PANEL_ROWS, dim // PANEL_COLUMNS, 4, 8, 4, 2, 2)
    return panels.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(heads, rows, dim)


class RowSum(IntEnum):
    """Columns of a table of the caller's rows whose row sums of dO·O are computed, and whose
    log-sum-exps are copied."""

    ROW = 0  # first row
    HEAD = 1  # first head
    HEADS = 2
    COUNT = 3  # rows
    PADDED = 4  # rows that are written; those after `COUNT` get row sum 0 and log-sum-exp +∞
    DELTA = 5  # first byte of the row sums in memory
    LSE = 6  # first byte of the log-sum-exps in memory
    STRIDE = 7  # items between heads, of both


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """The caller's results: out and its log-sum-exps [rows, heads], or gradients (dq, dk, dv)."""

    rows: Sequence[Tensor]
    lse: Tensor | None = None


# Arguments after the memory: the caller's tensors [rows, heads, dim], and its log-sum-exps.
CopyLaunch = Callable[[Memory, Sequence[Tensor], Tensor | None], None]
# Arguments after the memory: the results, and the scale of scores.
SumLaunch = Callable[[Memory, Results, float], None]
# Arguments after the memory: dout, out and log-sum-exps.
RowSumLaunch = Callable[[Memory, Tensor, Tensor, Tensor], None]


class RowOps:
    """Makes launches from tables while a plan is prepared. Tables are never empty.

    This class runs them in plain torch, entry by entry; `TritonRowOps` runs them on GPUs."""

    def copy(self, copies: Int64, dim: int, dtypes: Dtypes, arrays: IndexArrays) -> CopyLaunch:  # noqa: ARG002
        """A launch for int64[copies, columns of `Copy`], with heads of `dim` items. No two copies
        may write to the same place."""
        return partial(_copy, copies.tolist())

    def combine(
        self,
        table: SumTable,
        dim: int,
        dtypes: Dtypes,  # noqa: ARG002
        arrays: IndexArrays,  # noqa: ARG002
        *,
        has_lse: bool,
    ) -> SumLaunch:
        """A launch that adds up contributions. With `has_lse`, outputs are merged by their
        log-sum-exps; otherwise gradients are added. Rows without contributions get 0 and
        log-sum-exp −∞."""
        targets, sources = (part.tolist() for part in table)
        return partial(_combine, targets, sources, dim, has_lse)

    def row_sums(
        self,
        rows: Int64,
        dtypes: Dtypes,  # noqa: ARG002
        arrays: IndexArrays,  # noqa: ARG002
        *,
        base_2: bool,
    ) -> RowSumLaunch:
        """A launch for int64[rows, columns of `RowSum`]. It computes row sums of dO·O and copies
        log-sum-exps, converted to base 2 if `base_2`."""
        return partial(_row_sums, rows.tolist(), base_2)


Entries = list[list[int]]


def _copy(copies: Entries, memory: Memory, given: Sequence[Tensor], lse: Tensor | None) -> None:
    for entry in copies:
        kind, size = entry[Copy.KIND], (entry[Copy.COUNT], entry[Copy.WIDTH])
        if kind in (Kind.ROWS, Kind.ZEROS):
            flat, strides = memory.input, (entry[Copy.TO_ROW], 1)
        else:
            flat, strides = memory.wide, (entry[Copy.TO_ROW], entry[Copy.TO_HEAD])
        target = _rows(flat, size, strides, entry[Copy.TO])
        if kind == Kind.ZEROS:
            target.zero_()
        else:
            source = _source(entry, flat, given, lse)
            target.copy_(_base_2(source) if kind == Kind.BASE_2 else source)


def _source(entry: list[int], flat: Tensor, given: Sequence[Tensor], lse: Tensor | None) -> Tensor:
    kind, count, width = entry[Copy.KIND], entry[Copy.COUNT], entry[Copy.WIDTH]
    if entry[Copy.SOURCE] == IN_MEMORY:
        head = 1 if kind == Kind.ROWS else entry[Copy.FROM_HEAD]
        return _rows(flat, (count, width), (entry[Copy.FROM_ROW], head), entry[Copy.FROM])
    rows = slice(entry[Copy.FROM], entry[Copy.FROM] + count)
    columns = slice(entry[Copy.COLUMN], entry[Copy.COLUMN] + width)
    if kind == Kind.ROWS:
        return given[entry[Copy.SOURCE]][rows].flatten(1)[:, columns]
    assert lse is not None, "the caller's only per-head values are log-sum-exps"
    return lse[rows, columns]


def _combine(
    targets: Entries,
    sources: Entries,
    dim: int,
    has_lse: bool,
    memory: Memory,
    results: Results,
    scale: float,
) -> None:
    for target in targets:
        shape = (target[Target.COUNT], target[Target.HEADS], dim)
        total = memory.wide.new_zeros(shape)
        lse = memory.wide.new_full(shape[:2], -torch.inf) if has_lse else None
        first = target[Target.FIRST]
        for source in sources[first : first + target[Target.NUM]]:
            value = _contribution(source, shape, memory, scale)
            if lse is None:
                total += value
            else:
                strides = (source[Source.LSE_ROW], source[Source.LSE_HEAD])
                new = _rows(memory.wide, shape[:2], strides, source[Source.LSE])
                merge_partial(total, lse, value, new)
        _store(target, total, lse, memory, results)


def _store(
    target: list[int], total: Tensor, lse: Tensor | None, memory: Memory, results: Results
) -> None:
    count, heads, dim = total.shape
    at, head = target[Target.AT], target[Target.HEAD]
    if target[Target.RESULT] == IN_MEMORY:
        _rows(memory.partial, total.shape, (heads * dim, dim, 1), at).copy_(total)
        if lse is not None:
            _rows(memory.wide, lse.shape, (heads, 1), target[Target.LSE]).copy_(lse)
        return
    rows, heads_here = slice(at, at + count), slice(head, head + heads)
    results.rows[target[Target.RESULT]][rows, heads_here] = total.to(results.rows[0].dtype)
    if lse is not None and results.lse is not None:
        results.lse[rows, heads_here] = lse


def _row_sums(
    entries: Entries, base_2: bool, memory: Memory, dout: Tensor, out: Tensor, lse: Tensor
) -> None:
    for row, head, heads, count, padded, delta_at, lse_at, stride in entries:
        rows, some = slice(row, row + count), slice(head, head + heads)
        shape, strides = (padded, heads), (1, stride)
        delta = _rows(memory.wide, shape, strides, delta_at)
        own_lse = _rows(memory.wide, shape, strides, lse_at)
        delta[:count] = (dout[rows, some].to(delta.dtype) * out[rows, some]).sum(dim=-1)
        own_lse[:count] = _base_2(lse[rows, some]) if base_2 else lse[rows, some]
        delta[count:], own_lse[count:] = 0.0, torch.inf


def _rows(flat: Tensor, shape: Sequence[int], strides: Sequence[int], at: int) -> Tensor:
    return flat.as_strided(shape, strides, flat.storage_offset() + at // flat.element_size())


def _base_2(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse * LOG2E)


def _contribution(
    source: list[int], shape: tuple[int, int, int], memory: Memory, scale: float
) -> Tensor:
    """One contribution in the accumulator dtype, [rows, heads, dim]."""
    form, (count, heads, dim) = source[Source.FORM], shape
    if form != Form.PANELS:
        flat = (memory.input, memory.partial, memory.wide)[form]
        strides = (source[Source.ROW], dim, 1)
        value = _rows(flat, shape, strides, source[Source.AT]).to(memory.wide.dtype)
        return value * scale if source[Source.SCALED] else value
    row, width = source[Source.PANEL_ROW], source[Source.DIM]
    first = row // PANEL_ROWS * PANEL_ROWS
    end = -(-(row + count) // PANEL_ROWS) * PANEL_ROWS
    at = source[Source.AT] + first * width * memory.wide.element_size()
    sums = _rows(memory.wide, (heads, end - first, width), (source[Source.ROW], width, 1), at)
    value = panels_to_rows(sums)[:, row - first : row - first + count, :dim].transpose(0, 1)
    value = value * scale if source[Source.SCALED] else value.clone()
    if source[Source.CLEARED]:
        size = (heads, source[Source.CLEARED] * width)
        _rows(memory.wide, size, (source[Source.ROW], 1), at).zero_()
    return value


def choose_row_ops(device: torch.device) -> RowOps:
    """Row operations in Triton on GPUs, in plain torch elsewhere."""
    if device.type != "cuda":
        return RowOps()
    from dyncp.kernels.triton_row_ops import TritonRowOps

    return TritonRowOps()

"""RowOps: everything that happens to rows outside attention, one launch for all that is due.

Copies move rows from the caller's tensors and from received messages into workspaces and messages.
Sums add up the contributions to rows, into the caller's results or into messages. A launch is
described by a table; addresses in the executor's memory are byte offsets, so a table stays valid if
that memory moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dyncp.arrays import Int64
from dyncp.kernels.kernel import IndexArrays


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_partial(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges a partial result into `out` [rows, heads, dim] and `lse` [rows, heads] in place.

    Each partial output is a softmax over its own keys; its share of the whole is
    exp(its log-sum-exp − the joint one). A side that attended nothing has log-sum-exp −∞ and
    share 0, also when both have.
    """
    total = torch.logaddexp(lse, new_lse)
    old_share, new_share = (_share(side, total) for side in (lse, new_lse))
    out.mul_(old_share.unsqueeze(-1)).add_(new_out * new_share.unsqueeze(-1))
    lse.copy_(total)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Of one call: q and other inputs, and partial results that travel."""

    input: torch.dtype
    partial: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return accumulator_dtype(self.input)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The executor's memory, viewed as items of the inputs' dtype, of the dtype in which partial
    results travel, and of the accumulator dtype."""

    input: Tensor
    partial: Tensor
    wide: Tensor

    @staticmethod
    def of(base: Tensor, dtypes: Dtypes) -> "Memory":
        """`base` is uint8, and its bytes a multiple of 8."""
        return Memory(*(base.view(x) for x in (dtypes.input, dtypes.partial, dtypes.wide)))


IN_MEMORY = -1  # in the executor's own memory, not in one of the caller's tensors
LOG2E = 1.4426950408889634


class Kind(IntEnum):
    """What is copied: rows, per-head values of rows, the same in base 2 (of log-sum-exps, 0 for
    rows that attend nothing), or zeros into rows."""

    ROWS = 0
    PER_HEAD = 1
    BASE_2 = 2
    ZEROS = 3


class Copy(IntEnum):
    """Columns of a table of copies. Rows have `WIDTH` items next to each other, per-head values as
    many heads. A source is one of the caller's tensors, from row `FROM` and item `COLUMN` of every
    row on, or the executor's own, from byte `FROM` on. Strides count items; `HEAD` is that of
    per-head values."""

    KIND = 0
    COUNT = 1
    WIDTH = 2
    SOURCE = 3
    FROM = 4
    COLUMN = 5
    FROM_ROW = 6
    FROM_HEAD = 7
    TO = 8
    TO_ROW = 9
    TO_HEAD = 10


class Target(IntEnum):
    """Columns of rows that contributions are added up for. They are `COUNT` rows of result number
    `RESULT`, from row `AT` and head `HEAD` on, or of a message, from byte `AT` on, whose
    log-sum-exps begin at byte `LSE`. Contributions are sources `FIRST` to `FIRST + NUM`."""

    RESULT = 0
    AT = 1
    HEAD = 2
    HEADS = 3
    COUNT = 4
    LSE = 5
    FIRST = 6
    NUM = 7


class Form(IntEnum):
    """How a contribution lies in memory: in q's dtype, as it travels, in the accumulator dtype, or
    in panels (`panels_to_rows`)."""

    INPUT = 0
    PARTIAL = 1
    WIDE = 2
    PANELS = 3


class Source(IntEnum):
    """Columns of contributions, all in the executor's own memory. `AT` is the first row's byte,
    `ROW` the items between rows; for panels they are the first head's byte and the items between
    heads, `PANEL_ROW` is the row there, and `DIM` the items of a row. Sums that are `SCALED` are
    multiplied by the scale of scores. `CLEARED` says how many rows of panels are set to 0 when they
    were read, in whole groups from the first on: those of the whole slot."""

    FORM = 0
    AT = 1
    ROW = 2
    LSE = 3
    LSE_ROW = 4
    LSE_HEAD = 5
    PANEL_ROW = 6
    DIM = 7
    SCALED = 8
    CLEARED = 9


# int64[targets, columns of `Target`], and int64[sources, columns of `Source`], those of each target
# in the order of additions.
SumTable = tuple[Int64, Int64]

PANEL_ROWS, PANEL_COLUMNS = 64, 8


def panels_to_rows(sums: Tensor) -> Tensor:
    """[heads, rows, dim] of gradient sums that lie as flash-attn-4 keeps them on Hopper.

    Its backward adds the registers of its matrix units to memory as they are. 64 rows of a head lie
    together, in panels of 8 columns; a panel has 512 numbers, those of one thread together:

        thread    0: rows 0 and 8, columns 0, 1     then thread 1: the same rows, columns 2, 3
        thread    4: rows 1 and 9, columns 0, 1     ...
        thread   32: rows 16 and 24, columns 0, 1   ...

    That holds for dQ, dK and dV and for all head dims up to 128, whatever the kernel's tiles are.
    `tests/gpu` compares it with what flash-attn-4 itself makes of such sums.
    """
    heads, rows, dim = sums.shape
    # [panel, row // 16, row % 8, column pair, row // 8 % 2, column % 2] of every group of rows
    panels = sums.reshape(heads, rows // PANEL_ROWS, dim // PANEL_COLUMNS, 4, 8, 4, 2, 2)
    return panels.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(heads, rows, dim)


class RowSum(IntEnum):
    """Columns of rows whose row sums of dO·O are made, and whose log-sum-exps are copied: `COUNT`
    of the caller's from `ROW` and head `HEAD` on, to bytes `DELTA` and `LSE`, heads `STRIDE` items
    apart. `COUNT` to `PADDED` get row sum 0 and log-sum-exp +∞."""

    ROW = 0
    HEAD = 1
    HEADS = 2
    COUNT = 3
    PADDED = 4
    DELTA = 5
    LSE = 6
    STRIDE = 7


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """What the caller gets: out and its log-sum-exps [rows, heads], or gradients (dq, dk, dv)."""

    rows: Sequence[Tensor]
    lse: Tensor | None = None


# The caller's rows [rows, heads, dim] and its log-sum-exps.
CopyLaunch = Callable[[Memory, Sequence[Tensor], Tensor | None], None]
# The results, and the scale of scores.
SumLaunch = Callable[[Memory, Results, float], None]
# dout, out and log-sum-exps.
RowSumLaunch = Callable[[Memory, Tensor, Tensor, Tensor], None]


class RowOps(Protocol):
    """Makes launches from tables, while a plan is prepared; no table is empty."""

    def copy(self, copies: Int64, dim: int, dtypes: Dtypes, arrays: IndexArrays) -> CopyLaunch:
        """From int64[copies, columns of `Copy`], of heads of `dim` items. No two of them write the
        same place."""

    def combine(
        self, table: SumTable, dim: int, dtypes: Dtypes, arrays: IndexArrays, *, has_lse: bool
    ) -> SumLaunch:
        """With `has_lse`, outputs are merged by their log-sum-exps; gradients are added. Rows
        without contributions get 0, and log-sum-exp −∞."""

    def row_sums(
        self, rows: Int64, dtypes: Dtypes, arrays: IndexArrays, *, base_2: bool
    ) -> RowSumLaunch:
        """From int64[rows, columns of `RowSum`]: row sums of dO·O, and log-sum-exps as kernels take
        them, in base 2 or not."""


class TorchRowOps:
    """Plain torch, entry by entry."""

    def copy(self, copies: Int64, dim: int, dtypes: Dtypes, arrays: IndexArrays) -> CopyLaunch:  # noqa: ARG002
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
    assert lse is not None, "per-head values of the caller's are log-sum-exps"
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
    """Triton on GPUs, plain torch elsewhere."""
    if device.type != "cuda":
        return TorchRowOps()
    from dyncp.kernels.triton_row_ops import TritonRowOps

    return TritonRowOps()

"""Row operations in Triton: one launch for all entries of a table.

Entries are cut into chunks of a few rows. What changes from batch to batch stands in tables or is
never specialised on; only head counts, dims and dtypes compile anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np
import triton
from torch import Tensor

from dyncp.arrays import Int64, starts_of
from dyncp.kernels.flash4.panels import COLUMNS
from dyncp.kernels.index_arrays import Index, IndexArrays
from dyncp.kernels.row_ops import (
    OWN,
    Copy,
    Dtypes,
    Form,
    Kind,
    Memory,
    Results,
    RowSum,
    Source,
    Target,
)
from dyncp.kernels.triton.row_kernels import (
    CHUNK,
    combine_chunk,
    copy_chunk,
    row_sums_of_chunk,
)

COPY_ROWS, COPY_COLUMNS = 8, 512  # of one program
WARPS = 4
VECTOR_BYTES = 16

# Launches of a table, with its grid, by how the caller's tensors are aligned.
Handles = dict[tuple[int, ...], Any]


def _launch(
    kernel: Any,
    handles: Handles,
    grid: tuple[int, int, int],
    tensors: Sequence[Tensor],
    others: Sequence[Any],
) -> None:
    """`kernel[grid](*tensors, *others)`. Triton looks at every argument to find what it compiled:
    it is asked once for each kind of launch of a table. Compiled kernels take plain addresses,
    which they need not ask the driver about."""
    addresses = [x.data_ptr() for x in tensors]
    key = tuple([address % VECTOR_BYTES for address in addresses])
    launch = handles.get(key)
    if launch is not None:
        launch(*addresses, *others)
        return
    handle = kernel[grid](*tensors, *others, num_warps=WARPS)
    if handle is not None:  # the interpreter compiles nothing
        handles[key] = handle[grid]


@dataclass(frozen=True, slots=True)
class CopyTable:
    """Chunks, and the sizes that the kernel is compiled for: items that can be loaded at once, and
    heads of per-head values."""

    chunks: Index
    grid: tuple[int, int, int]
    vector: int
    heads: int
    handles: Handles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CombineTable:
    chunks: Index
    sources: Index
    grid: tuple[int, int, int]
    sums_dim: int  # 0: no panels
    has_lse: bool
    only_input: bool  # all contributions have q's dtype, and none is scaled
    handles: Handles = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowSumTable:
    chunks: Index
    grid: tuple[int, int, int]
    handles: Handles = field(default_factory=dict)


class TritonRowOps:
    """See `RowOps`. Tables count bytes; their chunks count items of the dtype that is read."""

    def copy_table(
        self, copies: Int64, dim: int, dtypes: Dtypes, arrays: IndexArrays
    ) -> CopyTable | None:
        if not len(copies):
            return None
        copies = copies.copy()
        rows = np.isin(copies[:, Copy.KIND], (Kind.ROWS, Kind.ZEROS))
        size = np.where(rows, dtypes.input.itemsize, dtypes.wide.itemsize)
        own = copies[:, Copy.SOURCE] == OWN
        copies[own, Copy.FROM] //= size[own]
        copies[:, Copy.TO] //= size
        entry, begin, end = _cut(copies[:, Copy.COUNT], COPY_ROWS)
        chunks, own = copies[entry], own[entry]
        chunks[:, Copy.COUNT] = end - begin
        chunks[:, Copy.FROM] += begin * np.where(own, chunks[:, Copy.FROM_ROW], 1)
        chunks[:, Copy.TO] += begin * chunks[:, Copy.TO_ROW]
        widths = copies[rows, Copy.WIDTH]
        most_heads = int(copies[~rows, Copy.WIDTH].max(initial=1))
        return CopyTable(
            arrays.add(chunks),
            (len(chunks), triton.cdiv(int(widths.max(initial=1)), COPY_COLUMNS), 1),
            _vector(dim, dtypes.input.itemsize),
            triton.next_power_of_2(most_heads),
        )

    def copy(
        self, table: CopyTable | None, memory: Memory, given: Sequence[Tensor], lse: Tensor | None
    ) -> None:
        if table is None:
            return
        tensors = [*given, *[memory.input] * (4 - len(given))]
        per_head = memory.wide if lse is None else lse
        lse_strides = (0, 0) if lse is None else lse.stride()
        pointers = [table.chunks.tensor, memory.input, memory.wide, *tensors, per_head]
        others = [
            *[x.stride(0) for x in tensors], *lse_strides,
            table.vector, COPY_ROWS, COPY_COLUMNS, table.heads,
        ]  # fmt: skip
        _launch(copy_chunk, table.handles, table.grid, pointers, others)

    def combine_table(
        self,
        targets: Int64,
        sources: Int64,
        dtypes: Dtypes,
        arrays: IndexArrays,
        *,
        has_lse: bool,
    ) -> CombineTable | None:
        if not len(targets):
            return None
        targets, sources = targets.copy(), sources.copy()
        own, wide = targets[:, Target.RESULT] == OWN, dtypes.wide.itemsize
        targets[own, Target.AT] //= dtypes.partial.itemsize
        targets[own, Target.LSE] //= wide
        sizes = np.asarray([dtypes.input.itemsize, dtypes.partial.itemsize, wide, wide])
        sources[:, Source.AT] //= sizes[sources[:, Source.FORM]]
        sources[:, Source.LSE] //= wide
        if dtypes.partial == dtypes.input:  # one way to read them, without a choice
            sources[sources[:, Source.FORM] == Form.PARTIAL, Source.FORM] = Form.INPUT
        plain = (sources[:, Source.FORM] == Form.INPUT) & (sources[:, Source.SCALED] == 0)
        first, panels = targets[:, Target.FIRST], sources[:, Source.FORM] == Form.PANELS
        starts, rows = np.zeros(len(targets), np.int64), targets[:, Target.COUNT].copy()
        some = np.flatnonzero(targets[:, Target.NUM] > 0)
        some = some[panels[first[some]]]  # panels come first
        starts[some] = sources[first[some], Source.PANEL_ROW] % CHUNK.value
        rows[some] = np.maximum(rows[some], sources[first[some], Source.CLEARED])
        entry, begin, end = _cut(rows, CHUNK.value, starts)
        shift = (starts[entry] + begin) % CHUNK.value
        chunks = np.concatenate([targets[entry], np.stack([begin, shift], axis=1)], axis=1)
        # Chunks behind the last row of a slot only clear.
        chunks[:, Target.COUNT] = np.minimum(end, chunks[:, Target.COUNT]) - begin
        return CombineTable(
            arrays.add(chunks),
            arrays.add(sources if len(sources) else np.zeros((1, len(Source)), np.int64)),
            (len(chunks), int(targets[:, Target.HEADS].max()), 1),
            int(sources[panels, Source.DIM].max(initial=0)),
            has_lse,
            has_lse and dtypes.partial == dtypes.input and bool(plain.all()),
        )

    def combine(
        self,
        table: CombineTable | None,
        memory: Memory,
        results: Results,
        dim: int,
        scale: float,
    ) -> None:
        if table is None:
            return
        tensors = [*results.rows, *[memory.input] * (3 - len(results.rows))]
        per_head = memory.wide if results.lse is None else results.lse
        lse_strides = (0, 0) if results.lse is None else results.lse.stride()
        size = max(memory.input.element_size(), memory.partial.element_size())
        pointers = [
            table.chunks.tensor, table.sources.tensor, memory.input, memory.partial, memory.wide,
            *tensors, per_head,
        ]  # fmt: skip
        others = [
            *[x.stride(0) for x in tensors], *lse_strides, scale,
            dim, triton.next_power_of_2(max(COLUMNS, dim, table.sums_dim)),
            max(COLUMNS, table.sums_dim), table.has_lse, table.sums_dim > 0, table.only_input,
            _vector(dim, size),
        ]  # fmt: skip
        _launch(combine_chunk, table.handles, table.grid, pointers, others)

    def row_sum_table(self, rows: Int64, dtypes: Dtypes, arrays: IndexArrays) -> RowSumTable | None:
        if not len(rows):
            return None
        rows = rows.copy()
        rows[:, RowSum.DELTA] //= dtypes.wide.itemsize
        rows[:, RowSum.LSE] //= dtypes.wide.itemsize
        entry, begin, end = _cut(rows[:, RowSum.PADDED], CHUNK.value)
        chunks = rows[entry]
        chunks[:, RowSum.COUNT] = (chunks[:, RowSum.COUNT] - begin).clip(0, CHUNK.value)
        chunks[:, RowSum.PADDED] = end - begin
        for column in (RowSum.ROW, RowSum.DELTA, RowSum.LSE):
            chunks[:, column] += begin
        grid = (len(chunks), int(rows[:, RowSum.HEADS].max()), 1)
        return RowSumTable(arrays.add(chunks), grid)

    def row_sums(
        self,
        table: RowSumTable | None,
        memory: Memory,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        base_2: bool,
    ) -> None:
        if table is None:
            return
        dim, size = out.shape[2], out.element_size()
        pointers = [table.chunks.tensor, memory.wide, dout, out, lse]
        others = [
            dout.stride(0), out.stride(0), *lse.stride(), dim, triton.next_power_of_2(dim), base_2,
            _vector(dim, size),
        ]  # fmt: skip
        _launch(row_sums_of_chunk, table.handles, table.grid, pointers, others)


def _cut(counts: Int64, size: int, starts: Int64 | int = 0) -> tuple[Int64, Int64, Int64]:
    """Entries of `counts` rows in pieces that end on multiples of `size`, where an entry begins at
    `starts`: entry, first row and end of every piece."""
    starts = np.broadcast_to(np.asarray(starts, np.int64), counts.shape)
    pieces = -(-(counts + starts) // size) * (counts > 0)
    entry = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(entry)) - starts_of(pieces)[entry]
    begin = np.maximum(number * size - starts[entry], 0)
    return entry, begin, np.minimum((number + 1) * size - starts[entry], counts[entry])


def _vector(dim: int, item_bytes: int) -> int:
    """Items that heads of `dim` of them are aligned to, at most 16 bytes; `dense_rows` sees to it
    that the caller's are, too."""
    return gcd(VECTOR_BYTES, dim * item_bytes) // item_bytes

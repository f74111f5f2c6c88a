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
from dyncp.kernels.kernel import Index, IndexArrays
from dyncp.kernels.row_ops import (
    IN_MEMORY,
    PANEL_COLUMNS,
    Copy,
    CopyLaunch,
    Dtypes,
    Form,
    Kind,
    Memory,
    Results,
    RowSum,
    RowSumLaunch,
    Source,
    SumLaunch,
    SumTable,
    Target,
)
from dyncp.kernels.triton_row_kernels import (
    CHUNK,
    combine_chunk,
    copy_chunk,
    row_sums_of_chunk,
)

COPY_ROWS, COPY_COLUMNS = 8, 512  # of one program
WARPS = 4
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class TableLaunch:
    """A kernel over the chunks of a table. `handles` are compiled kernels with this grid, by how
    tensors are aligned."""

    kernel: Any
    indices: tuple[Index, ...]
    grid: tuple[int, int, int]
    handles: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def __call__(self, given: Sequence[Tensor], others: Sequence[Any]) -> None:
        """`kernel[grid](*indices, *given, *others)`. Triton hashes every argument to find its
        compiled kernel: it is asked once for each kind of launch. Compiled kernels take plain
        addresses, which they need not ask the driver about."""
        tensors = [*[index.tensor for index in self.indices], *given]
        addresses = [x.data_ptr() for x in tensors]
        key = tuple([address % VECTOR_BYTES for address in addresses])
        launch = self.handles.get(key)
        if launch is not None:
            launch(*addresses, *others)
            return
        handle = self.kernel[self.grid](*tensors, *others, num_warps=WARPS)
        if handle is not None:  # the interpreter compiles nothing
            self.handles[key] = handle[self.grid]


class TritonRowOps:
    """See `RowOps`. Tables count bytes; their chunks count items of the dtype that is read."""

    def copy(self, copies: Int64, dim: int, dtypes: Dtypes, arrays: IndexArrays) -> CopyLaunch:
        copies = copies.copy()
        rows = np.isin(copies[:, Copy.KIND], (Kind.ROWS, Kind.ZEROS))
        size = np.where(rows, dtypes.input.itemsize, dtypes.wide.itemsize)
        own = copies[:, Copy.SOURCE] == IN_MEMORY
        copies[own, Copy.FROM] //= size[own]
        copies[:, Copy.TO] //= size
        entry, begin, end = _cut(copies[:, Copy.COUNT], COPY_ROWS)
        chunks, own = copies[entry], own[entry]
        chunks[:, Copy.COUNT] = end - begin
        chunks[:, Copy.FROM] += begin * np.where(own, chunks[:, Copy.FROM_ROW], 1)
        chunks[:, Copy.TO] += begin * chunks[:, Copy.TO_ROW]
        most_width = int(copies[rows, Copy.WIDTH].max(initial=1))
        most_heads = int(copies[~rows, Copy.WIDTH].max(initial=1))
        grid = (len(chunks), triton.cdiv(most_width, COPY_COLUMNS), 1)
        sizes = (COPY_ROWS, COPY_COLUMNS, triton.next_power_of_2(most_heads))
        constants = (_vector(dim, dtypes.input.itemsize), *sizes)
        launch = TableLaunch(copy_chunk, (arrays.add(chunks),), grid)

        def run(memory: Memory, given: Sequence[Tensor], lse: Tensor | None) -> None:
            tensors = [*given, *[memory.input] * (4 - len(given))]
            per_head, lse_strides = _per_head(lse, memory)
            others = [*[x.stride(0) for x in tensors], *lse_strides, *constants]
            launch([memory.input, memory.wide, *tensors, per_head], others)

        return run

    def combine(
        self, table: SumTable, dim: int, dtypes: Dtypes, arrays: IndexArrays, *, has_lse: bool
    ) -> SumLaunch:
        targets, sources = (part.copy() for part in table)
        own, wide = targets[:, Target.RESULT] == IN_MEMORY, dtypes.wide.itemsize
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
        listed = sources if len(sources) else np.zeros((1, len(Source)), np.int64)
        sums_dim = int(sources[panels, Source.DIM].max(initial=0))  # 0: no panels
        only_input = has_lse and dtypes.partial == dtypes.input and bool(plain.all())
        padded = triton.next_power_of_2(max(PANEL_COLUMNS, dim, sums_dim))
        vector = _vector(dim, max(dtypes.input.itemsize, dtypes.partial.itemsize))
        constants = (dim, padded, sums_dim, has_lse, only_input, vector)
        grid = (len(chunks), int(targets[:, Target.HEADS].max()), 1)
        launch = TableLaunch(combine_chunk, (arrays.add(chunks), arrays.add(listed)), grid)

        def run(memory: Memory, results: Results, scale: float) -> None:
            tensors = [*results.rows, *[memory.input] * (3 - len(results.rows))]
            per_head, lse_strides = _per_head(results.lse, memory)
            others = [*[x.stride(0) for x in tensors], *lse_strides, scale, *constants]
            launch([memory.input, memory.partial, memory.wide, *tensors, per_head], others)

        return run

    def row_sums(
        self, rows: Int64, dtypes: Dtypes, arrays: IndexArrays, *, base_2: bool
    ) -> RowSumLaunch:
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
        launch = TableLaunch(row_sums_of_chunk, (arrays.add(chunks),), grid)

        def run(memory: Memory, dout: Tensor, out: Tensor, lse: Tensor) -> None:
            dim = out.shape[2]
            constants = (dim, triton.next_power_of_2(dim), base_2, _vector(dim, out.itemsize))
            strides = (dout.stride(0), out.stride(0), *lse.stride())
            launch([memory.wide, dout, out, lse], [*strides, *constants])

        return run


def _per_head(lse: Tensor | None, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
    """Log-sum-exps and their strides; any tensor stands in for those that a launch has not."""
    return (memory.wide, (0, 0)) if lse is None else (lse, lse.stride())


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

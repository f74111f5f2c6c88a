"""Row operations in Triton: one launch for all entries of a table.

Entries are cut into chunks of a few rows. Everything that changes from batch to batch is in tables
or in arguments that Triton does not specialise on. Kernels are compiled again only for other head
counts, head dims and dtypes.
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
    RowOps,
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

COPY_ROWS, COPY_COLUMNS = 8, 512  # per program
WARPS = 4
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class TableLaunch:
    """Launches a kernel over the chunks of a table. `handles` are its compiled variants with this
    grid, by the alignment of the tensors."""

    kernel: Any
    indices: tuple[Index, ...]
    grid: tuple[int, int, int]
    handles: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def __call__(self, given: Sequence[Tensor], others: Sequence[Any]) -> None:
        """Runs `kernel[grid](*indices, *given, *others)`. Triton hashes every argument to find the
        compiled variant, so only the first launch with an alignment goes through Triton. Later ones
        call the compiled variant with plain addresses, which also spares a query of the driver per
        tensor."""
        tensors = [*[index.tensor for index in self.indices], *given]
        addresses = [x.data_ptr() for x in tensors]
        key = tuple([address % VECTOR_BYTES for address in addresses])
        launch = self.handles.get(key)
        if launch is not None:
            launch(*addresses, *others)
            return
        handle = self.kernel[self.grid](*tensors, *others, num_warps=WARPS)
        if handle is not None:  # the interpreter returns None
            self.handles[key] = handle[self.grid]


class TritonRowOps(RowOps):
    """Addresses are in bytes in tables, and in items of the dtype that is read in their chunks."""

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
        if dtypes.partial == dtypes.input:  # kernels then read both in the same way
            sources[sources[:, Source.FORM] == Form.PARTIAL, Source.FORM] = Form.INPUT
        plain = (sources[:, Source.FORM] == Form.INPUT) & (sources[:, Source.SCALED] == 0)
        first, panels = targets[:, Target.FIRST], sources[:, Source.FORM] == Form.PANELS
        starts, rows = np.zeros(len(targets), np.int64), targets[:, Target.COUNT].copy()
        some = np.flatnonzero(targets[:, Target.NUM] > 0)
        some = some[panels[first[some]]]  # panels are always the first source
        starts[some] = sources[first[some], Source.PANEL_ROW] % CHUNK.value
        rows[some] = np.maximum(rows[some], sources[first[some], Source.CLEARED])
        entry, begin, end = _cut(rows, CHUNK.value, starts)
        shift = (starts[entry] + begin) % CHUNK.value
        chunks = np.concatenate([targets[entry], np.stack([begin, shift], axis=1)], axis=1)
        # Chunks after the last row of a slot only clear panels.
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
    """Log-sum-exps and their strides. A launch without them gets any tensor instead."""
    return (memory.wide, (0, 0)) if lse is None else (lse, lse.stride())


def _cut(counts: Int64, size: int, starts: Int64 | int = 0) -> tuple[Int64, Int64, Int64]:
    """Cuts entries of `counts` rows into pieces: the entry, first row and end row of every piece.
    With rows numbered from the entry's `starts` on, pieces end on multiples of `size`."""
    starts = np.broadcast_to(np.asarray(starts, np.int64), counts.shape)
    pieces = -(-(counts + starts) // size) * (counts > 0)
    entry = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(entry)) - starts_of(pieces)[entry]
    begin = np.maximum(number * size - starts[entry], 0)
    return entry, begin, np.minimum((number + 1) * size - starts[entry], counts[entry])


def _vector(dim: int, item_bytes: int) -> int:
    """The number of items, at most 16 bytes, to which heads of `dim` items are aligned. The
    executor's `dense_rows` ensures it for the caller's tensors."""
    return gcd(VECTOR_BYTES, dim * item_bytes) // item_bytes

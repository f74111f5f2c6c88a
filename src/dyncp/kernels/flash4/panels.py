"""The order in which flash-attn-4 keeps its gradient sums on Hopper.

Its backward adds the registers of its matrix units to memory as they are. 64 rows of a head lie
together, in panels of 8 columns; a panel has 512 numbers, those of one thread next to each other:

    thread    0: rows 0 and 8, columns 0, 1     then thread 1: the same rows, columns 2, 3
    thread    4: rows 1 and 9, columns 0, 1     ...
    thread   32: rows 16 and 24, columns 0, 1   ...

That holds for dQ, dK and dV and for all head dims up to 128, whatever the kernel's tiles are.
`tests/gpu` compares it with what flash-attn-4 itself makes of such sums.
"""

from torch import Tensor

ROWS, COLUMNS = 64, 8
# A group of 64 rows as [panel, row // 16, row % 8, column pair, row // 8 % 2, column % 2].
PANEL = (4, 8, 4, 2, 2)
TO_ROWS = (1, 4, 2, 0, 3, 5)
TO_PANELS = (3, 0, 2, 4, 1, 5)


def panels_to_rows(sums: Tensor) -> Tensor:
    """[heads, rows, dim] of such sums, which lie as [heads, rows × dim]."""
    heads, rows, dim = sums.shape
    panels = sums.reshape(heads, rows // ROWS, dim // COLUMNS, *PANEL)
    ordered = panels.permute(0, 1, *(2 + axis for axis in TO_ROWS))
    return ordered.reshape(heads, rows, dim)


def rows_to_panels(rows: Tensor) -> Tensor:
    """The other way round."""
    heads, num_rows, dim = rows.shape
    split = rows.reshape(heads, num_rows // ROWS, 4, 2, 8, dim // COLUMNS, 4, 2)
    ordered = split.permute(0, 1, *(2 + axis for axis in TO_PANELS))
    return ordered.reshape(heads, num_rows, dim)

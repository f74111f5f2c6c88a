"""The table of `dyncp bench kernels`: one line per mask, length and implementation."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dyncp.measure.kernels_bench import KernelRow, Measured

UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
OTHERS = {"flex": "× flex", "flash_attn_4": "× flash-attn-4"}


def draw_kernels(rows: Sequence["KernelRow"]) -> Iterator[str]:
    """Forward and backward side by side in every column; then what could not run, and why."""
    from dyncp.measure.kernels_bench import ratios_to

    ran = [row for row in rows if row.forward is not None]
    size, unit = _unit(ran)
    shown = [name for name in OTHERS if any(row.implementation == name for row in ran)]
    ratios = {name: ratios_to(rows, name) for name in shown}
    names = [unit, *(OTHERS[name] for name in shown), "call / kernel", "host µs", "error out, grad"]
    yield f"{'':<46}" + "".join(f"{name:^18}" for name in names)
    for row in ran:
        key = (row.mask, row.tokens, row.implementation)
        cells = [_speed(row, size), *(_pair(ratios[name].get(key), ".2f") for name in shown)]
        cells += [_pair(_overheads(row), ".2f"), _host(row), _errors(row)]
        label = f"{row.mask:<17}{row.tokens:>8,}  {row.implementation:<19}"
        yield label + "".join(f"{cell:^18}" for cell in cells)
    yield from _reasons(rows)


def _unit(rows: Sequence["KernelRow"]) -> tuple[float, str]:
    fastest = max((row.forward.flops for row in rows if row.forward), default=0.0)
    return next((unit for unit in UNITS if fastest >= unit[0]), UNITS[-1])


def _pair(values: Sequence[float] | None, form: str) -> str:
    return "–" if values is None else " / ".join(f"{value:{form}}" for value in values)


def _both(row: "KernelRow") -> tuple["Measured", "Measured"]:
    assert row.forward is not None
    assert row.backward is not None
    return row.forward, row.backward


def _speed(row: "KernelRow", size: float) -> str:
    return _pair([measured.flops / size for measured in _both(row)], ".0f")


def _host(row: "KernelRow") -> str:
    return _pair([1e6 * measured.host_seconds for measured in _both(row)], ",.0f")


def _overheads(row: "KernelRow") -> list[float] | None:
    """Whole call over its attention kernels."""
    found = [m.seconds / m.kernel_seconds for m in _both(row) if m.kernel_seconds]
    return found if len(found) == 2 else None


def _errors(row: "KernelRow") -> str:
    if row.errors is None:
        return "–"
    worst = max(error for name, error in row.errors.items() if name != "out")
    return _pair([row.errors["out"], worst], ".1e")


def _reasons(rows: Sequence["KernelRow"]) -> Iterator[str]:
    """One line per implementation and reason, with the masks it stands for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            masks = found.setdefault((row.implementation, row.reason), [])
            masks += [row.mask] if row.mask not in masks else []
    if found:
        yield ""
    for (name, reason), masks in found.items():
        everywhere = len(masks) == len({row.mask for row in rows})
        yield f"{name} did not run{'' if everywhere else ' on ' + ', '.join(masks)}: {reason}"

"""The tables of `dyncp bench layers`: one per batch and mask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Heading, key, factor and digits of every column.
COLUMNS = (
    ("wall ms", "wall_seconds", 1e3, 2),
    ("busy", "busy_share", 1, 3),
    ("host", "host_share", 1, 3),
    ("kernels", "kernels", 1, 0),
    ("their ms", "kernel_seconds", 1e3, 2),
    ("wall / theirs", "wall_over_kernels", 1, 3),
    ("× plain", "wall_over_plain", 1, 3),
)
WIDTHS = tuple(max(10, len(heading) + 2) for heading, *_ in COLUMNS)
NAMES = {"dyncp": "dyncp", "plain": "plain", "none": "no attention"}


def draw_layers(found: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Three lines for every rank, then worst and mean over ranks."""
    headings = "".join(
        f"{heading:>{width}}" for (heading, *_), width in zip(COLUMNS, WIDTHS, strict=True)
    )
    for group in found["summary"]:
        sample, mask = group["sample"], group["mask"]
        rows = [row for row in found["rows"] if (row["sample"], row["mask"]) == (sample, mask)]
        count = len(lengths[sample])
        yield ""
        yield (
            f"{sample} ({count} sequence{'s' if count > 1 else ''}), {mask}, plan by "
            f"{rows[0]['solver']}"
        )
        yield f"{'':<36}{'':<14}{'tokens':>9}{'Mpairs':>9}{headings}"
        for row in rows:
            yield from _rank(row)
        yield from _summary(group["attention"])
    yield from _reasons(found["rows"])


def _rank(row: Mapping[str, Any]) -> Iterator[str]:
    by_kind = row["attention"]
    labels = (
        f"rank {row['rank']} ({row['why']})",
        f"  {by_kind['plain']['implementation']}: {row['plain_documents']}",
        f"  {row['messages']} messages a layer",
    )
    for label, (kind, measured) in zip(labels, by_kind.items(), strict=True):
        pairs = f"{1e-6 * measured['pairs']:>9.2f}" if measured["pairs"] else f"{'–':>9}"
        yield f"{label:<36}{NAMES[kind]:<14}{row['tokens']:>9,}{pairs}" + _numbers(measured)


def _summary(by_kind: Mapping[str, Any]) -> Iterator[str]:
    for which in ("worst", "mean"):
        for kind, columns in by_kind.items():
            label = f"{which} of ranks" if kind == "dyncp" else ""
            values = {key: None if of is None else of[which] for key, of in columns.items()}
            yield f"{label:<36}{NAMES[kind]:<14}{'':>9}{'':>9}" + _numbers(values)


def _numbers(measured: Mapping[str, float | None]) -> str:
    text = ""
    for (_, key, factor, digits), width in zip(COLUMNS, WIDTHS, strict=True):
        value = measured[key]
        text += f"{'–':>{width}}" if value is None else f"{factor * value:>{width},.{digits}f}"
    return text


def _reasons(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why plain attention was not measured, every reason once."""
    found = {
        f"{one['implementation']} did not run: {one['reason']}": None
        for row in rows
        for one in row["attention"].values()
        if one["reason"]
    }
    if found:
        yield ""
        yield from found

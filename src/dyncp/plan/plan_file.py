"""Plan files: a plan with the batch it is for, so that it can be verified later. No pickle.

file = magic | version u32 | checksum 16 bytes | body
body = header length u32 | header (JSON: lengths, sample ids, mask names, runs) | runs | plan bytes

Masks are stored as runs of rows that grow linearly (see rows.py), one block per sequence. The first
column of a row is its position and target, the others are its key ranges: rows 0..3 of a causal
mask, (0, 1) [0,1)  (1, 2) [0,2)  (2, 3) [0,3)  (3, -1) [0,4), are two runs.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dyncp.arrays import Int32, frozen
from dyncp.blocks import Batch, build_blocks
from dyncp.checks import MOST_TOKENS, parse_json
from dyncp.masks import Mask, find_runs
from dyncp.plan.codec import PLAN_MAGIC
from dyncp.plan.plan import Plan
from dyncp.plan.row_ranges import RowRuns, build_row_runs

VERSION = 2
MAGIC = b"DYNCPFIL"
# Numbers that the masks of a batch take when they are written out, 2 per token and range: 1 GiB
# while they are. A few bytes of runs can stand for any number of rows.
MOST_NUMBERS = 2**26
_HEAD = struct.Struct("<8sI16s")
_COLUMNS = ("block", "start", "base", "slope")


class PlanFileError(ValueError):
    """The file is not a plan file of this version: truncated, changed, or something else."""


def save_plan(path: str | Path, plan: Plan, batch: Batch) -> None:
    """Writes the plan and its batch; `load_plan` reads them back."""
    data = encode_plan_file(plan, batch)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ValueError(f"plan file {path} cannot be written: {error.strerror}") from error


def load_plan(path: str | Path) -> tuple[Plan, Batch]:
    """The plan and the batch of a file; raises ValueError that names the file and the fault."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"plan file {path} cannot be read: {error.strerror}") from error
    try:
        return decode_plan_file(data)
    except ValueError as error:
        raise PlanFileError(f"plan file {path}: {error}") from error


def encode_plan_file(plan: Plan, batch: Batch) -> bytes:
    for masks in batch.masks.values():
        _check_size(batch.num_tokens, 1 + max(mask.ranges.shape[1] for mask in masks))
    runs = {name: _runs_of(masks, batch.lengths) for name, masks in batch.masks.items()}
    header = {
        "lengths": batch.lengths,
        "sample_ids": batch.sample_ids,
        "masks": [
            [name, runs[name].base.shape[:2], [mask.name for mask in masks]]
            for name, masks in batch.masks.items()
        ],
        "marks": {
            name: [
                [x if x is None else x.tolist() for x in (mask.branches, mask.weights)]
                for mask in masks
            ]
            for name, masks in batch.masks.items()
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    arrays = [getattr(run, column) for run in runs.values() for column in _COLUMNS]
    stored = [np.ascontiguousarray(array, "<i4").tobytes() for array in arrays]
    body = b"".join([struct.pack("<I", len(text)), text, *stored, plan.encode()])
    return _HEAD.pack(MAGIC, VERSION, _checksum(body)) + body


def decode_plan_file(data: bytes) -> tuple[Plan, Batch]:
    """What `encode_plan_file` encoded; raises ValueError for anything else."""
    body = _checked_body(data)
    try:
        (length,) = struct.unpack_from("<I", body)
        header = parse_json(body[4 : 4 + length])
        batch, end = _decode_batch(header, body, 4 + length)
    except PlanFileError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, struct.error) as error:
        raise PlanFileError(f"its batch is malformed: {error}") from error
    return Plan.decode(body[end:]), batch


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def _checked_body(data: bytes) -> bytes:
    if data[:8] == PLAN_MAGIC:
        raise PlanFileError(
            "it holds a plan without its batch; write it with `dyncp plan --save` or "
            "save_plan(path, plan, batch)"
        )
    if data[:8] != MAGIC:
        raise PlanFileError(f"it starts with {data[:8]!r}, a plan file with {MAGIC!r}")
    if len(data) < _HEAD.size:
        raise PlanFileError(f"it has {len(data)} bytes, its head takes {_HEAD.size}: truncated")
    _, version, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise PlanFileError(f"it has version {version}; this dyncp reads version {VERSION}")
    body = data[_HEAD.size :]
    if _checksum(body) != checksum:
        raise PlanFileError("it does not match its checksum: truncated or changed")
    return body


def _runs_of(masks: Sequence[Mask], lengths: Sequence[int]) -> RowRuns:
    rows = []
    for mask in masks:
        marks = np.stack([mask.resolved_positions(), mask.resolved_targets()], axis=1)
        rows.append(np.concatenate([marks[:, None], mask.ranges], axis=1))
    return build_row_runs(find_runs(rows), build_blocks(lengths, lengths))


def _decode_batch(header: Mapping[str, Any], body: bytes, offset: int) -> tuple[Batch, int]:
    """The batch, and where its arrays end."""
    lengths, sample_ids = tuple(header["lengths"]), tuple(header["sample_ids"])
    if not all(type(n) is int and 0 < n <= MOST_TOKENS for n in lengths):
        raise PlanFileError(f"its lengths are {list(lengths[:8])}; expected positive integers")
    if not all(type(n) is int for n in sample_ids):
        raise PlanFileError("its sample ids are not integers")
    masks: dict[str, tuple[Mask, ...]] = {}
    for name, (num_runs, num_columns), mask_names in header["masks"]:
        sizes = {"block": (num_runs,), "start": (num_runs,)}
        shapes = [sizes.get(column, (num_runs, num_columns, 2)) for column in _COLUMNS]
        arrays = []
        for shape in shapes:
            array, offset = _take(body, offset, shape)
            arrays.append(array)
        runs = RowRuns(*arrays)
        marks = header["marks"][name]
        names = [str(n) for n in mask_names]
        masks[str(name)] = tuple(_decode_masks(runs, lengths, names, marks))
    return Batch(lengths, masks, sample_ids), offset


def _check_size(num_tokens: int, num_columns: int) -> None:
    numbers = 2 * num_tokens * num_columns
    if numbers > MOST_NUMBERS:
        raise PlanFileError(
            f"its masks take {numbers:,} numbers ({num_tokens:,} tokens with up to "
            f"{num_columns - 1} key ranges); at most {MOST_NUMBERS:,} are read and written"
        )


def _take(body: bytes, offset: int, shape: Sequence[int]) -> tuple[Int32, int]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise PlanFileError(f"its runs have shape {list(shape)}")
    end = offset + 4 * int(np.prod(shape, dtype=object))
    if end > len(body):
        raise PlanFileError(f"its runs end {end - len(body)} bytes too late")
    return frozen(np.frombuffer(body[offset:end], "<i4").reshape(shape)), end


def _decode_masks(
    runs: RowRuns, lengths: Sequence[int], names: Sequence[str], marks: Sequence[Any]
) -> list[Mask]:
    if not len(names) == len(marks) == len(lengths) or runs.num_ranges < 2:
        raise PlanFileError(f"it has {len(names)} masks for {len(lengths)} sequences")
    _check_size(sum(lengths), runs.num_ranges)
    ordered = (np.diff(runs.block) >= 0).all()
    if not ordered or not np.array_equal(np.unique(runs.block), np.arange(len(lengths))):
        raise PlanFileError("its runs are not those of its sequences, one after the other")
    masks = []
    for sequence, (length, name) in enumerate(zip(lengths, names, strict=True)):
        start = runs.start[runs.block == sequence]
        if start[0] != 0 or start[-1] >= length or (np.diff(start) <= 0).any():
            raise PlanFileError(f"the runs of sequence {sequence} do not cover its rows in order")
        rows = runs.expand(sequence, 0, length)
        masks.append(Mask(rows[:, 1:], rows[:, 0, 0], rows[:, 0, 1], name, *marks[sequence]))
    return masks

"""Binary form of plans and of plan files, which hold the batch as well, so that a plan can be
verified later: JSON headers and raw arrays behind checksums. No pickle.

part = magic | version u32 | plan digest 16 bytes | checksum 16 bytes | body
body = header length u32 | header (JSON: scalars, item size and shape of every array) | arrays
plan = magic | version u32 | number of parts u32 | (length u64 | part) for each
file = magic | version u32 | checksum 16 bytes | body of the batch | plan

The arrays of a part are those of the dataclasses in format.py, in the order of their fields. In
files, masks are stored as runs of rows that grow linearly (`RowRuns`), one block per sequence. The
first column of a row is its position and target, the others are its key ranges: rows 0..3 of a
causal mask, (0, 1) [0,1)  (1, 2) [0,2)  (2, 3) [0,3)  (3, -1) [0,4), are two runs.
"""

import hashlib
import json
import struct
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, get_type_hints

import numpy as np

from dyncp.blocks import AttentionShape, Batch, HeadGroup, Tiles, build_blocks
from dyncp.checks import MOST_TOKENS, parse_json
from dyncp.masks import Mask, find_runs
from dyncp.placement import Balance, Limits
from dyncp.plan.check import check_part, check_runs
from dyncp.plan.format import (
    MaskPlan,
    OwnedBlocks,
    Program,
    RankPlan,
    RowRuns,
    Stretches,
    build_row_runs,
)

VERSION, FILE_VERSION = 3, 3
PART_MAGIC = b"DYNCPRNK"
PLAN_MAGIC = b"DYNCPPLN"
FILE_MAGIC = b"DYNCPFIL"
# Numbers that the masks of a batch take when they are written out, 2 per token and range: 1 GiB
# while they are. A few bytes of runs can stand for any number of rows.
MOST_NUMBERS = 2**26
_PART_HEAD = struct.Struct("<8sI16s16s")
_PLAN_HEAD = struct.Struct("<8sII")
FILE_HEAD = struct.Struct("<8sI16s")
_DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<i4"), 8: np.dtype("<i8")}
_SCALARS = (
    "rank",
    "num_ranks",
    "fingerprint",
    "solver",
    "static",
    "slot_alignment",
    "local_multiple",
    "declared_bytes",
)
MALFORMED = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, struct.error,
)  # fmt: skip
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class PlanDecodeError(ValueError):
    """The bytes are not a plan of this version: truncated, changed, or something else."""


class PlanFileError(ValueError):
    """The file is not a plan file of this version: truncated, changed, or something else."""


def encode_parts(parts: Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    """The parts with the digest of the whole plan, each with its encoded body to be sent later."""
    bodies = [encode_body(part) for part in parts]
    digest = _checksum(*map(_checksum, bodies)).hex()
    named = tuple(replace(part, digest=digest) for part in parts)
    for part, body in zip(named, bodies, strict=True):
        object.__setattr__(part, "body", body)
    return named


def encode_part(part: RankPlan) -> bytes:
    body = encode_body(part) if part.body is None else part.body
    digest = bytes.fromhex(part.digest)
    return _PART_HEAD.pack(PART_MAGIC, VERSION, digest, _checksum(digest, body)) + body


def encode_body(part: RankPlan) -> bytes:
    """All of a part but the digest of the whole plan, which is made from the bodies."""
    header = {name: getattr(part, name) for name in _SCALARS} | {
        "balance": _plain(part.balance) | {"limits": _plain(part.balance.limits)},
        "shape": _plain(part.shape),
        "head_groups": [[g.first_kv_head, g.num_kv_heads] for g in part.head_groups],
        "masks": [[name, mask.backward is not None] for name, mask in part.masks.items()],
    }
    tables: list[Any] = [part.blocks, part.stretches]
    for mask in part.masks.values():
        tables += [mask.tiles, mask.rows, *(program for _, program in mask.programs())]
    return _join(header, [part.lengths, *_arrays_of(tables)])


def _join(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """A body; `_split` takes it apart again."""
    described = [(array.itemsize, *array.shape) for array in arrays]
    text = _to_json({**header, "arrays": described}).encode()
    data = [array.astype(_DTYPES[array.itemsize], copy=False).tobytes() for array in arrays]
    return b"".join([struct.pack("<I", len(text)), text, *data])


def _split(body: bytes) -> tuple[dict[str, Any], deque[np.ndarray], int]:
    """The header, the arrays (read-only), and where they end."""
    (length,) = struct.unpack_from("<I", body)
    header, end = parse_json(body[4 : 4 + length]), 4 + length
    arrays: deque[np.ndarray] = deque()
    for index, (itemsize, *shape) in enumerate(header["arrays"]):
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"array {index} has shape {shape}")
        start, end = end, end + itemsize * prod(shape)
        if end > len(body):
            raise ValueError(f"array {index} ends {end - len(body)} bytes too late")
        arrays.append(np.frombuffer(body[start:end], _DTYPES[itemsize]).reshape(shape))
    return header, arrays, end


def _arrays_of(tables: Iterable[Any]) -> Iterator[np.ndarray]:
    for table in tables:
        yield from attrgetter(*_array_names(table.__class__))(table)


@cache
def _array_names(cls: Hashable) -> list[str]:
    """Dotted names of all arrays in a dataclass."""
    names = []
    for name, inner in _fields_of(cls):
        names += [name] if inner is None else [f"{name}.{path}" for path in _array_names(inner)]
    return names


# Asking for the type hints of every table anew took a third of the time of decoding.
@cache
def _fields_of(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    """Names of a dataclass's fields, each with the dataclass that it holds, or None."""
    hints = get_type_hints(cls).items()
    return tuple((name, hint if is_dataclass(hint) else None) for name, hint in hints)


def _plain(item: Any) -> dict[str, Any]:
    """Fields of a dataclass by name; `asdict` copies every value and takes ten times as long."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _checksum(*pieces: bytes) -> bytes:
    """Of the pieces, one after the other."""
    checksum = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        checksum.update(piece)
    return checksum.digest()


def decode_part(data: bytes) -> RankPlan:
    """The part of `encode_part`; raises PlanDecodeError for anything else."""
    if len(data) < _PART_HEAD.size:
        raise PlanDecodeError(
            f"plan part has {len(data)} bytes; its head alone takes {_PART_HEAD.size}: truncated"
        )
    magic, version, digest, checksum = _PART_HEAD.unpack_from(data)
    _check_head(magic, PART_MAGIC, version)
    body = data[_PART_HEAD.size :]
    if _checksum(digest, body) != checksum:
        raise PlanDecodeError("plan part does not match its checksum: truncated or changed")
    return decode_body(body, digest.hex())


def decode_body(body: bytes, digest: str) -> RankPlan:
    """Builds the part and checks every index in it, so that a decoded part is safe to run."""
    try:
        header, arrays, end = _split(body)
        part = _build(header, arrays, digest)
        if arrays or end != len(body):
            raise ValueError(f"{len(arrays)} arrays or {len(body) - end} bytes are left over")
        check_part(part)
    except MALFORMED as error:
        raise PlanDecodeError(f"plan part is malformed: {error}") from error
    return part


def _build(header: Mapping[str, Any], arrays: deque[np.ndarray], digest: str) -> RankPlan:
    """The part; takes its arrays away from the others."""
    scalars = {name: header[name] for name in _SCALARS}
    scalars["declared_bytes"] = {k: tuple(v) for k, v in header["declared_bytes"].items()}
    balance = dict(header["balance"])
    return RankPlan(
        **scalars,
        digest=digest,
        balance=Balance(**balance | {"limits": Limits(**balance["limits"])}),
        shape=AttentionShape(**header["shape"]),
        head_groups=tuple(HeadGroup(first, count) for first, count in header["head_groups"]),
        lengths=arrays.popleft(),
        blocks=_restore(OwnedBlocks, arrays),
        stretches=_restore(Stretches, arrays),
        masks={
            str(name): MaskPlan(
                tiles=_restore(Tiles, arrays),
                rows=_restore(RowRuns, arrays),
                forward=_restore(Program, arrays),
                backward=_restore(Program, arrays) if both else None,
            )
            for name, both in header["masks"]
        },
    )


def _restore(cls: Any, arrays: deque[np.ndarray]) -> Any:
    """The dataclass of the first arrays, which are taken away from the others."""
    fields = (inner for _, inner in _fields_of(cls))
    return cls(*(_restore(inner, arrays) if inner else arrays.popleft() for inner in fields))


def join_parts(parts: Sequence[bytes]) -> bytes:
    framed = [struct.pack("<Q", len(part)) + part for part in parts]
    return _PLAN_HEAD.pack(PLAN_MAGIC, VERSION, len(parts)) + b"".join(framed)


def split_parts(data: bytes) -> list[bytes]:
    if len(data) < _PLAN_HEAD.size:
        raise PlanDecodeError(f"plan has {len(data)} bytes; its head takes {_PLAN_HEAD.size}")
    magic, version, count = _PLAN_HEAD.unpack_from(data)
    _check_head(magic, PLAN_MAGIC, version)
    parts, offset = [], _PLAN_HEAD.size
    for index in range(count):
        length = int.from_bytes(data[offset : offset + 8], "little")
        parts.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
        if offset > len(data):
            raise PlanDecodeError(f"plan ends inside part {index} of {count}: truncated")
    if offset != len(data) or not parts:
        raise PlanDecodeError(f"plan has {len(data) - offset} bytes behind its {count} parts")
    return parts


def _check_head(magic: bytes, expected: bytes, version: int) -> None:
    if magic != expected:
        raise PlanDecodeError(f"bytes start with {magic!r}, a plan with {expected!r}: not a plan")
    if version != VERSION:
        raise PlanDecodeError(f"plan has version {version}; this dyncp reads version {VERSION}")


def encode_plan_file(plan: bytes, batch: Batch) -> bytes:
    """The file of an encoded plan and its batch."""
    for masks in batch.masks.values():
        _check_size(batch.num_tokens, 1 + max(mask.ranges.shape[1] for mask in masks))
    runs = [_runs_of(masks, batch.lengths) for masks in batch.masks.values()]
    header = {
        "lengths": batch.lengths,
        "sample_ids": batch.sample_ids,
        "masks": [[name, [mask.name for mask in masks]] for name, masks in batch.masks.items()],
        "marks": {
            name: [
                [x if x is None else x.tolist() for x in (mask.branches, mask.weights)]
                for mask in masks
            ]
            for name, masks in batch.masks.items()
        },
    }
    body = _join(header, [*_arrays_of(runs)]) + plan
    return FILE_HEAD.pack(FILE_MAGIC, FILE_VERSION, _checksum(body)) + body


def decode_plan_file(data: bytes) -> tuple[bytes, Batch]:
    """What `encode_plan_file` encoded; raises PlanFileError for anything else."""
    body = _checked_body(data)
    try:
        header, arrays, end = _split(body)
        batch = _decode_batch(header, arrays)
    except PlanFileError:
        raise
    except MALFORMED as error:
        raise PlanFileError(f"its batch is malformed: {error}") from error
    return body[end:], batch


def _checked_body(data: bytes) -> bytes:
    if data[:8] == PLAN_MAGIC:
        raise PlanFileError(
            "it holds a plan without its batch; write it with `dyncp plan --save` or "
            "save_plan(path, plan, batch)"
        )
    if data[:8] != FILE_MAGIC:
        raise PlanFileError(f"it starts with {data[:8]!r}, a plan file with {FILE_MAGIC!r}")
    if len(data) < FILE_HEAD.size:
        raise PlanFileError(f"it has {len(data)} bytes, its head takes {FILE_HEAD.size}: truncated")
    _, version, checksum = FILE_HEAD.unpack_from(data)
    if version != FILE_VERSION:
        raise PlanFileError(f"it has version {version}; this dyncp reads version {FILE_VERSION}")
    body = data[FILE_HEAD.size :]
    if _checksum(body) != checksum:
        raise PlanFileError("it does not match its checksum: truncated or changed")
    return body


def _runs_of(masks: Sequence[Mask], lengths: Sequence[int]) -> RowRuns:
    rows = []
    for mask in masks:
        marks = np.stack([mask.resolved_positions(), mask.resolved_targets()], axis=1)
        rows.append(np.concatenate([marks[:, None], mask.ranges], axis=1))
    return build_row_runs(find_runs(rows), build_blocks(lengths, lengths))


def _decode_batch(header: Mapping[str, Any], arrays: deque[np.ndarray]) -> Batch:
    lengths, sample_ids = tuple(header["lengths"]), tuple(header["sample_ids"])
    if not all(type(n) is int and 0 < n <= MOST_TOKENS for n in lengths):
        raise PlanFileError(f"its lengths are {list(lengths[:8])}; expected positive integers")
    if not all(type(n) is int for n in sample_ids):
        raise PlanFileError("its sample ids are not integers")
    masks: dict[str, tuple[Mask, ...]] = {}
    for name, mask_names in header["masks"]:
        names, marks = [str(n) for n in mask_names], header["marks"][name]
        masks[str(name)] = tuple(_decode_masks(_restore(RowRuns, arrays), lengths, names, marks))
    return Batch(lengths, masks, sample_ids)


def _check_size(num_tokens: int, num_columns: int) -> None:
    numbers = 2 * num_tokens * num_columns
    if numbers > MOST_NUMBERS:
        raise PlanFileError(
            f"its masks take {numbers:,} numbers ({num_tokens:,} tokens with up to "
            f"{num_columns - 1} key ranges); at most {MOST_NUMBERS:,} are read and written"
        )


def _decode_masks(
    runs: RowRuns, lengths: Sequence[int], names: Sequence[str], marks: Sequence[Any]
) -> list[Mask]:
    check_runs(runs)
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

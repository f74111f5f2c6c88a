"""Binary form of plans and plan files: JSON headers and raw arrays with checksums, no pickle. Plan
files also hold the batch, so that the plan can be verified later.

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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from math import prod
from typing import Any, get_type_hints

import numpy as np

from dyncp.blocks import AttentionShape, Batch, HeadGroup, Tiles, build_blocks
from dyncp.checks import parse_json, whole_number
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

VERSION = 3
PART_MAGIC = b"DYNCPRNK"
PLAN_MAGIC = b"DYNCPPLN"
FILE_MAGIC = b"DYNCPFIL"
# The most numbers that the masks of a batch may have when expanded, 2 per token and range (1 GiB
# during decoding). A few bytes of runs can describe any number of rows.
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
    """The bytes are not a plan or plan file of this version: truncated, changed, or foreign."""


def encode_parts(parts: Sequence[RankPlan]) -> tuple[str, tuple[bytes, ...]]:
    """The digest of a plan of these parts, and the parts encoded with it."""
    bodies = [encode_body(part) for part in parts]
    digest = _checksum(*map(_checksum, bodies))
    return digest.hex(), tuple(_with_head(digest, body) for body in bodies)


def encode_part(part: RankPlan) -> bytes:
    return _with_head(bytes.fromhex(part.digest), encode_body(part))


def _with_head(digest: bytes, body: bytes) -> bytes:
    return _PART_HEAD.pack(PART_MAGIC, VERSION, digest, _checksum(digest, body)) + body


def encode_body(part: RankPlan) -> bytes:
    """Encodes a part without the digest of the plan, which is computed from all bodies."""
    header = {name: getattr(part, name) for name in _SCALARS} | {
        "balance": _plain(part.balance) | {"limits": _plain(part.balance.limits)},
        "shape": _plain(part.shape),
        "head_groups": [[g.first_kv_head, g.num_kv_heads] for g in part.head_groups],
        "masks": [[name, mask.backward is not None] for name, mask in part.masks.items()],
    }
    tables: list[Any] = [part.blocks, part.stretches]
    for mask in part.masks.values():
        tables += [mask.tiles, mask.rows, *(program for _, program in mask.programs())]
    return _join(header, [part.lengths, *(x for table in tables for x in _arrays_of(table))])


def _join(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Encodes a body, which `_split` decodes."""
    described = [(array.itemsize, *array.shape) for array in arrays]
    text = _to_json({**header, "arrays": described}).encode()
    data = [array.astype(_DTYPES[array.itemsize], copy=False).tobytes() for array in arrays]
    return b"".join([struct.pack("<I", len(text)), text, *data])


def _split(body: bytes) -> tuple[dict[str, Any], deque[np.ndarray], int]:
    """The header, the arrays (read-only), and the offset at which they end."""
    (length,) = struct.unpack_from("<I", body)
    header, end = parse_json(body[4 : 4 + length]), 4 + length
    arrays: deque[np.ndarray] = deque()
    for index, (itemsize, *shape) in enumerate(header["arrays"]):
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"array {index} has shape {shape}")
        start, end = end, end + itemsize * prod(shape)
        if end > len(body):
            raise ValueError(f"array {index} ends {end - len(body)} bytes after the end")
        arrays.append(np.frombuffer(body[start:end], _DTYPES[itemsize]).reshape(shape))
    return header, arrays, end


def _arrays_of(table: Any) -> Iterator[np.ndarray]:
    """All arrays of a dataclass, including those of dataclasses in it."""
    for name, inner in _fields_of(table.__class__):
        value = getattr(table, name)
        yield from _arrays_of(value) if inner else [value]


# Without the cache, reading type hints took a third of the time of decoding.
@cache
def _fields_of(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    """The name of each field of a dataclass, and the field's class if that is a dataclass."""
    hints = get_type_hints(cls).items()
    return tuple((name, hint if is_dataclass(hint) else None) for name, hint in hints)


def _plain(item: Any) -> dict[str, Any]:
    """Fields of a dataclass by name; `asdict` copies every value and takes ten times as long."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _checksum(*pieces: bytes) -> bytes:
    """Hash of the concatenated pieces."""
    checksum = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        checksum.update(piece)
    return checksum.digest()


def decode_part(data: bytes) -> RankPlan:
    """Decodes what `encode_part` returned; raises PlanDecodeError for any other bytes."""
    digest, checksum = _read_head(data, _PART_HEAD, PART_MAGIC, "plan part")
    body = data[_PART_HEAD.size :]
    if _checksum(digest, body) != checksum:
        raise PlanDecodeError("plan part does not match its checksum: truncated or changed")
    return decode_body(body, digest.hex())


def _read_head(data: bytes, head: struct.Struct, magic: bytes, what: str) -> list[Any]:
    """Checks magic and version of a head, and returns its other fields."""
    if data[:8] != magic:
        raise PlanDecodeError(f"{what} starts with {data[:8]!r} instead of {magic!r}")
    if len(data) < head.size:
        raise PlanDecodeError(
            f"{what} has {len(data)} bytes, fewer than the {head.size} of its head: truncated"
        )
    _, version, *values = head.unpack_from(data)
    if version != VERSION:
        raise PlanDecodeError(f"{what} has version {version}; this dyncp reads version {VERSION}")
    return values


def decode_body(body: bytes, digest: str) -> RankPlan:
    """Builds the part and checks every index in it, so that a decoded part is safe to run."""
    try:
        header, arrays, end = _split(body)
        part = _build(header, arrays, digest)
        if arrays or end != len(body):
            raise ValueError(f"{len(arrays)} arrays and {len(body) - end} bytes are left over")
        check_part(part)
    except MALFORMED as error:
        raise PlanDecodeError(f"plan part is malformed: {error}") from error
    return part


def _build(header: Mapping[str, Any], arrays: deque[np.ndarray], digest: str) -> RankPlan:
    """Builds the part, and removes its arrays from `arrays`."""
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
    """Builds a dataclass from the first arrays, which are removed from `arrays`."""
    fields = (inner for _, inner in _fields_of(cls))
    return cls(*(_restore(inner, arrays) if inner else arrays.popleft() for inner in fields))


def join_parts(parts: Sequence[bytes]) -> bytes:
    framed = [struct.pack("<Q", len(part)) + part for part in parts]
    return _PLAN_HEAD.pack(PLAN_MAGIC, VERSION, len(parts)) + b"".join(framed)


def split_parts(data: bytes) -> list[bytes]:
    (count,) = _read_head(data, _PLAN_HEAD, PLAN_MAGIC, "plan")
    parts, offset = [], _PLAN_HEAD.size
    for index in range(count):
        length = int.from_bytes(data[offset : offset + 8], "little")
        parts.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
        if offset > len(data):
            raise PlanDecodeError(f"plan ends inside part {index} of {count}: truncated")
    if offset != len(data) or not parts:
        raise PlanDecodeError(f"plan has {len(data) - offset} bytes after its {count} parts")
    return parts


def encode_plan_file(plan: bytes, batch: Batch) -> bytes:
    """The bytes of a file with this encoded plan and its batch."""
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
    body = _join(header, [array for table in runs for array in _arrays_of(table)]) + plan
    return FILE_HEAD.pack(FILE_MAGIC, VERSION, _checksum(body)) + body


def _runs_of(masks: Sequence[Mask], lengths: Sequence[int]) -> RowRuns:
    rows = []
    for mask in masks:
        marks = np.stack([mask.resolved_positions(), mask.resolved_targets()], axis=1)
        rows.append(np.concatenate([marks[:, None], mask.ranges], axis=1))
    return build_row_runs(find_runs(rows), build_blocks(lengths, lengths))


def _check_size(num_tokens: int, num_columns: int) -> None:
    numbers = 2 * num_tokens * num_columns
    if numbers > MOST_NUMBERS:
        raise ValueError(
            f"the masks take {numbers:,} numbers ({num_tokens:,} tokens with up to "
            f"{num_columns - 1} key ranges); plan files hold at most {MOST_NUMBERS:,}"
        )


def decode_plan_file(data: bytes) -> tuple[bytes, Batch]:
    """Returns the encoded plan and its batch; raises PlanDecodeError if this is no plan file."""
    if data[:8] == PLAN_MAGIC:
        raise PlanDecodeError(
            "it holds a plan without its batch; write it with `dyncp plan --save` or "
            "save_plan(path, plan, batch)"
        )
    (checksum,) = _read_head(data, FILE_HEAD, FILE_MAGIC, "it")
    body = data[FILE_HEAD.size :]
    if _checksum(body) != checksum:
        raise PlanDecodeError("it does not match its checksum: truncated or changed")
    try:
        header, arrays, end = _split(body)
        return body[end:], _decode_batch(header, arrays)
    except MALFORMED as error:
        raise PlanDecodeError(f"its batch is malformed: {error}") from error


def _decode_batch(header: Mapping[str, Any], arrays: deque[np.ndarray]) -> Batch:
    lengths = [whole_number("a sequence length", n, 1) for n in header["lengths"]]
    masks: dict[str, tuple[Mask, ...]] = {}
    for name, mask_names in header["masks"]:
        runs = _restore(RowRuns, arrays)
        _check_size(sum(lengths), runs.num_ranges)
        check_runs(runs, build_blocks(lengths, lengths), np.arange(len(lengths)))
        named = zip(lengths, mask_names, header["marks"][name], strict=True)
        masks[str(name)] = tuple(
            _decode_mask(runs.expand(sequence, 0, length), str(mask_name), marks)
            for sequence, (length, mask_name, marks) in enumerate(named)
        )
    return Batch(tuple(lengths), masks, tuple(header["sample_ids"]))


def _decode_mask(rows: np.ndarray, name: str, marks: Sequence[Any]) -> Mask:
    return Mask(rows[:, 1:], rows[:, 0, 0], rows[:, 0, 1], name, *marks)

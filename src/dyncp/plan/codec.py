"""Binary form of plans: a JSON header and raw arrays behind a checksum. No pickle.

part = magic | version u32 | plan digest 16 bytes | checksum 16 bytes | body
body = header length u32 | header (JSON: scalars, array names, types and shapes) | array bytes
plan = magic | version u32 | number of parts u32 | (length u64 | part) for each
"""

import hashlib
import json
import struct
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, lru_cache
from math import prod
from operator import attrgetter
from typing import Any, get_type_hints

import numpy as np

from dyncp.blocks import AttentionShape, HeadGroup
from dyncp.checks import parse_json
from dyncp.placement import Balance, Limits
from dyncp.plan.check import check_part
from dyncp.plan.format import MaskPlan, OwnedBlocks, RankPlan, Stretches

VERSION = 2
PART_MAGIC = b"DYNCPRNK"
PLAN_MAGIC = b"DYNCPPLN"
_PART_HEAD = struct.Struct("<8sI16s16s")
_PLAN_HEAD = struct.Struct("<8sII")
_DTYPES: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
_NAMES = {4: "int32", 8: "int64"}  # dtype.name takes 5 µs, and there are a thousand arrays
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
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error,
)  # fmt: skip
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class PlanDecodeError(ValueError):
    """The bytes are not a plan of this version: truncated, changed, or something else."""


def encode_parts(parts: Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    """The parts with the digest of the whole plan, each with its encoded body to be sent later."""
    bodies = [encode_body(part) for part in parts]
    digest = hashlib.blake2b(digest_size=16)
    for body in bodies:
        digest.update(hashlib.blake2b(body, digest_size=16).digest())
    named = tuple(replace(part, digest=digest.hexdigest()) for part in parts)
    for part, body in zip(named, bodies, strict=True):
        object.__setattr__(part, "body", body)
    return named


def encode_part(part: RankPlan) -> bytes:
    body = encode_body(part) if part.body is None else part.body
    digest = bytes.fromhex(part.digest)
    return _PART_HEAD.pack(PART_MAGIC, VERSION, digest, _checksum(digest, body)) + body


def encode_body(part: RankPlan) -> bytes:
    """All of a part but the digest of the whole plan, which is made from the bodies."""
    names, arrays = _arrays_of(part)
    header = {name: getattr(part, name) for name in _SCALARS} | {
        "balance": _plain(part.balance) | {"limits": _plain(part.balance.limits)},
        "shape": _plain(part.shape),
        "head_groups": [[g.first_kv_head, g.num_kv_heads] for g in part.head_groups],
        "masks": [[name, mask.backward is not None] for name, mask in part.masks.items()],
    }
    kinds = tuple([(a.itemsize, a.ndim) for a in arrays])
    described = _array_template(names, kinds) % tuple([n for a in arrays for n in a.shape])
    text = f'{_to_json(header)[:-1]},"arrays":{described}}}'.encode()
    data = [a.astype(_DTYPES[_NAMES[a.itemsize]], copy=False).tobytes() for a in arrays]
    return b"".join([struct.pack("<I", len(text)), text, *data])


def _arrays_of(part: RankPlan) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Names and values of all arrays of a part."""
    names: tuple[str, ...] = ("lengths",)
    arrays = [part.lengths]
    tables: list[tuple[str, Any, str]] = [
        ("blocks", part.blocks, ""),
        ("stretches", part.stretches, ""),
    ]
    for index, mask in enumerate(part.masks.values()):
        tables.append((f"masks.{index}", mask, "backward" if mask.backward is None else ""))
    for name, table, skip in tables:
        own, values_of = _array_fields(name, table.__class__, skip)
        names += own
        arrays += values_of(table)
    return names, arrays


# The names of a part's arrays are the same for all ranks. Going through the fields anew for each,
# and writing their list with json, took half of the time of assembling a plan for 32 ranks.
@cache
def _array_fields(
    name: str, cls: Hashable, skip: str
) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    """Names of all arrays in a dataclass but those of its field `skip`, and what gets them."""
    paths = [path for path in _dotted_names(cls) if path.split(".")[0] != skip]
    return tuple(f"{name}.{path}" for path in paths), attrgetter(*paths)


@lru_cache
def _array_template(names: Sequence[str], kinds: Sequence[tuple[int, int]]) -> str:
    """JSON list of [name, type, shape] for (item size, dimensions) of arrays, with %d for sizes."""
    described = [
        f'["{name}","{_NAMES[itemsize]}",[{",".join(["%d"] * dimensions)}]]'
        for name, (itemsize, dimensions) in zip(names, kinds, strict=True)
    ]
    return f"[{','.join(described)}]"


def _dotted_names(cls: Any) -> Iterator[str]:
    for field, inner in _fields_of(cls):
        if inner is None:
            yield field
        else:
            yield from (f"{field}.{name}" for name in _dotted_names(inner))


# Asking for the type hints of every table anew took a third of the time of decoding.
@cache
def _fields_of(cls: Hashable) -> tuple[tuple[str, Any], ...]:
    """Names of a dataclass's fields, each with the dataclass that it holds, or None."""
    return tuple((name, _dataclass_in(hint)) for name, hint in get_type_hints(cls).items())


def _dataclass_in(hint: Any) -> Any:
    """The dataclass that a type is or may be, or None."""
    return next((t for t in (hint, *getattr(hint, "__args__", ())) if is_dataclass(t)), None)


def _plain(item: Any) -> dict[str, Any]:
    """Fields of a dataclass by name; `asdict` copies every value and takes ten times as long."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def _checksum(digest: bytes, body: bytes) -> bytes:
    checksum = hashlib.blake2b(digest, digest_size=16)
    checksum.update(body)
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
        header, arrays = _split_body(body)
        part = _build(header, arrays, digest)
        check_part(part)
    except PlanDecodeError:
        raise
    except MALFORMED as error:
        raise PlanDecodeError(f"plan part is malformed: {error}") from error
    return part


def _split_body(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = struct.unpack_from("<I", body)
    header, offset = parse_json(body[4 : 4 + length]), 4 + length
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in header["arrays"]:
        if not all(type(n) is int and n >= 0 for n in shape):
            raise PlanDecodeError(f"array {name!r} has shape {shape}")
        size = _DTYPES[dtype].itemsize * prod(shape)
        if offset + size > len(body):
            raise PlanDecodeError(f"array {name!r} ends {offset + size - len(body)} bytes too late")
        array = np.frombuffer(body[offset : offset + size], _DTYPES[dtype]).reshape(shape)
        arrays[name] = array
        offset += size
    if offset != len(body):
        raise PlanDecodeError(f"{len(body) - offset} bytes are left behind the last array")
    return header, arrays


def _build(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], digest: str) -> RankPlan:
    balance = dict(header["balance"])
    masks = {
        str(name): _restore(MaskPlan, f"masks.{index}", arrays, skip=() if both else ("backward",))
        for index, (name, both) in enumerate(header["masks"])
    }
    scalars = {name: header[name] for name in _SCALARS}
    scalars["declared_bytes"] = {k: tuple(v) for k, v in header["declared_bytes"].items()}
    return RankPlan(
        **scalars,
        digest=digest,
        balance=Balance(**balance | {"limits": Limits(**balance["limits"])}),
        shape=AttentionShape(**header["shape"]),
        head_groups=tuple(HeadGroup(first, count) for first, count in header["head_groups"]),
        lengths=arrays["lengths"],
        blocks=_restore(OwnedBlocks, "blocks", arrays),
        stretches=_restore(Stretches, "stretches", arrays),
        masks=masks,
    )


def _restore(
    cls: Any, name: str, arrays: Mapping[str, np.ndarray], skip: Sequence[str] = ()
) -> Any:
    """The dataclass whose arrays were collected under `name`; `skip` names fields that are None."""
    values: dict[str, Any] = {}
    for field, inner in _fields_of(cls):
        if field in skip:
            values[field] = None
        elif inner is not None:
            values[field] = _restore(inner, f"{name}.{field}", arrays)
        else:
            values[field] = arrays[f"{name}.{field}"]
    return cls(**values)


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

"""The binary form of plans: exact, small, and safe to read."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given

from cases import cases
from dyncp import AttentionShape, Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.plan import PlanDecodeError, decode_part, encode_part
from sizes import draws, pick


def small_plan() -> Plan:
    batch = Batch.of(
        [
            {"default": masks.causal(n), "local": masks.lambda_shaped(n, sinks=1, window=4)}
            for n in (21, 5, 1)
        ]
    )
    shape = AttentionShape(4, 2, 8)
    config = PlannerConfig("random", block_size=4, head_groups=2)
    return plan_batch(batch, Topology(1, 3), shape, config)


@draws(50)
@given(case=cases())
def test_a_decoded_plan_equals_the_encoded_one(case):
    data = case.plan.encode()
    assert Plan.decode(data).encode() == data
    for part in case.plan.parts:
        assert encode_part(decode_part(encode_part(part))) == encode_part(part)


def test_every_part_carries_the_digest_of_the_whole_plan():
    plan = small_plan()
    assert {part.digest for part in plan.parts} == {plan.digest}
    assert small_plan().digest == plan.digest
    other = plan_batch(
        Batch.of([masks.causal(27)]), Topology(1, 3), planner=PlannerConfig(block_size=4)
    )
    assert other.digest != plan.digest


def test_parts_of_different_plans_do_not_make_a_plan():
    batch = Batch.of([masks.causal(27)])
    plans = [
        plan_batch(batch, Topology(1, 2), planner=PlannerConfig("random", seed=s, block_size=4))
        for s in range(2)
    ]
    mixed = Plan((plans[0].parts[0], plans[1].parts[1]))
    with pytest.raises(PlanDecodeError, match="different plans"):
        Plan.decode(mixed.encode())
    with pytest.raises(PlanDecodeError, match="parts are of ranks"):
        Plan.decode(Plan((plans[0].parts[1], plans[0].parts[0])).encode())


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Flips, cuts, doubles or swaps some bytes."""
    kind, at = rng.integers(5), int(rng.integers(len(data)))
    changed = bytearray(data)
    if kind == 0:
        changed[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        return data[:at]
    elif kind == 2:
        changed[at:at] = rng.bytes(int(rng.integers(1, 9)))
    elif kind == 3:
        changed[at : at + 8] = struct.pack("<q", int(rng.integers(-(2**62), 2**62)))[
            : len(data) - at
        ]
    else:
        other = int(rng.integers(len(data)))
        changed[at], changed[other] = changed[other], changed[at]
    return bytes(changed)


def test_mutated_plans_decode_to_an_equal_plan_or_raise_cleanly():
    plan, rng = small_plan(), np.random.default_rng(0)
    whole, part = plan.encode(), encode_part(plan.parts[1])
    for _ in range(pick(500, 5000)):
        for data, decode, encode in (
            (whole, Plan.decode, Plan.encode),
            (part, decode_part, encode_part),
        ):
            changed = mutate(data, rng)
            try:
                decoded = decode(changed)
            except PlanDecodeError:
                continue
            assert encode(decoded) == data


def test_mutated_bodies_with_a_valid_checksum_never_raise_anything_else():
    data = encode_part(small_plan().parts[1])
    digest, body = data[12:28], data[44:]  # after magic and version; after the checksum
    rng, decoded = np.random.default_rng(1), 0
    changes = pick(1000, 5000)
    for _ in range(changes):
        changed = mutate(body, rng)
        checksum = hashlib.blake2b(digest + changed, digest_size=16).digest()
        try:
            decode_part(data[:28] + checksum + changed)
        except PlanDecodeError:
            continue
        decoded += 1
    assert decoded < changes / 2  # most changes break an index or the header


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "starts with b'' instead of"),
        (b"PK\x03\x04" + bytes(100), "instead of b'DYNCPPLN'"),
        (small_plan().encode()[:-5], "truncated"),
        (small_plan().encode() + b"x", "1 bytes after"),
        (small_plan().encode()[:8] + b"\x63" + small_plan().encode()[9:], "version 99"),
    ],
)
def test_foreign_truncated_or_newer_bytes_are_named(data, message):
    with pytest.raises(PlanDecodeError, match=message):
        Plan.decode(data)


def test_a_changed_part_does_not_match_its_checksum():
    data = bytearray(encode_part(small_plan().parts[0]))
    data[-1] ^= 1
    with pytest.raises(PlanDecodeError, match="checksum"):
        decode_part(bytes(data))


def test_a_part_stays_small_for_a_long_batch_on_32_ranks():
    lengths = [16343, 17726, 11633, 10276, 9710] + [2000] * 32
    batch = Batch.of([masks.lambda_shaped(n) for n in lengths])
    plan = plan_batch(batch, Topology(4, 8), AttentionShape(8, 2, 128))
    assert max(len(encode_part(part)) for part in plan.parts) < 256 * 1024


def test_the_checksum_covers_the_digest():
    part = small_plan().parts[0]
    data = bytearray(encode_part(part))
    data[12] ^= 1  # first byte of the digest
    with pytest.raises(PlanDecodeError, match="checksum"):
        decode_part(bytes(data))

"""Plan files can be read back, and any other file is refused with a reason."""

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given

from cases import Case, cases
from dyncp import Batch, Plan, PlannerConfig, Topology, masks, plan_batch
from dyncp.plan import PlanDecodeError, load_plan, save_plan
from dyncp.plan.codec import FILE_HEAD as HEAD
from dyncp.plan.codec import FILE_MAGIC, VERSION, decode_plan_file, encode_plan_file
from dyncp.verify import verify_plan
from sizes import draws


def small() -> tuple[Plan, Batch]:
    chosen = [
        {"default": masks.causal(60), "local": masks.sliding_window(60, window=7)},
        {"default": masks.full(9), "local": masks.lambda_shaped(9, sinks=1, window=2)},
    ]
    batch = Batch.of(chosen, sample_ids=[17, 4])
    return plan_batch(batch, Topology(1, 3), planner=PlannerConfig(block_size=8)), batch


def small_file() -> bytes:
    plan, batch = small()
    return encode_plan_file(plan.encode(), batch)


def reseal(data: bytes) -> bytes:
    """The same file with a checksum that fits its body."""
    body = data[HEAD.size :]
    return HEAD.pack(FILE_MAGIC, VERSION, hashlib.blake2b(body, digest_size=16).digest()) + body


@draws(60)
@given(case=cases())
def test_plan_and_batch_come_back(case: Case):
    encoded, batch = decode_plan_file(encode_plan_file(case.plan.encode(), case.batch))
    assert Plan.decode(encoded) == case.plan
    assert batch == case.batch
    assert batch.fingerprint == case.batch.fingerprint


def test_a_file_keeps_sample_ids_names_positions_and_targets(tmp_path):
    """The shared question has positions and targets of its own."""
    shared = masks.shared_question(40, question=10, answers=[15, 15])
    batch = Batch.of([shared, masks.causal(20)], sample_ids=[5, 2])
    plan = plan_batch(batch, Topology(1, 2))
    save_plan(tmp_path / "a.plan", plan, batch)
    loaded, back = load_plan(tmp_path / "a.plan")
    assert loaded == plan
    assert back.sample_ids == (5, 2)
    assert [mask.name for mask in back.masks["default"]] == [shared.name, "causal"]
    assert np.array_equal(back.masks["default"][0].positions, shared.positions)
    assert np.array_equal(back.masks["default"][0].targets, shared.targets)
    assert back.masks["default"][1].positions is None
    assert verify_plan(loaded, back) == []


def test_masks_take_little_room():
    batch = Batch.of([masks.lambda_shaped(n) for n in (60_000, 5_000)])
    plan = plan_batch(batch, Topology(1, 2))
    assert len(encode_plan_file(plan.encode(), batch)) - len(plan.encode()) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "starts with b''"),
        (lambda _: b"PK\x03\x04" + bytes(100), "instead of b'DYNCPFIL'"),
        (lambda data: data[:20], "20 bytes, fewer than the 28 of its head: truncated"),
        (lambda data: data[:-1], "checksum: truncated or changed"),
        (lambda data: data + b"x", "checksum: truncated or changed"),
        (
            lambda data: data[:8] + b"\x09" + data[9:],
            f"version 9; this dyncp reads version {VERSION}",
        ),
        (lambda _: small()[0].encode(), "a plan without its batch; write it with `dyncp plan"),
        (lambda data: reseal(data[:-3]), "truncated"),
        (lambda data: reseal(data[: HEAD.size + 400]), "bytes after the end"),
        (lambda data: reseal(data[: HEAD.size] + bytes(50)), "its batch is malformed"),
        (
            lambda data: reseal(data.replace(b'"lengths":[60,9]', b'"lengths":[60,0]')),
            "length is 0",
        ),
        (lambda data: reseal(data.replace(b'"lengths":[60,9]', b'"lengths":[61,8]')), "malformed"),
        (lambda data: reseal(data.replace(b'"lengths":[60,9]', b'"lengths":[6,90]')), "cover"),
        (lambda data: reseal(data.replace(b'"sample_ids"', b'"sample_idz"')), "sample_ids"),
    ],
)
def test_anything_else_is_refused_with_file_and_reason(tmp_path, change, message):
    path = tmp_path / "broken.plan"
    path.write_bytes(change(small_file()))
    with pytest.raises(PlanDecodeError) as refused:
        load_plan(path)
    assert "broken.plan: " in str(refused.value)
    assert message in str(refused.value)


def test_mutated_files_never_raise_anything_but_value_errors():
    """The checksum is valid, so that the decoder reads the mutated bytes."""
    data, rng, decoded = small_file(), np.random.default_rng(0), 0
    end = data.index(b"DYNCPPLN")
    for _ in range(1000):
        changed = bytearray(data)
        at = int(rng.integers(HEAD.size, end))
        changed[at] = int(rng.integers(256))
        try:
            Plan.decode(decode_plan_file(reseal(bytes(changed)))[0])
        except ValueError:
            continue
        decoded += 1
    assert decoded < 500  # most changes break a run or the header


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.plan cannot be read: No such file"):
        load_plan(tmp_path / "none.plan")
    with pytest.raises(ValueError, match="cannot be read"):
        load_plan(tmp_path)
    with pytest.raises(ValueError, match="cannot be written"):
        save_plan(tmp_path, *small())


def test_a_small_file_that_declares_many_tokens_is_refused_before_memory_is_taken():
    plan, batch = plan_batch(one := Batch.of([masks.causal(60)]), Topology()), one
    written, meant = b'{"lengths":[60]', b'{"lengths":[2147483647]'
    data = encode_plan_file(plan.encode(), batch)
    head = data[: HEAD.size]
    size = int.from_bytes(data[HEAD.size : HEAD.size + 4], "little") + len(meant) - len(written)
    body = size.to_bytes(4, "little") + data[HEAD.size + 4 :].replace(written, meant, 1)
    tracemalloc.start()
    with pytest.raises(PlanDecodeError, match="the masks take 8,589,934,588 numbers"):
        decode_plan_file(reseal(head + body))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_deeply_nested_headers_are_refused():
    deep = b"[" * 100_000
    with pytest.raises(PlanDecodeError, match="nested too deeply"):
        decode_plan_file(reseal(b" " * HEAD.size + len(deep).to_bytes(4, "little") + deep))

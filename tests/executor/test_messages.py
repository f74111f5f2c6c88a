"""Messages with the same payloads are packed once, and every peer still gets its bytes."""

import numpy as np
import torch

from dyncp import (
    AttentionShape,
    Batch,
    DCPExecutor,
    PlannerConfig,
    Topology,
    attention,
    masks,
    plan_batch,
)
from dyncp.plan import Direction, Messages, StyledProgram
from dyncp.plan.buffers import first_peers

SHAPE = AttentionShape(4, 2, 16, "bf16")


def test_the_first_peer_with_the_same_payloads_in_a_phase_is_found():
    columns = np.array(
        [
            # phase, peer, kind, head group, block
            [0, 1, 1, 0, 5], [0, 1, 1, 0, 6], [0, 2, 1, 0, 5], [0, 3, 1, 0, 5], [0, 3, 1, 0, 6],
            [1, 1, 1, 0, 5], [1, 2, 1, 1, 5], [1, 4, 1, 0, 5],
        ],
        np.int32,
    ).T  # fmt: skip
    assert first_peers(Messages(*columns)).tolist() == [1, 1, 2, 1, 1, 1, 2, 1]
    assert first_peers(Messages(*columns[:, :0])).tolist() == []


def test_keys_that_several_ranks_need_are_packed_once():
    batch = Batch.of([masks.causal(4000)])
    plan = plan_batch(batch, Topology(1, 8), SHAPE, PlannerConfig("owner_computes", block_size=500))
    taken = sum(
        buffer.num_bytes
        for part in plan.parts
        for buffer in StyledProgram(part, part.masks["default"], Direction.FORWARD).buffers(SHAPE)
        if buffer.name == "send"
    )
    executor = DCPExecutor(virtual_ranks=8)
    q, kv = (torch.randn(4000, *heads, 16).bfloat16() for heads in ((4,), (2, 2)))
    attention(executor.prepare(plan), q, kv)
    sent = sum(part.sent_bytes("default", Direction.FORWARD, SHAPE) for part in plan.parts)
    assert executor.transport.bytes_sent == sent
    assert taken < 0.7 * sent

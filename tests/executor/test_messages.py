"""Messages with the same payloads are packed once; what each peer gets stays the same."""

import numpy as np
import torch

from dyncp import AttentionShape, Batch, DCPExecutor, PlannerConfig, Topology, masks, plan_batch
from dyncp.executor.kernel_calls import LoweredProgram
from dyncp.executor.layout import RankLayout
from dyncp.kernels import IndexArrays
from dyncp.plan import Direction, Messages
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
    kernel, taken, sent = DCPExecutor().kernel, 0, 0
    for part in plan.parts:
        arrays = IndexArrays(torch.device("cpu"))
        mask = part.masks["default"]
        program = LoweredProgram(part, mask, Direction.FORWARD, kernel, arrays)
        layout = RankLayout(program, SHAPE)
        messages = [x for peers in layout.sends.peers.values() for x in peers.values()]
        here = sum(where.stop - where.start for where in messages)
        assert here == part.sent_bytes("default", Direction.FORWARD, SHAPE)
        sent += here
        taken += sum(x.num_bytes for x in layout.buffers.values() if x.name == "send")
    assert taken < 0.7 * sent

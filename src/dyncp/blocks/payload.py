"""What can travel between ranks, and how many bytes each kind takes per token."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from dyncp.arrays import Int64
from dyncp.blocks.shape import AttentionShape, HeadGroup


class Payload(IntEnum):
    """Kind of a transfer. A block's payload holds the rows of the block for one head group."""

    Q = 0  # forward: queries
    KV = 1  # both directions: keys and values
    OUT = 2  # forward: partial output and its log-sum-exp
    Q_DOUT = 3  # backward: queries, output gradients, log-sum-exp, row sums of dO·O
    DQ = 4  # backward: partial gradient of the queries
    DKV = 5  # backward: partial gradients of keys and values


class Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1


# Per direction: what a query block and a key block send out, and what they get back.
Q_INPUT = {Direction.FORWARD: Payload.Q, Direction.BACKWARD: Payload.Q_DOUT}
Q_RESULT = {Direction.FORWARD: Payload.OUT, Direction.BACKWARD: Payload.DQ}


def bytes_per_token(shape: AttentionShape, groups: Sequence[HeadGroup]) -> Int64:
    """Bytes of one token's payload, int64[kinds, head groups]."""
    rows = np.zeros((len(Payload), len(groups)), np.int64)
    for g, group in enumerate(groups):
        kv = group.num_kv_heads * shape.head_dim
        q_heads = group.num_kv_heads * shape.q_heads_per_kv_head
        q, row = q_heads * shape.head_dim, q_heads * shape.accumulator_bytes
        rows[Payload.Q, g] = q * shape.item_bytes
        rows[Payload.KV, g] = 2 * kv * shape.item_bytes
        rows[Payload.OUT, g] = q * shape.partial_bytes + row
        rows[Payload.Q_DOUT, g] = 2 * q * shape.item_bytes + 2 * row
        rows[Payload.DQ, g] = q * shape.partial_bytes
        rows[Payload.DKV, g] = 2 * kv * shape.partial_bytes
    return rows

"""The attention a plan is made for: heads and dtypes, and the payloads that ranks exchange."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np

from dyncp.arrays import Int64
from dyncp.checks import whole_number

# The bytes of any batch then fit into int64.
MOST_HEADS = MOST_HEAD_DIM = 2**14
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def dtype_name(dtype: Any) -> str | None:
    """The name of a dtype: bf16 of torch.bfloat16, "bfloat16" and "bf16". None for other dtypes.
    Compares strings: planning never imports torch."""
    text = str(dtype).removeprefix("torch.")
    return text if text in ITEM_BYTES else DTYPE_NAMES.get(text)


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Consecutive kv heads, with their q heads, that are planned together."""

    first_kv_head: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention layer.

    `dtype` is that of q, k and v: a name ("bf16") or a torch dtype, which is kept by its name.
    `partial_dtype` is the dtype in which partial outputs and gradients travel (default: `dtype`).
    With `exact=False` the numbers are an assumption for pricing only: the plan has one head group
    and fits any head counts, head dimension and dtype.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str | Any = "bf16"
    partial_dtype: str | Any | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        for field in ("q_heads", "kv_heads", "head_dim"):
            most = MOST_HEAD_DIM if field == "head_dim" else MOST_HEADS
            number = whole_number(field, getattr(self, field), 1, most)
            object.__setattr__(self, field, number)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide q_heads={self.q_heads}; "
                "every kv head serves the same number of q heads"
            )
        object.__setattr__(self, "dtype", _checked_dtype("dtype", self.dtype))
        if self.partial_dtype is not None:
            partial = _checked_dtype("partial_dtype", self.partial_dtype)
            object.__setattr__(self, "partial_dtype", partial)

    @staticmethod
    def assumed() -> "AttentionShape":
        """The usual 4:1 ratio of q to kv heads, for plans made without knowing the model."""
        return AttentionShape(exact=False)

    @property
    def q_heads_per_kv_head(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def partial_bytes(self) -> int:
        return ITEM_BYTES[self.partial_dtype or self.dtype]

    @property
    def accumulator_bytes(self) -> int:
        """Item size of accumulators, log-sum-exps and row sums: fp32, or fp64 for fp64 inputs."""
        return 8 if self.dtype == "fp64" else 4

    def divided(self, parts: int) -> "AttentionShape":
        """What one of `parts` tensor-parallel ranks has: its share of the heads."""
        if parts < 1 or self.q_heads % parts or self.kv_heads % parts:
            raise ValueError(
                f"attention has {self.q_heads} q heads and {self.kv_heads} kv heads; {parts} "
                "tensor-parallel ranks cannot share them: their number has to divide both"
            )
        return replace(self, q_heads=self.q_heads // parts, kv_heads=self.kv_heads // parts)

    def head_groups(self, num_groups: int = 1) -> tuple[HeadGroup, ...]:
        """`num_groups` groups of (nearly) equal size: 5 kv heads in 2 groups are 3 and 2."""
        if not 1 <= num_groups <= self.kv_heads:
            raise ValueError(
                f"head_groups is {num_groups}; allowed are 1 to {self.kv_heads} (the kv heads)"
            )
        if num_groups > 1 and not self.exact:
            raise ValueError(
                f"head_groups is {num_groups}, but the model's head counts are not known; "
                "give the attention shape (model=) to split heads into groups"
            )
        size, larger = divmod(self.kv_heads, num_groups)
        sizes = [size + 1] * larger + [size] * (num_groups - larger)
        return tuple(HeadGroup(sum(sizes[:i]), n) for i, n in enumerate(sizes))


def _checked_dtype(field: str, dtype: Any) -> str:
    name = dtype_name(dtype)
    if name is None:
        raise ValueError(
            f"{field} is {dtype!r}; choose one of {', '.join(ITEM_BYTES)}, or of torch's "
            f"{', '.join(DTYPE_NAMES)}"
        )
    return name


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


# By kind: whether tiles read it (otherwise they produce it), and whether it belongs to a key block.
IS_INPUT = np.isin(np.arange(len(Payload)), [Payload.Q, Payload.KV, Payload.Q_DOUT])
OF_KEYS = np.isin(np.arange(len(Payload)), [Payload.KV, Payload.DKV])
# What travels for a query block and for a key block, by direction.
Q_KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.OUT),
    Direction.BACKWARD: (Payload.Q_DOUT, Payload.DQ),
}
K_KINDS = {Direction.FORWARD: (Payload.KV,), Direction.BACKWARD: (Payload.KV, Payload.DKV)}
# What a query block sends and gets back, by direction.
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

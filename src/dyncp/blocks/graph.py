"""`AttentionShape` and `Payload`: the heads and dtypes that a plan is made for, and what ranks
exchange. `BlockGraph`: the token blocks and tiles of a batch, the hypergraph that is placed."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dyncp.arrays import Columns, Int32, Int64, frozen, starts_of
from dyncp.blocks.batch import Batch
from dyncp.checks import whole_number
from dyncp.masks import LinearRanges, list_tiles

# The most heads, and the largest head dimension: byte counts of every batch then fit into int64.
MOST_HEADS = 2**14
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def dtype_name(dtype: Any) -> str | None:
    """Our name of a dtype: "bf16" for torch.bfloat16, "bfloat16" and "bf16"; None if unknown.
    Compares strings, because planning never imports torch."""
    text = str(dtype).removeprefix("torch.")
    return text if text in ITEM_BYTES else DTYPE_NAMES.get(text)


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Consecutive kv heads that are planned together, along with their q heads."""

    first_kv_head: int
    num_kv_heads: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of one attention layer.

    `dtype` is the dtype of q, k and v: a name ("bf16") or a torch dtype, stored by its name.
    `partial_dtype` is the dtype in which partial outputs and gradients are sent (default: `dtype`).
    With `exact=False` the numbers only serve cost estimates: the plan has one head group and runs
    with any head counts, head dimension and dtype.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str | Any = "bf16"
    partial_dtype: str | Any | None = None
    exact: bool = True

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim"):
            number = whole_number(name, getattr(self, name), 1, MOST_HEADS)
            object.__setattr__(self, name, number)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide q_heads={self.q_heads}; "
                "every kv head must serve the same number of q heads"
            )
        object.__setattr__(self, "dtype", checked_dtype("dtype", self.dtype))
        if self.partial_dtype is not None:
            partial = checked_dtype("partial_dtype", self.partial_dtype)
            object.__setattr__(self, "partial_dtype", partial)

    @staticmethod
    def assumed() -> "AttentionShape":
        """A shape with the usual 4:1 ratio of q to kv heads, for plans of an unknown model."""
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
        """Bytes per item of accumulators, log-sum-exps and row sums: fp32, or fp64 for fp64."""
        return 8 if self.dtype == "fp64" else 4

    def divided(self, parts: int) -> "AttentionShape":
        """The shape on one of `parts` tensor-parallel ranks: its share of all heads."""
        if parts < 1 or self.q_heads % parts or self.kv_heads % parts:
            raise ValueError(
                f"attention has {self.q_heads} q heads and {self.kv_heads} kv heads; {parts} "
                "tensor-parallel ranks cannot share them: the number of ranks must divide both"
            )
        return replace(self, q_heads=self.q_heads // parts, kv_heads=self.kv_heads // parts)

    def head_groups(self, num_groups: int = 1) -> tuple[HeadGroup, ...]:
        """Splits the kv heads into `num_groups` nearly equal groups: 5 heads into 3 and 2."""
        if not 1 <= num_groups <= self.kv_heads:
            raise ValueError(
                f"head_groups is {num_groups}; allowed are 1 to {self.kv_heads} (kv_heads)"
            )
        if num_groups > 1 and not self.exact:
            raise ValueError(
                f"head_groups is {num_groups}, but the model's head counts are not known; "
                "pass the attention shape (model=) to split heads into groups"
            )
        size, larger = divmod(self.kv_heads, num_groups)
        sizes = [size + 1] * larger + [size] * (num_groups - larger)
        return tuple(HeadGroup(sum(sizes[:i]), n) for i, n in enumerate(sizes))


def checked_dtype(field: str, dtype: Any) -> str:
    name = dtype_name(dtype)
    if name is None:
        raise ValueError(
            f"{field} is {dtype!r}; choose one of {', '.join(ITEM_BYTES)}, or of torch's "
            f"{', '.join(DTYPE_NAMES)}"
        )
    return name


class Payload(IntEnum):
    """What a transfer carries: values of all rows of one block, for one head group."""

    Q = 0  # forward: queries
    KV = 1  # both directions: keys and values
    OUT = 2  # forward: partial output and its log-sum-exp
    Q_DOUT = 3  # backward: queries, output gradients, log-sum-exp, row sums of dO·O
    DQ = 4  # backward: partial gradient of the queries
    DKV = 5  # backward: partial gradients of keys and values


class Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1


# By payload: do tiles read it (or else produce it), and does it belong to a key block?
IS_INPUT = np.isin(np.arange(len(Payload)), [Payload.Q, Payload.KV, Payload.Q_DOUT])
OF_KEYS = np.isin(np.arange(len(Payload)), [Payload.KV, Payload.DKV])
# Payloads of a query block and of a key block, by direction: the input, then the result if any.
Q_KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.OUT),
    Direction.BACKWARD: (Payload.Q_DOUT, Payload.DQ),
}
K_KINDS = {Direction.FORWARD: (Payload.KV,), Direction.BACKWARD: (Payload.KV, Payload.DKV)}


def bytes_per_token(shape: AttentionShape, groups: Sequence[HeadGroup]) -> Int64:
    """Bytes per token of every payload, int64[payloads, head groups]."""
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


Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class TokenBlocks(Columns):
    """All token blocks of a batch: tokens [start, end) of a sequence, ordered by sequence and
    start. Every column is int32[blocks]."""

    sequence: Int32
    start: Int32
    end: Int32

    @property
    def tokens(self) -> Int32:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Tiles(Columns):
    """Every query block × key block × head group with at least one allowed pair, ordered by head
    group, query block and key block. `pairs` counts the allowed (query, key) pairs of one head."""

    q_block: Int32
    k_block: Int32
    head_group: Int32
    pairs: Int64


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """The hypergraph of a batch. Its vertices are blocks and tiles; a hyperedge joins a block with
    the tiles that read or produce it. `tiles` is by mask name; all masks share the blocks."""

    batch: Batch
    shape: AttentionShape
    head_groups: tuple[HeadGroup, ...]
    blocks: TokenBlocks
    tiles: Mapping[str, Tiles]
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def payload_bytes(self) -> Int64:
        """Bytes per token of every payload, int64[payloads, head groups]."""
        return bytes_per_token(self.shape, self.head_groups)

    @cached_property
    def row_work(self) -> Int64:
        """Pairs × q heads of each block's query rows, summed over all masks, int64[blocks]."""
        work = np.zeros(len(self.blocks))
        for name, tiles in self.tiles.items():
            work += np.bincount(tiles.q_block, self.tile_work(name), len(work))
        return work.astype(np.int64)

    def remember(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Returns `make()`, which is called once per key and kept as long as the graph: several
        stages need the same derived values."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Found = self._derived[key]
        return found

    def tile_work(self, name: str) -> Int64:
        """Pairs × q heads of each tile, which is proportional to its computation."""
        heads = [g.num_kv_heads * self.shape.q_heads_per_kv_head for g in self.head_groups]
        tiles = self.tiles[name]
        return tiles.pairs * np.asarray(heads, np.int64)[tiles.head_group]


# In a prototype on 81 cases, 8 blocks per rank moved 0-1 % more bytes than much smaller blocks;
# 4 blocks per rank moved 2-6 % more.
BLOCKS_PER_RANK = 8
# The number of tiles grows with the square of a sequence's blocks. A sequence that would have more
# than MOST_BLOCKS gets fewer blocks per rank, but at least 2, as many as zigzag uses.
MOST_BLOCKS, FEWEST_PER_RANK = 1024, 2
# Blocks of at least this many tokens are whole GPU kernel tiles.
BLOCK_MULTIPLE = 128


def choose_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Block size of each sequence, int64[sequences]. A sequence of at most a rank's fair share of
    the tokens stays whole; a longer one is cut into about 8 blocks for each rank that it needs.

    With 4 ranks and lengths [6000, 1000, 1000] the share is 2000 tokens; the first sequence needs
    3 ranks and is cut into blocks of 256 = ceil(6000 / 24) rounded up to 128 rows.
    """
    length = np.asarray(lengths, np.int64)
    return _cut_sizes(length, -(-length * num_ranks // length.sum()))


def choose_sizes_by_work(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Like `choose_block_sizes`, but counts the ranks that a sequence needs by its share of the
    tokens or of the work (of causal masks), whichever is larger. So a sequence with few tokens but
    more than a rank's share of the work is cut as well."""
    length = np.asarray(lengths, np.int64)
    share = np.maximum(length / length.sum(), length**2 / (length**2).sum()) * num_ranks
    return _cut_sizes(length, np.ceil(share).astype(np.int64))


def _cut_sizes(length: Int64, ranks_needed: Int64) -> Int64:
    per_rank = np.clip(MOST_BLOCKS // ranks_needed, FEWEST_PER_RANK, BLOCKS_PER_RANK)
    size = -(-length // (ranks_needed * per_rank))
    size = np.where(size >= BLOCK_MULTIPLE, -(-size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE, size)
    return np.where(ranks_needed > 1, size, length)


def build_blocks(lengths: Sequence[int], block_sizes: Sequence[int] | Int64) -> TokenBlocks:
    """Cuts every sequence s into blocks of `block_sizes[s]` tokens; its last may be shorter."""
    length, size = np.asarray(lengths, np.int64), np.asarray(block_sizes, np.int64)
    if len(size) != len(length) or (size < 1).any():
        raise ValueError(
            f"block sizes are {list(block_sizes)} for {len(length)} sequences; "
            "one size of at least 1 token per sequence is needed"
        )
    counts = -(-length // size)
    sequence = np.repeat(np.arange(len(length)), counts)
    index = np.arange(len(sequence)) - starts_of(counts)[sequence]
    start = index * size[sequence]
    end = np.minimum(start + size[sequence], length[sequence])
    return TokenBlocks(frozen(sequence), frozen(start), frozen(end))


def build_graph(
    batch: Batch,
    shape: AttentionShape,
    block_sizes: Sequence[int] | Int64,
    num_head_groups: int = 1,
) -> BlockGraph:
    """Builds the hypergraph of a batch with these block sizes, one per sequence."""
    groups = shape.head_groups(num_head_groups)
    blocks = build_blocks(batch.lengths, block_sizes)
    tiles = {
        name: _build_tiles(runs, block_sizes, len(groups)) for name, runs in batch.runs.items()
    }
    return BlockGraph(batch, shape, groups, blocks, tiles)


def _build_tiles(runs: LinearRanges, block_sizes: Sequence[int] | Int64, num_groups: int) -> Tiles:
    q_block, k_block, pairs = list_tiles(runs, block_sizes)
    return Tiles(
        q_block=frozen(np.tile(q_block, num_groups)),
        k_block=frozen(np.tile(k_block, num_groups)),
        head_group=frozen(np.repeat(np.arange(num_groups), len(q_block))),
        pairs=frozen(np.tile(pairs, num_groups), np.int64),
    )

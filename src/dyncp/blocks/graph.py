"""BlockGraph: the token blocks and tiles of a batch, the hypergraph that placement works on; before
it the attention that a plan is made for: heads, dtypes, and the payloads that ranks exchange."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from dyncp.arrays import Int32, Int64, frozen, starts_of
from dyncp.blocks.batch import Batch
from dyncp.checks import whole_number
from dyncp.masks import LinearRanges, list_tiles

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
        for name in ("q_heads", "kv_heads", "head_dim"):
            most = MOST_HEAD_DIM if name == "head_dim" else MOST_HEADS
            number = whole_number(name, getattr(self, name), 1, most)
            object.__setattr__(self, name, number)
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
        """The shape on one of `parts` tensor-parallel ranks: its share of the heads."""
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
# What travels for a query block and for a key block, by direction: an input, and results if any.
Q_KINDS = {
    Direction.FORWARD: (Payload.Q, Payload.OUT),
    Direction.BACKWARD: (Payload.Q_DOUT, Payload.DQ),
}
K_KINDS = {Direction.FORWARD: (Payload.KV,), Direction.BACKWARD: (Payload.KV, Payload.DKV)}


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


Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Every token block of a batch, tokens [start, end) of a sequence, ordered by sequence and
    start: int32[blocks] each."""

    sequence: Int32
    start: Int32
    end: Int32

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def tokens(self) -> Int32:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class Tiles:
    """Query block × key block × head group with at least one allowed pair, ordered by head group,
    query block and key block. `pairs` counts allowed (query, key) pairs per head."""

    q_block: Int32
    k_block: Int32
    head_group: Int32
    pairs: Int64

    def __len__(self) -> int:
        return len(self.q_block)


@dataclass(frozen=True, eq=False)
class BlockGraph:
    """Vertices are blocks and tiles; one hyperedge per data block joins it with the tiles that
    read or produce it. `tiles` has one entry per mask name; the blocks are shared by all masks."""

    batch: Batch
    shape: AttentionShape
    head_groups: tuple[HeadGroup, ...]
    blocks: TokenBlocks
    tiles: Mapping[str, Tiles]
    _derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def payload_bytes(self) -> Int64:
        """Bytes per token, int64[payload kinds, head groups]."""
        return bytes_per_token(self.shape, self.head_groups)

    @cached_property
    def row_work(self) -> Int64:
        """Work of each block's query rows over all masks, int64[blocks]."""
        work = np.zeros(len(self.blocks))
        for name, tiles in self.tiles.items():
            work += np.bincount(tiles.q_block, self.tile_work(name), len(work))
        return work.astype(np.int64)

    def remember(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """What `make` returns, made once per graph and key: several stages ask for it, in both
        directions. It is kept as long as the graph."""
        if key not in self._derived:
            self._derived[key] = make()
        found: Found = self._derived[key]
        return found

    def tile_work(self, name: str) -> Int64:
        """Pairs × q heads of each tile: what computing it costs, up to a constant."""
        heads = [g.num_kv_heads * self.shape.q_heads_per_kv_head for g in self.head_groups]
        tiles = self.tiles[name]
        return tiles.pairs * np.asarray(heads, np.int64)[tiles.head_group]


# A prototype on 81 cases moved 0-1 % more bytes with 8 blocks per rank than with much finer ones,
# and 2-6 % more with 4.
BLOCKS_PER_RANK = 8
# Tiles grow with the square of a sequence's blocks: one that needs more ranks than this many blocks
# allow gets fewer per rank, at least 2, which is what zigzag has.
MOST_BLOCKS, FEWEST_PER_RANK = 1024, 2
# Long blocks end on the rows of a GPU kernel tile.
BLOCK_MULTIPLE = 128


def choose_block_sizes(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Block size of each sequence: one that fits a rank's fair share of the tokens stays whole,
    a longer one is cut into about 8 blocks per rank that it needs.

    With 4 ranks and lengths [6000, 1000, 1000] the share is 2000 tokens; the first sequence needs
    3 ranks and is cut into blocks of 256 = ceil(6000 / 24) rounded up to 128 rows.
    """
    length = np.asarray(lengths, np.int64)
    return _cut_sizes(length, -(-length * num_ranks // length.sum()))


def choose_sizes_by_work(lengths: Sequence[int], num_ranks: int) -> Int64:
    """Like `choose_block_sizes`, but a sequence needs as many ranks as its share of the tokens says
    or, assuming causal masks, its share of the work: a sequence with few tokens but more than a
    rank's share of the work is cut, too."""
    length = np.asarray(lengths, np.int64)
    share = np.maximum(length / length.sum(), length**2 / (length**2).sum()) * num_ranks
    return _cut_sizes(length, np.ceil(share).astype(np.int64))


def _cut_sizes(length: Int64, ranks_needed: Int64) -> Int64:
    per_rank = np.clip(MOST_BLOCKS // ranks_needed, FEWEST_PER_RANK, BLOCKS_PER_RANK)
    size = -(-length // (ranks_needed * per_rank))
    size = np.where(size >= BLOCK_MULTIPLE, -(-size // BLOCK_MULTIPLE) * BLOCK_MULTIPLE, size)
    return np.where(ranks_needed > 1, size, length)


def build_blocks(lengths: Sequence[int], block_sizes: Sequence[int] | Int64) -> TokenBlocks:
    """Blocks of `block_sizes[s]` tokens for every sequence s; its last one may be shorter."""
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
    """The hypergraph of a batch for the given block sizes."""
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

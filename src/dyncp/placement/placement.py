"""Placement: which rank owns each token block and computes each tile, and its balance."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, distinct_pairs, frozen
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph, Direction

_ROUNDING = 1e-9
# Compute and tokens.
DEFAULT_TOLERANCES = (0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Limits:
    """Balance limits: the fullest rank may exceed the mean by this share; None sets no limit."""

    compute_tolerance: float | None = None
    token_tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("compute_tolerance", "token_tolerance"):
            value = getattr(self, name)
            number = value is None or isinstance(value, int | float)
            if not number or (value is not None and not value >= 0):
                raise ValueError(f"{name} is {value}; must be a number of at least 0, or None")

    def missed(self, compute: float, tokens: float) -> float:
        """By how much these shares of the mean exceed the limits, in all."""
        pairs = ((compute, self.compute_tolerance), (tokens, self.token_tolerance))
        return sum(
            max(0.0, share - 1 - tolerance - _ROUNDING)
            for share, tolerance in pairs
            if tolerance is not None
        )

    @property
    def tolerances(self) -> Float64:
        """Of compute and tokens, for solvers that aim at some balance where none is asked for."""
        pairs = zip((self.compute_tolerance, self.token_tolerance), DEFAULT_TOLERANCES, strict=True)
        return np.array([default if asked is None else asked for asked, default in pairs])


@dataclass(frozen=True, eq=False)
class Traffic:
    """Where a static method sends keys and values, whether a mask needs them there or not.

    Head group g of block b starts from rank `home[b, g]` (the owner, or where an all-to-all over
    heads puts it) and visits the ranks of `rings[ring[b, g]]`, in pattern "ring" from neighbour to
    neighbour, in pattern "all_gather" straight from its home. `node` (per rank) makes an
    all-gather send every block to each node once and pass it on there.
    """

    pattern: str
    rings: tuple[tuple[int, ...], ...]
    ring: Int32  # [blocks, head groups]
    home: Int32  # [blocks, head groups]
    node: Int32 | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """Total map of blocks (`block_rank`) and, per mask name, tiles (`tile_rank`) to ranks.

    Without `traffic` a block travels only to the ranks whose tiles read it."""

    num_ranks: int
    block_rank: Int32
    tile_rank: Mapping[str, Int32]
    solver: str
    static: bool
    traffic: Traffic | None = None
    # What `find_remote_uses` has found: bounds and schedules of both directions ask for the same.
    _remote_uses: "dict[tuple[BlockGraph, str, bool], RemoteUses]" = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def pattern(self) -> str:
        """Which schedule the placement asks for: "minimal", "ring" or "all_gather"."""
        return "minimal" if self.traffic is None else self.traffic.pattern

    @staticmethod
    def where_queries_live(
        graph: BlockGraph,
        num_ranks: int,
        block_rank: Int64,
        solver: str,
        *,
        static: bool,
        traffic: Traffic | None = None,
    ) -> "Placement":
        """Every tile runs on the rank that owns its query block, so only keys and values travel."""
        tile_rank = {name: frozen(block_rank[t.q_block]) for name, t in graph.tiles.items()}
        return Placement(num_ranks, frozen(block_rank), tile_rank, solver, static, traffic)


@dataclass(frozen=True, slots=True)
class Balance:
    """Fullest rank over mean, the limits asked for, and for a limit that is not met the reason."""

    compute_max_over_mean: float
    tokens_max_over_mean: float
    limits: Limits
    reason: str = ""

    @property
    def missed(self) -> float:
        """By how much the limits are missed; 0 where they are kept."""
        return self.limits.missed(self.compute_max_over_mean, self.tokens_max_over_mean)


def check_placement(graph: BlockGraph, placement: Placement) -> None:
    """Raises ValueError unless the placement is a total map of this graph onto its ranks."""
    expected = {"block_rank": len(graph.blocks)}
    given = {"block_rank": placement.block_rank}
    for name, tiles in graph.tiles.items():
        if name not in placement.tile_rank:
            raise ValueError(f"solver {placement.solver!r} placed no tiles of mask {name!r}")
        expected[f"tile_rank[{name!r}]"] = len(tiles)
        given[f"tile_rank[{name!r}]"] = placement.tile_rank[name]
    for what, ranks in given.items():
        if len(ranks) != expected[what]:
            raise ValueError(
                f"solver {placement.solver!r} gave {len(ranks)} entries in {what}; "
                f"the batch has {expected[what]}"
            )
        if len(ranks) and not (ranks.min() >= 0 and ranks.max() < placement.num_ranks):
            raise ValueError(
                f"solver {placement.solver!r} used ranks {ranks.min()} to {ranks.max()} in "
                f"{what}; allowed are 0 to {placement.num_ranks - 1}"
            )


def measure_balance(
    graph: BlockGraph, placement: Placement, limits: Limits, speeds: Float64 | None = None
) -> Balance:
    """Balance of compute (pairs × q heads over all masks) and of tokens. Where ranks have different
    `speeds`, a rank's fair share of compute is in proportion to its speed."""
    work = np.zeros(placement.num_ranks)
    for name in graph.tiles:
        work += np.bincount(placement.tile_rank[name], graph.tile_work(name), placement.num_ranks)
    tokens = np.bincount(placement.block_rank, graph.blocks.tokens, placement.num_ranks)
    if speeds is not None:
        work *= speeds.sum() / len(speeds) / speeds
    compute, token = _max_over_mean(work), _max_over_mean(tokens.astype(np.float64))
    return Balance(compute, token, limits, _excess(placement.solver, compute, token, limits))


def _max_over_mean(load: Float64) -> float:
    return float(load.max() / load.mean()) if load.any() else 1.0


def _excess(solver: str, compute: float, tokens: float, limits: Limits) -> str:
    reasons = []
    for what, measured, tolerance in (
        ("compute", compute, limits.compute_tolerance),
        ("tokens", tokens, limits.token_tolerance),
    ):
        if tolerance is not None and measured > (1 + tolerance) * (1 + 1e-12):  # not by rounding
            reasons.append(
                f"{what} max/mean is {measured:.3f}, over the limit of {1 + tolerance:.3f}: "
                f"solver {solver!r} does not balance {what}"
            )
    return "; ".join(reasons)


# What a placement makes travel: blocks that tiles read on ranks that do not own them.


@dataclass(frozen=True, eq=False)
class RemoteUses:
    """Distinct (rank, block, head group) of one side of the tiles, ordered, int64[uses] each.

    `of_tile` has, for every tile, the index of its use here, or -1 when the block is local.
    """

    rank: Int64
    block: Int64
    head_group: Int64
    of_tile: Int64

    def __len__(self) -> int:
        return len(self.rank)


def find_remote_uses(
    graph: BlockGraph, placement: Placement, name: str, *, keys: bool
) -> RemoteUses:
    """Remote uses of the key blocks, or of the query blocks, of mask `name`'s tiles."""
    found, key = placement._remote_uses, (graph, name, keys)
    if key not in found:
        found[key] = _list_remote_uses(graph, placement, name, keys=keys)
    return found[key]


def _list_remote_uses(
    graph: BlockGraph, placement: Placement, name: str, *, keys: bool
) -> RemoteUses:
    blocks = graph.tiles[name].k_block if keys else graph.tiles[name].q_block
    num_blocks, num_groups = len(graph.blocks), len(graph.head_groups)
    tile_rank = placement.tile_rank[name]
    remote = np.flatnonzero(placement.block_rank[blocks] != tile_rank)
    data_block = blocks[remote].astype(np.int64) * num_groups + graph.tiles[name].head_group[remote]
    rank, data_block, use = distinct_pairs(
        tile_rank[remote], placement.num_ranks, data_block, num_blocks * num_groups
    )
    of_tile = np.full(len(blocks), -1, np.int64)
    of_tile[remote] = use
    return RemoteUses(rank, data_block // num_groups, data_block % num_groups, of_tile)


def minimal_bytes(graph: BlockGraph, placement: Placement, name: str, direction: Direction) -> int:
    """The hypergraph's Σ size × (parts touched − 1) for one mask and direction."""
    total = 0
    for keys, kinds in ((False, Q_KINDS), (True, K_KINDS)):
        uses = find_remote_uses(graph, placement, name, keys=keys)
        per_token = graph.payload_bytes[list(kinds[direction])].sum(axis=0)[uses.head_group]
        total += int((per_token * graph.blocks.tokens[uses.block]).sum())
    return total

"""Placement: which rank owns each token block and computes each tile; its balance and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dyncp.arrays import Float64, Int32, Int64, distinct_pairs, frozen
from dyncp.blocks import K_KINDS, Q_KINDS, BlockGraph, Direction

_ROUNDING = 1e-9
# For compute and tokens.
DEFAULT_TOLERANCES = (0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Limits:
    """How far the fullest rank may exceed the mean, as a share of it; None sets no limit."""

    compute_tolerance: float | None = None
    token_tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("compute_tolerance", "token_tolerance"):
            value = getattr(self, name)
            number = value is None or isinstance(value, int | float)
            if not number or (value is not None and not value >= 0):
                raise ValueError(f"{name} is {value}; must be a number of at least 0, or None")

    def missed(self, compute: float, tokens: float) -> float:
        """Sum of the excesses over both limits; the arguments are multiples of the mean."""
        pairs = ((compute, self.compute_tolerance), (tokens, self.token_tolerance))
        return sum(
            max(0.0, share - 1 - tolerance - _ROUNDING)
            for share, tolerance in pairs
            if tolerance is not None
        )

    @property
    def tolerances(self) -> Float64:
        """Tolerances of compute and tokens that solvers aim at; defaults replace None."""
        pairs = zip((self.compute_tolerance, self.token_tolerance), DEFAULT_TOLERANCES, strict=True)
        return np.array([default if given is None else given for given, default in pairs])


@dataclass(frozen=True, eq=False)
class Traffic:
    """Where a static method sends keys and values, even if the mask does not need them there.

    Head group g of block b starts at rank `home[b, g]` (the owner, or the rank that an all-to-all
    over heads sends it to) and visits the ranks of `rings[ring[b, g]]`: pattern "ring" passes it
    from neighbour to neighbour, pattern "all_gather" sends it to each of them directly. If `node`
    (the node of each rank) is given, an all-gather sends every block to each node once and
    forwards it inside the node.
    """

    pattern: str
    rings: tuple[tuple[int, ...], ...]
    ring: Int32  # [blocks, head groups]
    home: Int32  # [blocks, head groups]
    node: Int32 | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """The rank of every block (`block_rank`) and, per mask name, of every tile (`tile_rank`).

    Without `traffic`, a block is sent only to the ranks whose tiles read it."""

    num_ranks: int
    block_rank: Int32
    tile_rank: Mapping[str, Int32]
    solver: str
    static: bool
    traffic: Traffic | None = None
    # Results of `find_remote_uses`: bounds and the schedules of both directions need the same ones.
    _remote_uses: "dict[tuple[BlockGraph, str, bool], RemoteUses]" = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def pattern(self) -> str:
        """The schedule that this placement needs: "minimal", "ring" or "all_gather"."""
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
        """Every tile runs on the owner of its query block, so only keys and values are sent."""
        tile_rank = {name: frozen(block_rank[t.q_block]) for name, t in graph.tiles.items()}
        return Placement(num_ranks, frozen(block_rank), tile_rank, solver, static, traffic)


@dataclass(frozen=True, slots=True)
class Balance:
    """Fullest rank over mean, the requested limits, and which of them are missed and why."""

    compute_max_over_mean: float
    tokens_max_over_mean: float
    limits: Limits
    reason: str = ""

    @property
    def missed(self) -> float:
        """Sum of the excesses over the limits; 0 if they are kept."""
        return self.limits.missed(self.compute_max_over_mean, self.tokens_max_over_mean)


def check_placement(graph: BlockGraph, placement: Placement) -> None:
    """Raises ValueError unless every block and tile of the graph has a valid rank."""
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
    """Balance of compute (pairs × q heads over all masks) and of tokens. If ranks have different
    `speeds`, a rank's fair share of compute is proportional to its speed."""
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
        if tolerance is not None and measured > (1 + tolerance) * (1 + 1e-12):  # allows rounding
            reasons.append(
                f"{what} max/mean is {measured:.3f}, over the limit of {1 + tolerance:.3f}: "
                f"solver {solver!r} does not balance {what}"
            )
    return "; ".join(reasons)


# What a placement sends: blocks that tiles read on ranks that do not own them.


@dataclass(frozen=True, eq=False)
class RemoteUses:
    """Distinct (rank, block, head group) of one side of the tiles, sorted; int64[uses] each.

    `of_tile` is the index of each tile's use, or -1 if its block is local.
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
    if key in found:
        return found[key]
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
    found[key] = RemoteUses(rank, data_block // num_groups, data_block % num_groups, of_tile)
    return found[key]


def minimal_bytes(graph: BlockGraph, placement: Placement, name: str, direction: Direction) -> int:
    """Bytes sent for one mask and direction if every block goes only to ranks that use it: the
    hypergraph's Σ size × (parts touched − 1)."""
    total = 0
    for keys, kinds in ((False, Q_KINDS), (True, K_KINDS)):
        uses = find_remote_uses(graph, placement, name, keys=keys)
        per_token = graph.payload_bytes[list(kinds[direction])].sum(axis=0)[uses.head_group]
        total += int((per_token * graph.blocks.tokens[uses.block]).sum())
    return total

"""Schedules: divisions, phases and their order."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dyncp import AttentionShape, Batch, Topology, masks
from dyncp.blocks import BlockGraph, Direction, Payload, build_graph
from dyncp.placement import SOLVERS, Limits, Placement, minimal_bytes
from dyncp.schedule import Schedule, build_schedule
from paced import FAST_LINKS, SLOW_LINKS, pace_of
from sizes import draws
from strategies import masks_of

SHAPE = AttentionShape(4, 2, 8)
OF_KEYS = (Payload.KV, Payload.DKV)
RESULTS = (Payload.OUT, Payload.DQ, Payload.DKV)


@dataclass(frozen=True)
class Transfer:
    """A payload with its phase's launch; `side` is 0 for queries and 1 for keys."""

    phase: int
    source: int
    target: int
    side: int
    head_group: int
    block: int
    is_result: bool

    @property
    def data(self) -> tuple[int, int, int]:
        return self.side, self.head_group, self.block


@dataclass(frozen=True)
class Moved:
    """A schedule with the arguments that it was made from."""

    graph: BlockGraph
    placement: Placement
    topology: Topology
    schedule: Schedule
    direction: Direction
    divisions: int

    @property
    def transfers(self) -> list[Transfer]:
        t = self.schedule.transfers
        columns = (t.phase, t.source, t.target, t.kind, t.head_group, t.block)
        return [
            Transfer(phase, source, target, int(kind in OF_KEYS), group, block, kind in RESULTS)
            for phase, source, target, kind, group, block in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]

    def owner(self, transfer: Transfer) -> int:
        return int(self.placement.block_rank[transfer.block])

    def crosses(self, transfer: Transfer) -> bool:
        node = self.topology.node_of
        return node(transfer.source) != node(transfer.target)

    def divisions_of(self, rank: int, data: tuple[int, int, int]) -> list[int]:
        """Divisions of the rank's tiles that use this block on this side."""
        side, group, block = data
        tiles = self.graph.tiles["default"]
        used = (tiles.q_block, tiles.k_block)[side] == block
        here = self.placement.tile_rank["default"] == rank
        chosen = used & here & (tiles.head_group == group)
        return self.schedule.tile_division[chosen].tolist()

    def feeds(self, transfer: Transfer) -> int:
        return int(self.schedule.phase_feeds[transfer.phase])

    def after(self, transfer: Transfer) -> tuple[int, int]:
        """The division and the phase that its launch waits for."""
        schedule = self.schedule
        return (
            int(schedule.phase_after_division[transfer.phase]),
            int(schedule.phase_after_phase[transfer.phase]),
        )


def move(
    chosen: list[masks.Mask],
    topology: Topology,
    divisions: int,
    direction: Direction,
    *,
    solver: str = "random",
    seed: int = 0,
    rate: float = SLOW_LINKS,
    block: int = 4,
    groups: int = 2,
) -> Moved:
    graph = build_graph(Batch.of(chosen), SHAPE, [block] * len(chosen), groups)
    placement = SOLVERS[solver].place(graph, topology, Limits(), seed)
    pace = pace_of(topology, SHAPE, rate)
    schedule = build_schedule(graph, placement, "default", direction, divisions, pace)
    return Moved(graph, placement, topology, schedule, direction, divisions)


@st.composite
def moves(draw) -> Moved:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    topology = Topology(
        draw(st.integers(1, 4)), draw(st.integers(1, 4)), nics=draw(st.integers(1, 3))
    )
    return move(
        [draw(masks_of(n)) for n in lengths],
        topology,
        draw(st.integers(2, 6)),
        draw(st.sampled_from(list(Direction))),
        solver=draw(st.sampled_from(["random", "random", "bisection", "owner_computes", "uncut"])),
        seed=draw(st.integers(0, 99)),
        rate=draw(st.sampled_from([SLOW_LINKS, 1e-3, 1e-6, FAST_LINKS])),
        block=draw(st.integers(2, 9)),
        groups=draw(st.integers(1, 2)),
    )


@draws(80)
@given(made=moves())
def test_schedules_keep_their_promises(made):
    graph, schedule = made.graph, made.schedule
    moved = schedule.transfers
    size = graph.payload_bytes[moved.kind, moved.head_group] * graph.blocks.tokens[moved.block]
    assert size.sum() == minimal_bytes(graph, made.placement, "default", made.direction)
    keys = np.stack(
        [moved.phase, moved.source, moved.target, moved.kind, moved.head_group, moved.block]
    )
    assert (np.lexsort(keys[::-1]) == np.arange(len(moved))).all()
    assert (np.diff(schedule.phase_after_division) >= 0).all()
    assert (schedule.phase_after_phase < np.arange(schedule.num_phases)).all()
    assert (schedule.phase_after_division < schedule.phase_feeds).all()
    passed_on = any(t.source != made.owner(t) for t in made.transfers if not t.is_result)
    assert schedule.num_divisions <= made.divisions + passed_on + 2
    over_borders = [t for t in made.transfers if not t.is_result and made.crosses(t)]
    assert len({t.phase for t in over_borders}) < made.divisions


@draws(80)
@given(made=moves())
def test_inputs_come_once_before_the_tiles_that_need_them(made):
    uses = {}
    for t in made.transfers:
        if t.is_result:
            continue
        assert (t.target, *t.data) not in uses, "it comes twice"
        uses[t.target, *t.data] = made.feeds(t)
        needed = min(made.divisions_of(t.target, t.data))
        assert 1 <= made.feeds(t) <= needed
        if not made.crosses(t) and t.source == made.owner(t):
            assert made.feeds(t) == needed
    tiles, owner = made.graph.tiles["default"], made.placement.block_rank
    for side, blocks in enumerate((tiles.q_block, tiles.k_block)):
        rank = made.placement.tile_rank["default"]
        for key in zip(rank, tiles.head_group, blocks, strict=True):
            at, group, block = map(int, key)
            assert (owner[block] == at) != ((at, side, group, block) in uses)


@draws(80)
@given(made=moves())
def test_borders_are_crossed_once_per_block_and_node_and_users_pass_on(made):
    node, crossed = made.topology.node_of, set()
    for t in made.transfers:
        away = t.source if t.is_result else t.target
        if made.crosses(t):
            key = (t.is_result, node(away), *t.data)
            assert key not in crossed
            crossed.add(key)
            assert made.owner(t) in (t.source, t.target)
        relay = t.target if t.is_result else t.source
        if relay != made.owner(t):
            assert node(relay) == node(away) != node(made.owner(t))
            assert made.divisions_of(relay, t.data), "the relay does not use it"


@draws(80)
@given(made=moves())
def test_owners_send_at_the_start_and_relays_when_they_have_it(made):
    inputs = [t for t in made.transfers if not t.is_result]
    arrives = {(t.target, *t.data): t for t in inputs}
    feeds = {}
    for t in inputs:
        if t.source == made.owner(t):
            assert made.after(t) == (-1, -1)
            feeds.setdefault(made.crosses(t), {})[t.phase] = made.feeds(t)
        else:
            came = arrives[t.source, *t.data]
            assert made.crosses(came)
            assert made.feeds(came) == made.feeds(t) - 1
            assert made.after(t) == (made.feeds(t) - 2, came.phase)
    for by_phase in feeds.values():  # the order of phases is that of the divisions they feed
        ordered = [by_phase[phase] for phase in sorted(by_phase)]
        assert ordered == sorted(set(ordered))


@draws(80)
@given(made=moves())
def test_results_leave_after_their_last_tile_and_sums_after_what_they_are_made_of(made):
    results = [t for t in made.transfers if t.is_result]
    keys = [(t.source, *t.data) for t in results]
    assert len(keys) == len(set(keys)), "it leaves twice"
    end = made.schedule.num_divisions - 1
    for t in results:
        last = max(made.divisions_of(t.source, t.data))
        assert made.feeds(t) == end + 1
        summands = [r for r in results if r.target == t.source and r.data == t.data]
        if made.crosses(t):
            assert len({r.phase for r in summands}) <= 1
            for r in summands:
                assert made.after(t)[1] == r.phase
        else:
            assert not summands
        straight = t.target == made.owner(t) and not summands
        assert made.after(t)[0] == last if straight else made.after(t)[0] >= last


def test_slow_inputs_are_spread_over_the_divisions():
    for topology in (Topology(1, 2), Topology(2, 1)):
        made = move([masks.full(256)], topology, 5, Direction.FORWARD)
        inputs = [t for t in made.transfers if not t.is_result]
        assert sorted({made.feeds(t) for t in inputs}) == [1, 2, 3, 4]
        assert (np.bincount(made.schedule.tile_division) > 0).all()


def test_blocks_of_several_nodes_are_passed_on_one_division_later():
    made = move([masks.full(256)], Topology(2, 2), 4, Direction.BACKWARD)
    inputs = [t for t in made.transfers if not t.is_result]
    far = {made.feeds(t) for t in inputs if made.crosses(t)}
    hops = {made.feeds(t) for t in inputs if t.source != made.owner(t)}
    assert (far, hops) == ({1, 2, 3}, {2, 3, 4})


def test_without_a_pace_all_ranks_stand_in_one_node():
    chosen, direction = [masks.full(64)], Direction.BACKWARD
    graph = build_graph(Batch.of(chosen), SHAPE, [4])
    placement = SOLVERS["random"].place(graph, Topology(2, 2), Limits(), 0)
    schedule = build_schedule(graph, placement, "default", direction, 4)
    made = Moved(graph, placement, Topology(1, 4), schedule, direction, 4)
    assert all(made.owner(t) in (t.source, t.target) for t in made.transfers)


def test_tiles_that_wait_for_nothing_fill_the_time_until_inputs_arrive():
    """Fast kernels: whatever is local has run before anything arrives. Slow ones: one tile is
    enough to hide all that travels, and the others hide results."""
    chosen = [masks.causal(n) for n in (96, 40, 40, 40)]
    for rate, at_start in ((SLOW_LINKS, True), (FAST_LINKS, False)):
        made = move(chosen, Topology(2, 2), 4, Direction.BACKWARD, rate=rate)
        tiles, rank = made.graph.tiles["default"], made.placement.tile_rank["default"]
        owner = made.placement.block_rank
        local = (owner[tiles.q_block] == rank) & (owner[tiles.k_block] == rank)
        division = made.schedule.tile_division
        assert (division[~local] > 0).all()
        assert (division[local] == 0).all() == at_start

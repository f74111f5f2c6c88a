"""Symbolic execution of all ranks: inputs in time (2), sends after what they need (3), and partial
results home exactly once (4)."""

from collections.abc import Iterable, Iterator

import numpy as np

from dyncp.arrays import Int32, Int64
from dyncp.blocks import Direction
from dyncp.plan import INPUT_SPACE, RESULT_SPACE, Plan, Program, RankPlan, RankTiles, Space
from dyncp.verify.coverage import AllTiles, collect_tiles, tile_key
from dyncp.verify.messages import Entry, describe, entries_by_phase, run_programs
from dyncp.verify.violation import Findings
from dyncp.verify.workspaces import Key, RankState

# Which side of the tiles accumulates a result: out in forward, dq and dk, dv in backward.
ACCUMULATING = {Direction.FORWARD: (Space.Q,), Direction.BACKWARD: (Space.Q, Space.KV)}
_SPACE_OF_KIND = {int(k): int(s) for k, s in (INPUT_SPACE | RESULT_SPACE).items()}
_EMPTY: Int64 = np.zeros(0, np.int64)


def run_symbolically(plan: Plan, name: str, direction: Direction, findings: Findings) -> None:
    """Follows the programs of all ranks and reports what goes wrong on the way and at the end."""
    programs = [part.masks[name].program(direction) for part in plan.parts]
    where = f"mask {name!r}, {direction.name.lower()}"
    actions = _SymbolicRun(where, plan, name, direction, findings)
    stuck = run_programs(programs, actions)
    for rank in stuck:
        findings.add(3, f"{where}: {rank}")
    if not stuck:
        actions.check_end(collect_tiles(plan, name))


class _SymbolicRun:
    """Carries tile numbers between the ranks' accumulators instead of rows."""

    def __init__(
        self, where: str, plan: Plan, name: str, direction: Direction, findings: Findings
    ) -> None:
        programs = [part.masks[name].program(direction) for part in plan.parts]
        self._accumulating = ACCUMULATING[direction]
        self._static = plan.parts[0].static  # static methods send empty partials too
        self._sends = [entries_by_phase(program.sends) for program in programs]
        self._receives = [entries_by_phase(program.receives) for program in programs]
        self._in_flight: dict[tuple[int, int, int], dict[Entry, Int64]] = {}
        self._states: list[RankState] = []
        self._work: list[dict[int, list[tuple[Key, Int64]]]] = []
        for part, program in zip(plan.parts, programs, strict=True):
            work = _work_of(part, part.masks[name].tiles, program)
            state = RankState(where, part, program, findings)
            self._expect(state, work, self._receives[part.rank])
            self._states.append(state)
            self._work.append(work)

    def _expect(
        self,
        state: RankState,
        work: dict[int, list[tuple[Key, Int64]]],
        receives: dict[int, dict[int, list[Entry]]],
    ) -> None:
        """Counts what has to come into every accumulator before it is complete."""
        for key, tiles in (item for division in work.values() for item in division):
            if key[0] in self._accumulating:
                state.partial(key).uncomputed += len(tiles)
        for entry in _entries(receives.values()):
            if entry[0] in RESULT_SPACE:
                state.partial(_key(entry)).unmerged += 1

    def launch(self, rank: int, phase: int, at: int) -> None:
        for peer, entries in self._sends[rank].get(phase, {}).items():
            self._in_flight[rank, peer, phase] = {
                entry: self._pack(self._states[rank], entry, phase, at) for entry in entries
            }

    def _pack(self, state: RankState, entry: Entry, phase: int, at: int) -> Int64:
        key = _key(entry)
        if not state.holds(key, at):
            invariant = 3 if entry[0] in INPUT_SPACE else 4
            _report(state, invariant, "sends", entry, phase, f", but {state.describe_rows(key)}")
        if entry[0] in INPUT_SPACE:
            return _EMPTY
        partial = state.partial(key)
        for invariant, wrong, sentence in (
            (4, state.owns[key[2]], ", but owns the block: results go to the owner"),
            (3, partial.uncomputed, " before all of its tiles are computed"),
            (3, partial.unmerged, " before all other ranks' results are merged into it"),
            (4, partial.sent_in is not None, ", but sent it already"),
            (4, not partial.tiles and not self._static, ", but no tile has contributed to it"),
        ):
            if wrong:
                _report(state, invariant, "sends", entry, phase, sentence)
        partial.sent_in = phase
        return partial.content()

    def wait(self, rank: int, phase: int, at: int) -> None:
        state = self._states[rank]
        for peer, entries in self._receives[rank].get(phase, {}).items():
            message = self._in_flight.get((peer, rank, phase), {})
            for entry in entries:
                if entry not in message:
                    continue  # nobody sends it, which the comparison of messages reports
                if entry[0] in INPUT_SPACE:
                    state.fill(_key(entry), at)
                else:
                    self._merge(state, entry, message[entry], phase, at)

    def _merge(self, state: RankState, entry: Entry, tiles: Int64, phase: int, at: int) -> None:
        key = _key(entry)
        partial = state.partial(key)
        if not state.holds(key, at):
            _report(state, 4, "merges", entry, phase, f", but {state.describe_rows(key)}")
        if partial.sent_in is not None:
            sentence = f" after it sent its own partial in phase {partial.sent_in}"
            _report(state, 4, "merges", entry, phase, sentence)
        if partial.merged_in > phase:
            sentence = f" out of order, after phase {partial.merged_in}"
            _report(state, 4, "merges", entry, phase, sentence)
        partial.merged_in = phase
        partial.unmerged -= 1
        partial.tiles.append(tiles)

    def compute(self, rank: int, division: int, at: int) -> None:
        state = self._states[rank]
        for key, tiles in self._work[rank].get(division, []):
            if not state.holds(key, at):
                sentence = f"division {division} reads {_name(key)}, but {state.describe_rows(key)}"
                state.report(2, sentence)
            if key[0] not in self._accumulating:
                continue
            partial = state.partial(key)
            partial.tiles.append(tiles)
            partial.uncomputed -= len(tiles)
            if partial.sent_in is not None:
                state.report(
                    4,
                    f"division {division} computes {len(tiles)} tiles into {_name(key)} after "
                    f"their partial result was sent in phase {partial.sent_in}",
                )

    def check_end(self, tiles: AllTiles) -> None:
        """Owners hold every tile of their blocks once; nothing is left elsewhere."""
        expected = _tiles_of_blocks(tiles, self._accumulating)
        for state in self._states:
            state.check_lifetimes()
            mine = {key for key in expected if state.owns[key[2]]}
            for key in sorted(mine | state.partials.keys()):
                partial = state.partial(key)
                if state.owns[key[2]]:
                    _compare(state, key, partial.content(), expected.get(key, _EMPTY))
                elif partial.tiles and partial.sent_in is None:
                    state.report(4, f"the partial {_name(key)} never leaves for its owner")


def _compare(state: RankState, key: Key, merged: Int64, expected: Int64) -> None:
    if np.array_equal(merged, expected):
        return
    missing, surplus = np.setdiff1d(expected, merged), np.setdiff1d(merged, expected)
    numbers, counts = np.unique(merged, return_counts=True)
    asked = np.searchsorted(expected, numbers, "right") - np.searchsorted(expected, numbers)
    doubled = numbers[(counts > asked) & (asked > 0)]
    state.report(
        4,
        f"the {Space(key[0]).name} result of its block {key[2]}, head group {key[1]} has "
        f"{len(missing)} tiles missing, {len(doubled)} merged more than once and {len(surplus)} "
        "of other blocks",
    )


def _key(entry: Entry) -> Key:
    """Where a payload lives."""
    kind, group, block = entry
    return _SPACE_OF_KIND[kind], group, block


def _name(key: Key) -> str:
    return f"{Space(key[0]).name} of block {key[2]}, head group {key[1]}"


def _report(
    state: RankState, invariant: int, verb: str, entry: Entry, phase: int, sentence: str
) -> None:
    state.report(invariant, f"{verb} {describe(entry)} in phase {phase}{sentence}")


def _entries(phases: Iterable[dict[int, list[Entry]]]) -> Iterator[Entry]:
    for peers in phases:
        for entries in peers.values():
            yield from entries


def _work_of(
    part: RankPlan, tiles: RankTiles, program: Program
) -> dict[int, list[tuple[Key, Int64]]]:
    """division → blocks that its tiles read, each with the numbers of these tiles."""
    number = tile_key(*_wide(tiles), part)
    work: dict[int, list[tuple[Key, Int64]]] = {}
    for space, side in ((Space.Q, tiles.q_block), (Space.KV, tiles.k_block)):
        columns = np.stack([program.tile_division, tiles.head_group, side])
        for (division, group, block), numbers in _grouped(columns, number):
            work.setdefault(division, []).append(((int(space), group, block), numbers))
    return work


def _wide(tiles: RankTiles) -> tuple[Int64, Int64, Int64]:
    columns = (tiles.q_block, tiles.k_block, tiles.head_group)
    q_block, k_block, group = (column.astype(np.int64) for column in columns)
    return q_block, k_block, group


def _tiles_of_blocks(tiles: AllTiles, spaces: tuple[Space, ...]) -> dict[Key, Int64]:
    """Sorted numbers of all tiles of every (space, head group, block), over all ranks."""
    found: dict[Key, Int64] = {}
    for space in spaces:
        side = tiles.q_block if space is Space.Q else tiles.k_block
        for (group, block), numbers in _grouped(np.stack([tiles.head_group, side]), tiles.key):
            found[int(space), group, block] = np.sort(numbers)
    return found


def _grouped(columns: Int32 | Int64, values: Int64) -> Iterator[tuple[tuple[int, ...], Int64]]:
    """Values with equal columns together: columns [[1, 0, 1]] and values [5, 6, 7] give
    (0,): [6] and (1,): [5, 7]."""
    if not len(values):
        return
    order = np.lexsort(columns[::-1])
    ordered = columns[:, order]
    first = np.flatnonzero(np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)))
    pieces = np.split(values[order], first[1:])
    for head, piece in zip(ordered[:, first].T.tolist(), pieces, strict=True):
        yield tuple(head), piece

"""Grouped calls pair up, whatever subset of messages a phase has."""

from hypothesis import given
from hypothesis import strategies as st

from dyncp.transport.distributed import GroupedCall, cut

Pair = tuple[int, int]  # sender, receiver


@st.composite
def phases(draw) -> tuple[int, set[Pair]]:
    """A number of ranks and some of their pairs, few or nearly all."""
    count = draw(st.integers(2, 40))
    pairs = [(s, r) for s in range(count) for r in range(count) if s != r]
    chosen = draw(st.sets(st.sampled_from(pairs)))
    return count, set(pairs) - chosen if draw(st.booleans()) else chosen


def cuts_of(rank: int, count: int, pairs: set[Pair], classes: int) -> list[GroupedCall]:
    sends = [r for s, r in pairs if s == rank]
    receives = [s for s, r in pairs if r == rank]
    return cut(rank, count, sends, receives, classes)


@given(phases(), st.integers(1, 12))
def test_both_ends_of_every_message_have_it_in_the_call_of_the_same_number(phase, classes):
    count, pairs = phase
    cuts = [cuts_of(rank, count, pairs, classes) for rank in range(count)]
    sent = {(rank, r, c.number) for rank, of in enumerate(cuts) for c in of for r in c.sends}
    received = {(s, rank, c.number) for rank, of in enumerate(cuts) for c in of for s in c.receives}
    assert sent == received
    assert sorted((s, r) for s, r, _ in sent) == sorted(pairs)


@given(phases(), st.integers(1, 12))
def test_calls_are_small_in_order_and_never_empty(phase, classes):
    count, pairs = phase
    for rank in range(count):
        numbers = []
        for part in cuts_of(rank, count, pairs, classes):
            assert 1 <= len(part.sends) + len(part.receives) <= 2 * classes
            assert max(len(part.sends), len(part.receives)) <= classes
            numbers.append(part.number)
        assert numbers == sorted(set(numbers))


@given(phases(), st.integers(1, 12))
def test_calls_end_even_where_each_waits_for_all_its_peers(phase, classes):
    """A rank starts its next call only after the previous call's peers have reached that call."""
    count, pairs = phase
    left = [cuts_of(rank, count, pairs, classes) for rank in range(count)]
    while any(left):
        at = [of[0].number if of else None for of in left]
        first = min(number for number in at if number is not None)
        for rank in [rank for rank in range(count) if at[rank] == first]:
            part = left[rank].pop(0)
            assert all(at[peer] == first for peer in (*part.sends, *part.receives))


def test_four_ranks_are_cut_as_the_docstring_shows():
    pairs = {(s, r) for s in range(4) for r in range(4) if s != r}
    assert cuts_of(0, 4, pairs, 2) == [GroupedCall(0, (1, 2), (3, 2)), GroupedCall(1, (3,), (1,))]
    assert cuts_of(3, 4, pairs, 2) == [GroupedCall(0, (0, 1), (2, 1)), GroupedCall(1, (2,), (0,))]
    assert cuts_of(3, 4, pairs, 3) == [GroupedCall(0, (0, 1, 2), (2, 1, 0))]

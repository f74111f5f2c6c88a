"""Fits give back what timings were made of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.blocks import AttentionShape, Direction
from dyncp.calibrate.calibration import CallSample, WholeCall, fit_rates, fit_rows
from dyncp.calibrate.rates import fit_seconds
from dyncp.cost import CostModel, Profile
from kernels_only import KERNELS_ONLY

RATES = st.floats(1e9, 1e15)
OVERHEADS = st.floats(1e-7, 1e-3)


@given(rate=RATES, overhead=OVERHEADS)
def test_exact_timings_give_back_rate_and_overhead(rate, overhead):
    work = rate * overhead * np.geomspace(0.01, 1000, 8)  # from all overhead to all work
    columns = np.stack([np.ones(8), work], axis=1)
    fit = fit_seconds(columns, overhead + work / rate)
    assert fit.coefficients == pytest.approx([overhead, 1 / rate], rel=1e-6)
    assert fit.worst_error < 1e-6


@given(seed=st.integers(0, 1000), rate=RATES, overhead=OVERHEADS)
def test_noise_of_five_percent_moves_the_result_little(seed, rate, overhead):
    noise = 1 + 0.05 * np.random.default_rng(seed).uniform(-1, 1, 40)
    work = rate * overhead * np.geomspace(0.01, 1000, 40)
    columns = np.stack([np.ones(40), work], axis=1)
    fit = fit_seconds(columns, (overhead + work / rate) * noise)
    assert fit.coefficients == pytest.approx([overhead, 1 / rate], rel=0.05)


def test_a_coefficient_that_would_be_negative_is_nothing():
    work = np.asarray([1.0, 2.0, 4.0])
    fit = fit_seconds(np.stack([np.ones(3), work], axis=1), np.asarray([0.5, 1.6, 3.9]))
    assert fit.coefficients[0] == 0
    assert fit.coefficients[1] == pytest.approx(0.8, rel=0.2)


def test_too_few_measurements_and_no_time_are_refused():
    with pytest.raises(ValueError, match="1 measurements cannot determine 2 coefficients"):
        fit_seconds(np.ones((1, 2)), np.ones(1))
    with pytest.raises(ValueError, match="positive"):
        fit_seconds(np.ones((2, 1)), np.zeros(2))


PLAIN = replace(KERNELS_ONLY, attention_forward=590e12, attention_backward=480e12)
COST = CostModel(PLAIN, AttentionShape(32, 8, 128))


def samples(profile: Profile) -> list[CallSample]:
    """Timings that the cost model explains exactly, with work of many shapes."""
    draw, found, cost = np.random.default_rng(0), [], CostModel(profile, COST.shape)
    for direction in Direction:
        for area in np.geomspace(1e6, 1e10, 30):
            edge, rows = area * draw.uniform(0, 0.5), area / 128**2 / draw.uniform(2, 60)
            longest = draw.uniform(200, 8000)
            work = [np.array(x) for x in (area, edge, rows, longest)]
            seconds = float(profile.call_seconds + cost.work_seconds(*work, direction))
            name = direction.name.lower()
            found.append(
                CallSample("causal", 0, name, area, edge, rows, longest, 0, 1, seconds, 1e-4)
            )
    return found


def test_forward_and_backward_share_their_overhead():
    rates = fit_rates(samples(COST.profile), COST, 0)
    assert (rates.forward, rates.backward) == pytest.approx((590e12, 480e12))
    assert rates.call_seconds == pytest.approx(20e-6)
    assert (rates.edge_forward, rates.edge_backward) == pytest.approx((1, 1))
    assert (rates.row_forward, rates.row_backward) == pytest.approx((0, 0), abs=1e-6)


def test_edges_rows_and_lanes_are_told_apart_from_the_rest():
    profile = replace(
        COST.profile, edge_forward=1.5, edge_backward=3.0, row_forward=400.0, row_backward=250.0,
        lanes=132,
    )  # fmt: skip
    rates = fit_rates(samples(profile), COST, 132)
    assert (rates.forward, rates.backward) == pytest.approx((590e12, 480e12))
    assert rates.call_seconds == pytest.approx(20e-6)
    assert (rates.edge_forward, rates.edge_backward) == pytest.approx((1.5, 3.0))
    assert (rates.row_forward, rates.row_backward) == pytest.approx((400, 250))
    assert (rates.lanes, rates.worst_error) == (132, pytest.approx(0, abs=1e-6))


def test_edges_that_are_all_of_the_work_are_left_out():
    alike = [replace(s, edge=s.area, rows=s.area / 128**2) for s in samples(COST.profile)]
    rates = fit_rates(alike, COST, 132)
    assert (rates.forward, rates.backward) == pytest.approx((590e12, 480e12))
    assert (rates.edge_forward, rates.row_forward, rates.lanes) == (1, 0, 0)


def test_time_that_does_not_grow_with_work_is_refused():
    odd = [replace(s, seconds=1 / s.area) for s in samples(COST.profile)]
    with pytest.raises(ValueError, match="does not grow with its work"):
        fit_rates(odd, COST, 0)


def whole(moved_bytes: float, launches: int, seconds: float) -> WholeCall:
    return WholeCall("causal", 0, "forward", moved_bytes, launches, 10, 1.0 + seconds, 1.0, 2e-4)


def test_copying_launches_and_host_are_found_in_whole_calls():
    sizes = [(1e6 * size, launches) for size in (1, 30, 200, 900) for launches in (3, 8, 30)]
    calls = [whole(size, count, size / 2 / 1.5e12 + count * 2e-6) for size, count in sizes]
    found = fit_rows(calls)
    assert found is not None
    assert found.copy == pytest.approx(1.5e12, rel=1e-3)
    assert found.launch_seconds == pytest.approx(2e-6, rel=1e-3)
    assert found.host_seconds == pytest.approx(2e-5)
    assert found.worst_error < 1e-3


def test_few_whole_calls_or_ones_that_say_nothing_of_bytes_fit_nothing():
    assert fit_rows([whole(1e6, 3, 1e-5)] * 3) is None
    assert fit_rows([whole(1e9 / n, n, 1e-5 * n) for n in range(1, 12)]) is None

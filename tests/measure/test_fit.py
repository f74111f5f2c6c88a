"""Fits give back what timings were made of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.measure.attention_rates import CallSample, fit_rates
from dyncp.measure.fit import fit_seconds

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
    with pytest.raises(ValueError, match="1 measurements cannot tell 2 coefficients apart"):
        fit_seconds(np.ones((1, 2)), np.ones(1))
    with pytest.raises(ValueError, match="above 0"):
        fit_seconds(np.ones((2, 1)), np.zeros(2))


def samples(
    forward: float,
    backward: float,
    call: float,
    edges: tuple[float, float] = (1.0, 1.0),
    tails: tuple[float, float] = (0.0, 0.0),
) -> list[CallSample]:
    """Timings that the cost model explains exactly, with work of many shapes."""
    draw, found = np.random.default_rng(0), []
    for index, (direction, rate) in enumerate((("forward", forward), ("backward", backward))):
        for flops in np.geomspace(1e6, 1e13, 20):
            edge, row = flops * draw.uniform(0, 0.5), flops * draw.uniform(0, 0.01)
            work = flops + (edges[index] - 1) * edge + tails[index] * row
            seconds = call + work / rate
            found.append(CallSample("causal", 0, direction, flops, edge, row, 0, 1, seconds, 1e-4))
    return found


def test_forward_and_backward_share_their_overhead():
    rates = fit_rates(samples(600e12, 480e12, 20e-6))
    assert (rates.forward, rates.backward) == pytest.approx((600e12, 480e12))
    assert rates.call_seconds == pytest.approx(20e-6)
    assert rates.forward_call_seconds == pytest.approx(rates.backward_call_seconds)
    assert (rates.edge_forward, rates.edge_backward) == pytest.approx((1, 1))
    assert (rates.tail_forward, rates.tail_backward) == pytest.approx((0, 0), abs=1e-6)


def test_edges_and_longest_rows_are_told_apart_from_the_rest():
    rates = fit_rates(samples(600e12, 480e12, 20e-6, edges=(3.5, 5.0), tails=(100.0, 20.0)))
    assert (rates.forward, rates.backward) == pytest.approx((600e12, 480e12))
    assert rates.call_seconds == pytest.approx(20e-6)
    assert (rates.edge_forward, rates.edge_backward) == pytest.approx((3.5, 5.0))
    assert (rates.tail_forward, rates.tail_backward) == pytest.approx((100, 20))
    assert rates.worst_error < 1e-6


def test_edges_that_are_all_of_the_work_are_left_out():
    alike = [replace(s, edge_flops=s.flops, row_flops=s.flops) for s in samples(6e14, 4e14, 1e-5)]
    rates = fit_rates(alike)
    assert (rates.forward, rates.backward) == pytest.approx((6e14, 4e14))
    assert (rates.edge_forward, rates.tail_forward) == (1, 0)


def test_time_that_does_not_grow_with_work_is_refused():
    odd = [replace(s, seconds=1 / s.flops) for s in samples(1, 1, 1)]
    with pytest.raises(ValueError, match="does not grow with its work"):
        fit_rates(odd)

"""Finite differences with an error estimate: right slopes are found, wrong ones are not excused, kinks are seen."""

import numpy as np
import pytest

from linjac._finite import SLACK, STEPS, Slope, between_jumps, central_difference, order, slope, taylor_test

X = np.array([0.3, -0.7, 1.1])
V = np.array([1.0, 0.5, -2.0])


def sine(leaves):
    return [np.sin(leaves[0])]


def test_central_difference():
    (got,) = central_difference(sine, [X], [V], 1e-5)
    np.testing.assert_allclose(got, np.cos(X) * V, rtol=1e-9)


def test_slope_has_an_honest_error_and_few_calls():
    found = slope(sine, [X], [V])
    miss = np.abs(found.estimate[0] - np.cos(X) * V)
    assert (miss <= 10 * found.error[0] + 1e-13).all()
    assert miss.max() < 1e-8
    assert found.calls < 20
    assert not found.kink[0].any()


def test_several_leaves_and_complex_ones_keep_their_shapes():
    fun = lambda leaves: [np.exp(1j * leaves[0]) * leaves[1], np.sum(leaves[1])]
    point, direction = [X, np.ones((2, 3)) + 0j], [V, 1j * np.ones((2, 3))]
    found = slope(fun, point, direction)
    want = 1j * V * np.exp(1j * X) * np.ones((2, 3)) + np.exp(1j * X) * 1j
    np.testing.assert_allclose(found.estimate[0], want, rtol=1e-8)
    np.testing.assert_allclose(found.estimate[1], 6j, rtol=1e-8)
    assert order(found, [want, np.asarray(6j)]) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2), (1.01, 1), (-1.0, 1)])
def test_order_tells_right_from_wrong(factor, expected):
    product = [factor * np.cos(X) * V]
    assert order(slope(sine, [X], [V]), product) == pytest.approx(expected, abs=0.1)
    assert taylor_test(sine, sine([X]), product, [X], [V]) == pytest.approx(expected, abs=0.2)


def test_linear_function_has_no_remainder():
    fun = lambda leaves: [3.0 * leaves[0]]
    assert taylor_test(fun, fun([X]), [3.0 * V], [X], [V]) is None
    assert order(slope(fun, [X], [V]), [3.0 * V]) is None


def test_kink_is_marked_and_the_rest_is_not():
    found = slope(lambda leaves: [np.abs(leaves[0])], [np.array([0.0, 0.5])], [np.ones(2)])
    assert found.kink[0].tolist() == [True, False]
    assert found.calls == 1 + 2 * STEPS


def test_function_without_a_finite_neighborhood_is_unknown():
    with np.errstate(all="ignore"):
        found = slope(lambda leaves: [np.sqrt(leaves[0])], [np.zeros(1)], [np.ones(1)])
    assert np.isinf(found.error[0]).all()


def test_line_that_only_the_first_steps_see_deceives_nobody():
    # Both ends of the first two steps lie on another line than the point, as where sorted elements change places.
    fun = lambda leaves: [np.where(np.abs(leaves[0]) < 2e-3, 5 * leaves[0], 1e-4 + leaves[0])]
    found = slope(fun, [np.zeros(1)], [np.ones(1)])
    assert found.estimate[0] == pytest.approx(5)
    assert not found.kink[0].any()


@pytest.mark.parametrize("seed", range(10))
def test_neighbors_that_change_places_deceive_nobody(seed):
    rng = np.random.default_rng(seed)
    x, v = rng.standard_normal((16, 32)) + 3, 6 * rng.standard_normal((16, 32))
    found = slope(lambda leaves: [np.sort(leaves[0])], [x], [v])
    want = np.take_along_axis(v, np.argsort(x), -1)
    sure = ~found.kink[0] & (found.error[0] < 1e-3)
    assert sure.mean() > 0.9
    noise = SLACK * np.finfo(float).eps * np.abs(x).max() / found.steps[-1]
    assert (np.abs(found.estimate[0] - want)[sure] <= 10 * found.error[0][sure] + 1e-6 + noise).all()


def test_fast_oscillation_is_resolved():
    x = np.linspace(0.1, 3, 20)
    found = slope(lambda leaves: [np.sin(200 * leaves[0])], [x], [3 * np.ones(20)])
    np.testing.assert_allclose(found.estimate[0], 600 * np.cos(200 * x), atol=1e-4)


@pytest.mark.parametrize("width", [1e-2, 1e-4, 1e-6])
def test_between_the_jumps_of_a_function_its_slope_counts(width):
    """Wide steps see a slope of 2, steps between the jumps 1; a wrong product has no excuse on either."""
    fun = lambda leaves: [np.round(leaves[0] / width) * width + leaves[0]]
    point = [(np.array([31.0, -70.0, 110.0]) + 0.2) * width]  # far enough from the jumps
    direction = [V]
    flat = Slope([2 * V], [np.zeros(3)], [np.zeros(3, bool)], [1e-2], fun(point), [fun(point)])
    assert between_jumps(fun, point, direction, flat, [V])[0].all()
    assert not between_jumps(fun, point, direction, flat, [1.01 * V])[0].any()
    assert not between_jumps(fun, point, direction, flat, [2 * V])[0].any()


def test_a_smooth_function_excuses_no_wrong_product():
    point, direction, calls = [X], [V], []

    def fun(leaves):
        calls.append(None)
        return sine(leaves)

    seen = slope(sine, point, direction)
    for factor in (1.001, 0.0, -1.0):
        assert not between_jumps(fun, point, direction, seen, [factor * np.cos(X) * V])[0].any()
    assert len(calls) == 18
    between_jumps(fun, point, direction, seen, [np.cos(X) * V])
    assert len(calls) == 18

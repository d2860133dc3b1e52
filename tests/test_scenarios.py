"""The closed forms of the scenarios against plain JAX and finite differences: the tests of the tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scenarios import BY_NAME, FULL, SCENARIOS, as_numpy, is_real_entry, ravel, ravel_batch

EVERY = [pytest.param(s, id=s.name) for s in SCENARIOS]


def _moving(tree):
    return tuple(jax.tree.leaves(tree))


def _points(scenario):
    """The scenario's own point and one more."""
    stacked = scenario.points(2)
    return [tuple(x[i] for x in stacked) for i in range(2)]


@pytest.mark.parametrize("scenario", EVERY)
def test_shape_is_outputs_by_inputs(scenario):
    a, b = scenario.matrices()
    assert a.shape == b.shape == (ravel(scenario.value).size, ravel(scenario.inputs).size)


def test_not_only_square():
    shapes = [s.matrices()[0].shape for s in SCENARIOS]
    assert {(3, 0), (0, 3), (1, 1)} <= set(shapes)
    assert sum(m > n for m, n in shapes) >= 5
    assert sum(m < n for m, n in shapes) >= 5
    assert len(BY_NAME) == len(SCENARIOS)


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].forward])
def test_against_jvp(scenario):
    tangents = _moving(scenario.tangents())
    for moving in _points(scenario):
        got = jax.jvp(scenario.of_moving, moving, tangents)[1]
        scenario.close(ravel(got), scenario.push(ravel(tangents), moving))


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].forward])
def test_against_batched_jvp(scenario):
    tangents = _moving(scenario.tangents(1, 3))
    got = jax.vmap(lambda *t: jax.jvp(scenario.of_moving, scenario.moving, t)[1])(*tangents) if tangents else []
    scenario.close(ravel_batch(got, 3), scenario.push(ravel_batch(tangents, 3)))


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].reverse])
def test_against_vjp(scenario):
    cotangents = list(jax.tree.leaves(scenario.cotangents()))
    for moving in _points(scenario):
        got = jax.vjp(scenario.of_moving, *moving)[1](cotangents)
        scenario.close(ravel(got), scenario.pull(ravel(cotangents), moving))


@pytest.mark.parametrize("scenario", [p for p in EVERY if not p.values[0].reverse])
def test_reverse_really_fails(scenario):
    cotangents = list(jax.tree.leaves(scenario.cotangents()))
    with pytest.raises(Exception, match=r"."):
        jax.vjp(scenario.of_moving, *scenario.moving)[1](cotangents)


def test_forward_of_custom_vjp_really_fails():
    scenario = BY_NAME["custom_vjp"]
    with pytest.raises(TypeError):
        jax.jvp(scenario.of_moving, scenario.moving, _moving(scenario.tangents()))


@pytest.mark.parametrize("scenario", EVERY)
def test_push_and_pull_are_transposed(scenario):
    v, c = ravel(scenario.tangents()), ravel(scenario.cotangents())
    left, right = np.sum(c * scenario.push(v)), np.sum(scenario.pull(c) * v)
    scenario.close(left.real, right.real)
    assert is_real_entry(scenario.inputs).size == v.size


@pytest.mark.skipif(not FULL, reason="finite differences need double precision")
@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].smooth and p.id != "mixed_floats"])
def test_against_finite_differences(scenario):
    tangents, step = _moving(scenario.tangents()), 1e-6

    def at(sign):
        moved = [jnp.asarray(x) + sign * step * t for x, t in zip(scenario.moving, tangents, strict=True)]
        return ravel(scenario.of_moving(*moved))

    got = (at(1) - at(-1)) / (2 * step)
    np.testing.assert_allclose(got, scenario.push(ravel(tangents)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scenario", EVERY)
def test_batched_points_work_in_plain_jax(scenario):
    got = jax.vmap(scenario.of_moving)(*scenario.points(2))
    first = [as_numpy(x)[0] for x in got]
    scenario.close(ravel(first), ravel(scenario.value))

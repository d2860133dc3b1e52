"""Every product of a Linearization over every scenario, against the closed form, plain JAX and finite differences.

Coverage is pairwise: each route meets each scenario, and each setting meets each route, but not every product.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.dtypes import float0

import linjac
from scenarios import BY_NAME, FULL, SCENARIOS, TOLERANCE, array, random_like, ravel, ravel_batch, real, same_types

EVERY = [pytest.param(s, id=s.name) for s in SCENARIOS]
REVERSE = [p for p in EVERY if p.values[0].reverse]
FEW = [pytest.param(BY_NAME[n], id=n) for n in ("dense_wide", "nested_tree", "integer_leaves", "holomorphic", "scan")]
K = 4


def linearize(scenario, **settings):
    """The value and the linear function, aux checked on the way."""
    value, linear_fn, *aux = linjac.linearize_many(scenario.fun, *scenario.primals, **scenario.options, **settings)
    assert len(aux) == scenario.has_aux
    if aux:
        assert jax.tree.structure(aux[0]) == jax.tree.structure(scenario.aux)
        scenario.close(ravel(aux[0]), ravel(scenario.aux))
    return value, linear_fn


def check_push(scenario, got, tangents, moving=None):
    same_types(got, scenario.value)
    scenario.close(ravel(got), scenario.push(ravel(tangents), moving))


def check_push_many(scenario, got, tangents, count=K):
    same_types(got, scenario.value, count)
    scenario.close(ravel_batch(got, count), scenario.push(ravel_batch(tangents, count)))


def check_pull(scenario, got, cotangent, moving=None):
    same_types(got, scenario.inputs)
    scenario.close(ravel(got), scenario.pull(ravel(cotangent), moving))


def check_pull_many(scenario, got, cotangents, count=K):
    same_types(got, scenario.inputs, count)
    scenario.close(ravel_batch(got, count), scenario.pull(ravel_batch(cotangents, count)))


def check_all(scenario, linear_fn, chunk_size=None):
    """The four products."""
    one, many = scenario.tangents(), scenario.tangents(3, K)
    check_push(scenario, linear_fn(*one), one)
    check_push_many(scenario, linear_fn.many(*many, chunk_size=chunk_size), many)
    if scenario.reverse:
        one, many = scenario.cotangents(), scenario.cotangents(4, K)
        check_pull(scenario, linear_fn.transpose(one), one)
        check_pull_many(scenario, linear_fn.transpose_many(many, chunk_size=chunk_size), many)


# Plain ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", EVERY)
def test_stored(scenario):
    value, linear_fn = linearize(scenario, strategy="stored")
    same_types(value, scenario.value)
    scenario.close(ravel(value), ravel(scenario.value))
    check_all(scenario, linear_fn, chunk_size=3)


@pytest.mark.parametrize("scenario", EVERY)
def test_recompute(scenario):
    value, linear_fn = linearize(scenario, strategy="recompute")
    scenario.close(ravel(value), ravel(scenario.value))
    check_all(scenario, linear_fn, chunk_size=1)


@pytest.mark.parametrize("scenario", EVERY)
def test_op_by_op(scenario):
    value, linear_fn = linearize(scenario, jit=False)
    scenario.close(ravel(value), ravel(scenario.value))
    check_all(scenario, linear_fn, chunk_size=K + 3)


@pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")
@pytest.mark.parametrize("scenario", EVERY)
def test_functional_forms(scenario):
    many = scenario.tangents(5, K)
    check_push_many(scenario, linjac.jvp_many(scenario.reduced, scenario.inputs, many), many)
    if scenario.reverse:
        many = scenario.cotangents(6, K)
        got = linjac.vjp_many(scenario.reduced, scenario.inputs, many, chunk_size=3)
        check_pull_many(scenario, got, many)


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].forward])
def test_against_jvp(scenario):
    _, linear_fn = linearize(scenario)
    tangents = scenario.tangents(7)
    want = jax.jvp(scenario.of_moving, scenario.moving, tuple(jax.tree.leaves(tangents)))[1]
    scenario.close(ravel(linear_fn(*tangents)), ravel(want))


@pytest.mark.parametrize("scenario", REVERSE)
def test_against_vjp(scenario):
    _, linear_fn = linearize(scenario)
    cotangent = scenario.cotangents(8)
    want = jax.vjp(scenario.of_moving, *scenario.moving)[1](jax.tree.leaves(cotangent))
    scenario.close(ravel(linear_fn.transpose(cotangent)), ravel(want))


@pytest.mark.skipif(not FULL, reason="finite differences need double precision")
@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].smooth and p.id != "mixed_floats"])
def test_against_finite_differences(scenario):
    _, linear_fn = linearize(scenario)
    tangents, step = scenario.tangents(9), 1e-6
    pairs = list(zip(scenario.moving, jax.tree.leaves(tangents), strict=True))
    up, down = ([jnp.asarray(x) + s * t for x, t in pairs] for s in (step, -step))
    want = (ravel(scenario.of_moving(*up)) - ravel(scenario.of_moving(*down))) / (2 * step)
    np.testing.assert_allclose(ravel(linear_fn(*tangents)), want, rtol=1e-6, atol=1e-7)


# Chunks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["stored", "recompute"])
@pytest.mark.parametrize(("count", "chunk_size"), [(0, None), (0, 3), (1, 1), (5, 1), (5, 2), (6, 3), (5, 5), (5, 99)])
def test_chunk_sizes(strategy, count, chunk_size):
    scenario = BY_NAME["nested_tree"]
    _, linear_fn = linearize(scenario, strategy=strategy)
    many, back = scenario.tangents(10, count), scenario.cotangents(11, count)
    check_push_many(scenario, linear_fn.many(*many, chunk_size=chunk_size), many, count)
    check_pull_many(scenario, linear_fn.transpose_many(back, chunk_size=chunk_size), back, count)


@pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")
@pytest.mark.parametrize(("count", "chunk_size"), [(0, None), (5, 1), (5, 3), (5, 99)])
@pytest.mark.parametrize("scenario", FEW)
def test_chunk_sizes_of_functional_forms(scenario, count, chunk_size):
    many, back = scenario.tangents(12, count), scenario.cotangents(13, count)
    got = linjac.jvp_many(scenario.reduced, scenario.inputs, many, chunk_size=chunk_size)
    check_push_many(scenario, got, many, count)
    got = linjac.vjp_many(scenario.reduced, scenario.inputs, back, chunk_size=chunk_size)
    check_pull_many(scenario, got, back, count)


@pytest.mark.parametrize("chunk_size", [np.int64(2), None])
def test_chunk_size_may_be_a_numpy_integer_and_a_tiny_budget_is_obeyed(chunk_size):
    scenario = BY_NAME["dense_tall"]
    _, linear_fn = linearize(scenario)
    many = scenario.tangents(14, 40)
    check_push_many(scenario, linear_fn.many(*many, chunk_size=chunk_size, memory_budget=1000), many, 40)


@pytest.mark.parametrize("scenario", FEW)
def test_op_by_op_without_directions(scenario):
    _, linear_fn = linearize(scenario, jit=False)
    many, back = scenario.tangents(15, 0), scenario.cotangents(16, 0)
    check_push_many(scenario, linear_fn.many(*many), many, 0)
    check_pull_many(scenario, linear_fn.transpose_many(back), back, 0)


# Under jit and vmap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", EVERY)
def test_linearize_inside_jit(scenario):
    @jax.jit
    def products(moving, one, many, back):
        primals = scenario.full(scenario.rebuild(moving))
        value, linear_fn, *_ = linjac.linearize_many(scenario.fun, *primals, **scenario.options)
        pulled = linear_fn.transpose(back) if scenario.reverse else None
        return value, linear_fn(*one), linear_fn.many(*many, chunk_size=3), pulled

    one, many, back = scenario.tangents(17), scenario.tangents(18, K), scenario.cotangents(19)
    value, pushed, batch, pulled = products(scenario.moving, one, many, back)
    scenario.close(ravel(value), ravel(scenario.value))
    check_push(scenario, pushed, one)
    check_push_many(scenario, batch, many)
    if scenario.reverse:
        check_pull(scenario, pulled, back)


@pytest.mark.parametrize("scenario", EVERY)
def test_linearization_as_argument_of_a_jit(scenario):
    @jax.jit
    def products(linear_fn, one, many):
        back = linear_fn.transpose_many(many[1], chunk_size=1) if scenario.reverse else None
        return linear_fn(*one), linear_fn.many(*many[0], chunk_size=1), back

    _, linear_fn = linearize(scenario)
    one, many = scenario.tangents(20), (scenario.tangents(21, 2), scenario.cotangents(22, 2))
    pushed, batch, pulled = products(linear_fn, one, many)
    check_push(scenario, pushed, one)
    check_push_many(scenario, batch, many[0], 2)
    if scenario.reverse:
        check_pull_many(scenario, pulled, many[1], 2)


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].moving and p.id != "empty_input"])
def test_vmap_over_points(scenario):
    one, back = scenario.tangents(23), scenario.cotangents(24)

    def products(*moving):
        primals = scenario.full(scenario.rebuild(moving))
        _, linear_fn, *_ = linjac.linearize_many(scenario.fun, *primals, **scenario.options)
        return linear_fn(*one), linear_fn.transpose(back) if scenario.reverse else None

    stacked = scenario.points(2)
    pushed, pulled = jax.vmap(products)(*stacked)
    for i in range(2):
        moving = tuple(x[i] for x in stacked)
        check_push(scenario, jax.tree.map(lambda x, i=i: x[i], pushed), one, moving)
        if scenario.reverse:
            check_pull(scenario, jax.tree.map(lambda x, i=i: x[i], pulled), back, moving)


@pytest.mark.parametrize("scenario", [p for p in EVERY if p.values[0].moving])
def test_vmap_over_directions(scenario):
    _, linear_fn = linearize(scenario)
    many, back = scenario.tangents(25, 3), scenario.cotangents(26, 3)
    check_push_many(scenario, jax.vmap(lambda t: linear_fn(*t))(many), many, 3)
    if scenario.reverse:
        check_pull_many(scenario, jax.vmap(linear_fn.transpose)(back), back, 3)


# Special arguments ----------------------------------------------------------------------------------------------------


def test_float0_is_taken_where_a_leaf_is_held():
    scenario = BY_NAME["integer_leaves"]
    _, linear_fn = linearize(scenario)
    (tangent,) = scenario.tangents(27)
    zeros = {name: np.zeros(scenario.primals[0][name].shape, float0) for name in ("index", "flag")}
    check_push(scenario, linear_fn(tangent | zeros), (tangent,))


def test_float0_is_taken_in_batches():
    scenario = BY_NAME["integer_leaves"]
    _, linear_fn = linearize(scenario)
    (tangent,) = scenario.tangents(28, K)
    zeros = {name: np.zeros((K, *scenario.primals[0][name].shape), float0) for name in ("index", "flag")}
    check_push_many(scenario, linear_fn.many(tangent | zeros), (tangent,))


def test_numpy_tangents_and_python_floats():
    scenario = BY_NAME["two_arguments"]
    _, linear_fn = linearize(scenario)
    tangents = tuple(np.asarray(t) for t in scenario.tangents(29))
    check_push(scenario, linear_fn(*tangents), tangents)
    _, linear_fn = linearize(BY_NAME["scalar"])
    np.testing.assert_allclose(linear_fn(2.0), 2 * 3 * 0.7**2, rtol=TOLERANCE)
    np.testing.assert_allclose(linear_fn.transpose(2.0)[0], 2 * 3 * 0.7**2, rtol=TOLERANCE)


def _with_integer_output(x):
    return x * 2, jnp.arange(3)


def test_integer_outputs_are_held():
    value, linear_fn = linjac.linearize_many(_with_integer_output, array([1.0, 2.0]))
    assert value[1].tolist() == [0, 1, 2]
    moved, held = linear_fn(array([1.0, -1.0]))
    assert moved.tolist() == [2.0, -2.0]
    assert held is None or held.dtype == float0
    assert linear_fn.transpose((array([1.0, 3.0]), None))[0].tolist() == [2.0, 6.0]


def _closed_over_tangent_free(x):
    return jnp.zeros(2, x.dtype)


def test_a_function_that_ignores_its_input():
    _, linear_fn = linjac.linearize_many(_closed_over_tangent_free, array(real(3)))
    assert linear_fn(array(real(3, seed=1))).tolist() == [0.0, 0.0]
    assert linear_fn.many(array(real(4, 3))).tolist() == [[0.0, 0.0]] * 4
    assert linear_fn.transpose(array([1.0, 2.0]))[0].tolist() == [0.0, 0.0, 0.0]


def test_the_three_hand_computed_products_of_the_readme():
    value, linear_fn = linjac.linearize_many(_readme, array([2.0, 3.0]))
    assert value.tolist() == [7.0, 6.0]
    assert linear_fn(array([1.0, 0.0])).tolist() == [4.0, 3.0]
    assert linear_fn(array([0.0, 1.0])).tolist() == [1.0, 2.0]
    assert linear_fn.many(array(np.eye(2))).tolist() == [[4.0, 3.0], [1.0, 2.0]]
    assert linear_fn.transpose(array([1.0, 0.0]))[0].tolist() == [4.0, 1.0]


def _readme(x):
    return jnp.stack([x[0] ** 2 + x[1], x[0] * x[1]])


def _long_scan(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c) + 0.5 * c, None), x, None, length=1000)[0]


def test_a_residual_budget_that_is_exceeded_recomputes():
    x, v = array(real(5, seed=30)), array(real(7, 5, seed=31))
    budget = linjac.residual_bytes(_long_scan, x) - 1
    _, linear_fn = linjac.linearize_many(_long_scan, x, residual_budget=budget)
    assert linear_fn.strategy == "recompute"
    want = jax.vmap(lambda t: jax.jvp(_long_scan, (x,), (t,))[1])(v)
    np.testing.assert_allclose(linear_fn.many(v, chunk_size=3), want, rtol=1e-4 if not FULL else 1e-9, atol=1e-30)
    _, linear_fn = linjac.linearize_many(_long_scan, x, residual_budget=budget + 1)
    assert linear_fn.strategy == "stored"


def test_residual_bytes_is_known_before():
    for scenario in (BY_NAME["dense_wide"], BY_NAME["scan"], BY_NAME["nested_tree"]):
        _, linear_fn = linearize(scenario, strategy="stored")
        assert isinstance(linear_fn.residual_bytes, int)
        assert linjac.residual_bytes(scenario.fun, *scenario.primals) == linear_fn.residual_bytes


# Random trees and sizes -----------------------------------------------------------------------------------------------

FLOATS = st.sampled_from([(), (1,), (2,), (2, 3), (0,)]).map(lambda shape: array(real(*shape, seed=7)))
HELD = st.sampled_from([None, jnp.asarray([1, 2], jnp.int32), jnp.asarray(True), "name", jnp.tanh])
NODES = st.recursive(
    FLOATS | HELD,
    lambda node: st.lists(node, max_size=3) | st.tuples(node, node) | st.dictionaries(st.sampled_from("abc"), node),
    max_leaves=6,
)


def cubes(tree):
    return [x**3 for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(tree=NODES, count=st.integers(0, 7), chunk_size=st.integers(1, 9), recompute=st.booleans())
def test_random_trees(tree, count, chunk_size, recompute):
    primals = (tree, array([0.5]))
    _, linear_fn = linjac.linearize_many(cubes, primals, strategy="recompute" if recompute else "stored")
    (tangents,) = random_like((primals,), 31, count)
    slope = 3 * ravel(primals) ** 2
    got = linear_fn.many(tangents, chunk_size=chunk_size)
    np.testing.assert_allclose(ravel_batch(got, count), slope * ravel_batch(tangents, count), rtol=TOLERANCE)
    (back,) = linear_fn.transpose_many(got, chunk_size=chunk_size)
    same_types(back, primals, count)
    np.testing.assert_allclose(ravel_batch(back, count), slope * ravel_batch(got, count), rtol=TOLERANCE)

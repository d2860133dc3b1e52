"""Every Jacobian over every scenario, against the closed form, plain JAX and finite differences.

Coverage is pairwise: every scenario meets every mode, layout, chunk size and surrounding, and these meet each other,
but not every combination is run.
"""

import collections
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0
from jax.sharding import PartitionSpec

import linjac
from dense import Counted, compiles, exact, finite_differences, inputs_of, matrix_of, moving_of, promoted, settings_of
from scenarios import BY_NAME, FULL, SCENARIOS, TOLERANCE, C, F, Pair, array, cplx, ravel, real

close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE)
USED = [s for s in SCENARIOS if s.name != "not_holomorphic"]  # refused: see test_jacobian_conformance.py
BOTH = ["fwd", "rev"]
W52, W43, W33 = (array(real(*shape, seed=71 + i)) for i, shape in enumerate([(5, 2), (4, 3), (3, 3)]))
X2, X3 = array(real(2, seed=75, low=0.3)), array(real(3, seed=76, low=0.3))
NX3 = np.asarray(X3)


# Every scenario -------------------------------------------------------------------------------------------------------

SURROUNDINGS = ["plain", "jit", "vmap", "op_by_op"]
MODES = ["auto", "fwd", "rev"]
LAYOUTS = ["blocks", "matrix"]
CHUNKS = [None, 1, 3, 99]


def _routes():
    """Four rows for each scenario."""
    for k, scenario in enumerate(USED):
        for r, surrounding in enumerate(SURROUNDINGS):
            mode = MODES[(r + k // 4) % 3]
            mode = mode if scenario.reverse or mode != "rev" else "fwd"
            yield scenario, surrounding, mode, LAYOUTS[(r + r // 2 + k) % 2], CHUNKS[(r + k) % 4]


ROUTES = [pytest.param(*row, id=f"{row[0].name}-{'-'.join(map(str, row[1:]))}") for row in _routes()]


def test_coverage_is_pairwise():
    rows = list(_routes())
    axes = [SURROUNDINGS, MODES, LAYOUTS, CHUNKS]
    for (i, first), (k, second) in itertools.combinations(enumerate(axes, 1), 2):
        assert {(row[i], row[k]) for row in rows} == set(itertools.product(first, second))
    for scenario in USED:
        mine = [row[1:] for row in rows if row[0] is scenario]
        assert [len({row[i] for row in mine}) for i in (0, 2, 3)] == [4, 2, 4]
        assert {row[1] for row in mine} >= ({"auto", "fwd", "rev"} if scenario.reverse else {"auto", "fwd"})


def dense(scenario, found, layout, batch=()):
    """The dense matrix of what `linjac.jacobian` returned, aux dropped."""
    jac = found[0] if scenario.has_aux else found
    if layout == "blocks":
        return matrix_of(jac, scenario.value, inputs_of(scenario), batch)
    m, n = ravel(scenario.value).size, sum(np.size(x) for x in moving_of(inputs_of(scenario)))
    assert jac.shape == (*batch, m, n)
    leaves = [*moving_of(scenario.value), *moving_of(inputs_of(scenario))]
    with jax.numpy_dtype_promotion("standard"):
        assert jac.dtype == jnp.result_type(*(jnp.result_type(x) for x in leaves))
    return np.asarray(jac, np.complex128 if np.iscomplexobj(jac) else np.float64)


@pytest.mark.parametrize(("scenario", "surrounding", "mode", "layout", "chunk_size"), ROUTES)
def test_closed_form(scenario, surrounding, mode, layout, chunk_size):
    settings = settings_of(scenario) | {"mode": mode, "layout": layout, "chunk_size": chunk_size}
    jac = linjac.jacobian(scenario.fun, jit=surrounding != "op_by_op", **settings)

    def at(*moving):
        found = jac(*scenario.full(scenario.rebuild(moving)))
        return found if not scenario.has_aux else found[:1]

    if surrounding in ("plain", "op_by_op"):
        found = jac(*scenario.primals)
        if scenario.has_aux:
            assert jax.tree.structure(found[1]) == jax.tree.structure(scenario.aux)
            scenario.close(ravel(found[1]), ravel(scenario.aux))
        scenario.close(dense(scenario, found, layout), exact(scenario))
    elif surrounding == "jit":
        scenario.close(dense(scenario, jax.jit(at)(*scenario.moving), layout), exact(scenario))
    else:
        points = scenario.points(2)
        found = dense(scenario, jax.vmap(at)(*points), layout, (2,))
        for i in range(2):
            scenario.close(found[i], exact(scenario, tuple(x[i] for x in points)))


def _plain(scenario, transform):
    argnums = tuple(range(len(scenario.moving)))
    holomorphic = settings_of(scenario).get("holomorphic", False)
    found = transform(scenario.of_moving, argnums, holomorphic=holomorphic)(*scenario.moving)
    outs, ins = moving_of(scenario.value), scenario.moving
    rows = [
        np.concatenate([np.reshape(b, (np.size(out), np.size(into))) for b, into in zip(row, ins, strict=True)], axis=1)
        for row, out in zip(found, outs, strict=True)
    ]
    return np.concatenate(rows)


def _ends(scenario):
    return tuple(any(map(np.iscomplexobj, moving_of(t))) for t in (scenario.inputs, scenario.value))


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in USED])
def test_plain_jax_and_finite_differences(scenario):
    got = dense(scenario, linjac.jacobian(scenario.fun, **settings_of(scenario))(*scenario.primals), "blocks")
    with jax.numpy_dtype_promotion("standard"):  # jacfwd and jacrev mix dtypes themselves
        if scenario.forward and _ends(scenario) != (True, False):
            scenario.close(got, _plain(scenario, jax.jacfwd))
        if scenario.reverse and _ends(scenario) != (False, True):
            scenario.close(got, _plain(scenario, jax.jacrev))
    if FULL and scenario.smooth and scenario.name != "mixed_floats":
        want = finite_differences(scenario.of_moving, scenario.moving)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


# Value and aux --------------------------------------------------------------------------------------------------------

FEW = [
    pytest.param(BY_NAME[n], id=n)
    for n in ("nested_tree", "aux", "static_arguments", "callable_leaf", "holomorphic", "partly_constant", "custom_vjp")
]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("scenario", FEW)
def test_value_and_jacobian(scenario, mode):
    settings = settings_of(scenario) | {"mode": mode, "chunk_size": 2 if mode == "rev" else None}
    value, jac = linjac.value_and_jacobian(scenario.fun, **settings)(*scenario.primals)
    if scenario.has_aux:
        value, aux = value
        scenario.close(ravel(aux), ravel(scenario.aux))
    assert jax.tree.structure(value) == jax.tree.structure(scenario.value)
    scenario.close(ravel(value), ravel(scenario.value))
    scenario.close(matrix_of(jac, scenario.value, inputs_of(scenario)), exact(scenario))


class Opaque:
    """An aux that no pytree registry knows."""


OPAQUE = Opaque()


def odd_aux(x, scale):
    """Aux of every kind: text, functions, sets, opaque objects, ints, None, empty, and values of the trace."""
    aux = {
        "text": "done",
        "fun": math.sin,
        "opaque": OPAQUE,
        "count": 3,
        "set": {1, 2},
        "nothing": [None, (), {}],
        "float": 0.5,
        "numpy": np.arange(3),
        "traced": (x * scale, jnp.sum(x) > 0),
        "shape": x.shape,
    }
    return W43 @ jnp.sin(x) * scale, aux


@pytest.mark.parametrize("settings", [{"mode": "fwd"}, {"mode": "rev"}, {"chunk_size": 1}, {"jit": False}])
def test_any_object_is_an_aux(settings):
    jac, aux = linjac.jacobian(odd_aux, has_aux=True, **settings)(X3, array(2.0))
    close(jac, 2 * W43 * np.cos(X3)[None, :])
    assert aux["text"] == "done"
    assert aux["fun"] is math.sin
    assert aux["opaque"] is OPAQUE
    assert aux["count"] == 3
    assert aux["set"] == {1, 2}
    assert aux["nothing"] == [None, (), {}]
    assert aux["float"] == 0.5
    assert list(aux["numpy"]) == [0, 1, 2]
    assert aux["shape"] == (3,)
    close(aux["traced"][0], 2 * X3)
    assert bool(aux["traced"][1])


@pytest.mark.parametrize("mode", BOTH)
def test_aux_is_not_batched_by_the_sweep(mode):
    shapes = []

    def fun(x):
        shapes.append(x.shape)
        return x**2, x

    (value, aux), jac = linjac.value_and_jacobian(fun, mode=mode, has_aux=True)(X3)
    close(aux, X3)
    close(value, X3**2)
    close(jac, np.diag(2 * X3))
    assert set(shapes) == {(3,)}


def test_aux_alone_is_returned_by_has_aux_of_none():
    jac, aux = linjac.jacobian(lambda x: (x**2, None), has_aux=True)(X3)
    assert aux is None
    close(jac, np.diag(2 * X3))


# Calls and compiles ---------------------------------------------------------------------------------------------------


def tall(x, y=1.0):
    return jnp.tanh(W52 @ x) * y


@pytest.mark.parametrize("mode", [*MODES, "measure"])
@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian"])
def test_fun_is_called_once_for_each_signature(mode, what):
    counted = Counted(tall)
    jac = getattr(linjac, what)(counted.fun, mode=mode)
    for i in range(3):
        jac(X2 + i)
    assert counted.calls == 1
    jac(X2, 2.0)
    jac(X2, 3.0)
    assert counted.calls == 2


def test_every_entry_point_shares_the_one_call():
    counted = Counted(tall)
    linjac.plan_jacobian(counted.fun)(X2)
    linjac.jacobian(counted.fun)(X2)
    for settings in ({"mode": "rev"}, {"mode": "fwd"}, {"layout": "matrix"}, {"chunk_size": 1}):
        linjac.jacobian(counted.fun, **settings)(X2)
    linjac.value_and_jacobian(counted.fun)(X2)
    assert counted.calls == 1


@pytest.mark.parametrize("mode", BOTH)
def test_op_by_op_calls_fun_once_a_call(mode):
    counted = Counted(tall)
    jac = linjac.value_and_jacobian(counted.fun, mode=mode, jit=False, chunk_size=2)
    for i in range(3):
        jac(X2 + i)
    assert counted.calls == 3


@pytest.mark.parametrize("settings", [{"mode": "fwd"}, {"mode": "rev", "chunk_size": 2}, {"layout": "matrix"}])
def test_nothing_compiles_at_a_new_point(settings):
    jac = linjac.jacobian(batch_loss, **settings)
    points = [X3 + 0.1 * i for i in range(4)]
    batches = [{"x": array(real(4, 3, seed=i)), "name": "sin"} for i in range(4)]
    first = jac(points[0], batches[0], scale=0.5)
    with compiles(at_most=0):
        rest = [jac(x, batch, scale=0.1 * i) for i, (x, batch) in enumerate(zip(points, batches, strict=True))]
    del first
    for i, (x, batch) in enumerate(zip(points, batches, strict=True)):
        close(rest[i], 0.1 * i * np.cos(batch["x"] @ x)[:, None] * np.asarray(batch["x"]))


def batch_loss(x, batch, *, scale):
    return {"sin": jnp.sin}[batch["name"]](batch["x"] @ x) * scale


def test_a_new_jacobian_of_the_same_function_compiles_nothing():
    other = X2 + 1
    linjac.jacobian(tall)(X2)
    with compiles(at_most=0):
        linjac.jacobian(tall)(other)


def test_compiled_once_under_jit():
    step = jax.jit(linjac.jacobian(tall))
    other = X2 + 1
    step(X2)
    with compiles(at_most=0):
        step(other)


# Derivatives of Jacobians ---------------------------------------------------------------------------------------------


def energy(x):
    return jnp.sum(jnp.sin(W43 @ x) ** 2) + jnp.prod(x)


def field(x):
    return jnp.tanh(W43 @ x) * x[0]


HESSIAN = {
    "jacobian_of_grad": lambda: linjac.jacobian(jax.grad(energy)),
    "jacobian_of_grad_reverse": lambda: linjac.jacobian(jax.grad(energy), mode="rev", chunk_size=2),
    "jacobian_of_jacobian": lambda: linjac.jacobian(linjac.jacobian(energy)),
    "reverse_of_forward": lambda: linjac.jacobian(linjac.jacobian(energy, mode="fwd"), mode="rev"),
    "forward_of_reverse": lambda: linjac.jacobian(linjac.jacobian(energy, mode="rev"), mode="fwd"),
    "jacfwd_of_jacobian": lambda: jax.jacfwd(linjac.jacobian(energy)),
    "jacrev_of_jacobian": lambda: jax.jacrev(linjac.jacobian(energy, mode="fwd", chunk_size=2)),
    "jacfwd_of_op_by_op": lambda: jax.jacfwd(linjac.jacobian(energy, jit=False)),
    "op_by_op_of_jacobian": lambda: linjac.jacobian(linjac.jacobian(energy), jit=False),
}


@pytest.mark.parametrize("name", HESSIAN)
def test_hessian(name):
    want = jax.hessian(energy)(X3)
    close(HESSIAN[name]()(X3), want)
    if name in ("jacobian_of_jacobian", "jacfwd_of_jacobian"):
        close(jax.jit(HESSIAN[name]())(X3), want)


SECOND = [("fwd", None), ("fwd", 2), ("rev", None), ("rev", 3), ("auto", 1)]


@pytest.mark.parametrize(("mode", "chunk_size"), SECOND)
def test_second_derivatives_through_chunks(mode, chunk_size):
    jac = linjac.jacobian(field, mode=mode, chunk_size=chunk_size)
    want = jax.jacfwd(jax.jacrev(field))(X3)
    close(jax.jacfwd(jac)(X3), want)
    close(jax.jacrev(jac)(X3), want)
    close(jax.grad(lambda x: jnp.sum(jac(x) ** 2))(X3), jax.grad(lambda x: jnp.sum(jax.jacfwd(field)(x) ** 2))(X3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_third_derivative(layout):
    third = linjac.jacobian(linjac.jacobian(linjac.jacobian(energy), layout=layout), mode="rev")
    close(np.reshape(third(X3), (3, 3, 3)), jax.jacfwd(jax.hessian(energy))(X3))


def test_tall_layout_and_elementwise_differentiate():
    """The shapes for which sweeps use barriers: neither differentiation may meet one without a rule."""
    weights = array(real(64, 2, seed=77))

    def tall_matmul(x):
        return weights @ jnp.sin(x)

    jac = linjac.jacobian(tall_matmul, mode="fwd")
    got = jax.grad(lambda x: jnp.sum(jac(x) ** 2))(X2)
    close(got, jax.grad(lambda x: jnp.sum(jax.jacfwd(tall_matmul)(x) ** 2))(X2))

    def elementwise(x):
        return jnp.exp(x) * jnp.sin(x)

    jac = linjac.jacobian(elementwise, mode="rev")
    close(jax.jacrev(jac)(X3), jax.jacfwd(jax.jacrev(elementwise))(X3))
    close(jax.vmap(jax.jacfwd(jac))(jnp.stack([X3, X3]))[1], jax.jacfwd(jax.jacrev(elementwise))(X3))


def test_many_functions_may_be_wrapped_by_one_transformation():
    """`jax.grad` and `linjac.jacobian` return closures of one code: that is no function made anew."""
    for power in (2, 3, 4, 5, 6, 7):
        fun = POWERS[power]
        close(linjac.jacobian(jax.grad(fun))(X3), np.diag(power * (power - 1) * np.asarray(X3) ** (power - 2)))
        close(linjac.jacobian(linjac.jacobian(fun))(X3), np.diag(power * (power - 1) * np.asarray(X3) ** (power - 2)))


def _power(power):
    names = {"jnp": jnp}
    exec(f"def fun(x):\n    return jnp.sum(x ** {power})\n", names)  # code of its own
    return names["fun"]


POWERS = {power: _power(power) for power in range(2, 8)}


# Surroundings ---------------------------------------------------------------------------------------------------------


def newton_residual(x, target):
    return x**3 + W33 @ x - target


@pytest.mark.parametrize("mode", BOTH)
def test_newton_in_scan(mode):
    solve = linjac.value_and_jacobian(newton_residual, mode=mode)
    target = array([1.0, -0.5, 0.25]) + W33 @ array([1.0, 0.5, -0.2]) * 0

    def step(x, _):
        value, jac = solve(x, target)
        return x - jnp.linalg.solve(jac + 5 * jnp.eye(3, dtype=F), value), jac

    x, jacs = jax.lax.scan(step, X3, None, length=3)
    want = X3
    for i in range(3):
        jac = jax.jacfwd(newton_residual)(want, target)
        close(jacs[i], jac)
        want = want - jnp.linalg.solve(jac + 5 * jnp.eye(3, dtype=F), newton_residual(want, target))
    close(x, want)


def test_in_cond_and_while():
    jac = linjac.jacobian(field)
    close(jax.lax.cond(X3[0] > 0, jac, lambda x: jac(2 * x), X3), jax.jacfwd(field)(X3))

    def body(carry):
        i, x = carry
        return i + 1, x - 0.1 * jac(x)[:3, 0]

    _, got = jax.lax.while_loop(lambda c: c[0] < 2, body, (0, X3))
    want = X3 - 0.1 * jax.jacfwd(field)(X3)[:3, 0]
    close(got, want - 0.1 * jax.jacfwd(field)(want)[:3, 0])


def test_in_checkpoint():
    jac = linjac.jacobian(field, chunk_size=2)
    got = jax.grad(lambda x: jnp.sum(jax.checkpoint(jac)(x) ** 2))(X3)
    close(got, jax.grad(lambda x: jnp.sum(jax.jacfwd(field)(x) ** 2))(X3))


def test_fun_closes_over_a_tracer():
    def outer(weights, x):
        return linjac.jacobian(lambda y: jnp.sin(weights @ y))(x)

    want = np.cos(W43 @ X3)[:, None] * np.asarray(W43)
    close(jax.jit(outer)(W43, X3), want)
    close(jax.vmap(outer, (0, None))(jnp.stack([W43, 2 * W43]), X3)[0], want)
    close(
        jax.grad(lambda w: jnp.sum(outer(w, X3) ** 2))(W43),
        jax.grad(lambda w: jnp.sum(jax.jacfwd(lambda y: jnp.sin(w @ y))(X3) ** 2))(W43),
    )


def test_per_example_jacobians_with_shared_weights():
    def model(x, weights):
        return jnp.tanh(weights @ x)

    xs = array(real(5, 3, seed=78))
    got = jax.vmap(linjac.jacobian(model, (0, 1)), (0, None))(xs, W43)
    want = jax.vmap(jax.jacrev(model, (0, 1)), (0, None))(xs, W43)
    jax.tree.map(close, got, want)


def sharded_model(x, weights):
    return jnp.tanh(weights @ x)


@pytest.mark.parametrize(("mode", "chunk_size"), [("fwd", None), ("fwd", 2), ("rev", None), ("rev", 3), ("auto", 1)])
@pytest.mark.parametrize("argnums", [0, 1], ids=["varying", "replicated"])
def test_in_shard_map(mode, chunk_size, argnums):
    """Each shard has its own Jacobian; for a replicated argument too, where jax.jacrev sums rows over the shards."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    jac = linjac.jacobian(sharded_model, argnums, mode=mode, chunk_size=chunk_size)
    mapped = jax.shard_map(lambda x, w: jac(x[0], w)[None], mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    xs = array(real(4, 3, seed=79))
    want = jax.vmap(jax.jacfwd(sharded_model, argnums), (0, None))(xs, W43)
    close(mapped(xs, W43), want)
    close(jax.jit(mapped)(xs, W43), want)


def test_a_sharded_point():
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(array(real(8, seed=80)), jax.NamedSharding(mesh, PartitionSpec("d")))
    for mode, chunk_size in (("fwd", None), ("rev", 3)):
        close(linjac.jacobian(elementwise_sine, mode=mode, chunk_size=chunk_size)(x), np.diag(np.cos(x)))


def elementwise_sine(x):
    return jnp.sin(x)


# Functions of every kind ----------------------------------------------------------------------------------------------


class Model:
    """A plain object with a method."""

    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return self.scale * jnp.sin(x)


def test_partial_and_bound_method():
    close(linjac.jacobian(functools.partial(tall, y=2.0))(X2), 2 * jax.jacfwd(tall)(X2))
    swapped = functools.partial(sharded_model, weights=W43)
    close(linjac.jacobian(swapped)(X3), jax.jacfwd(swapped)(X3))
    first = functools.partial(sharded_model, X3)
    close(linjac.jacobian(first)(W43), jax.jacfwd(first)(W43))
    assert linjac.plan_jacobian(first)(W43).columns[0] == "args[0][0, 0]"
    close(linjac.jacobian(Model(3.0).apply)(X3), np.diag(3 * np.cos(X3)))


def test_a_rebound_closure_is_seen():
    scale = 2.0

    def fun(x):
        return scale * x**2

    jac = linjac.jacobian(fun)
    close(jac(X3), np.diag(4 * X3))
    scale = 5.0
    close(jac(X3), np.diag(10 * X3))


def by_value(x):
    return jnp.sin(x) if x[0] > 0 else x**2


def test_control_flow_on_values():
    with pytest.warns(linjac.PerformanceWarning):
        close(linjac.jacobian(by_value)(X3), np.diag(np.cos(X3)))
    for mode in BOTH:
        close(linjac.jacobian(by_value, mode=mode, jit=False)(X3), np.diag(np.cos(X3)))
        close(linjac.jacobian(by_value, mode=mode, jit=False)(-X3), np.diag(-2 * X3))


def test_the_wrapped_function_is_visible():
    jac = linjac.jacobian(tall)
    assert jac.__name__ == "tall"
    assert jac.__wrapped__ is tall
    assert linjac.value_and_jacobian(tall).__wrapped__ is tall
    assert linjac.plan_jacobian(tall).__wrapped__ is tall


# Inputs and outputs of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", BOTH)
def test_numpy_and_python_inputs(mode):
    want = jax.jacfwd(tall)(X2)
    jac = linjac.jacobian(tall, mode=mode)
    close(jac(np.asarray(X2)), want)
    close(jac(np.asarray(X2), np.asarray(1.0, F)), want)
    got = linjac.jacobian(lambda xs: jnp.stack(xs) ** 2, mode=mode)([0.5, 2.0])
    close(np.stack(got, axis=1), np.diag([1.0, 4.0]))
    jac = linjac.jacobian(lambda x: x**2, mode=mode)(np.asarray(3.0, F)[()])
    assert jac.shape == ()
    close(jac, 6.0)


def scalar_by_vector(t, v):
    return {"a": t * v, "b": t**2, "c": [jnp.sum(v) * t]}


@pytest.mark.parametrize("mode", BOTH)
def test_scalars_everywhere(mode):
    jac = linjac.jacobian(scalar_by_vector, (0, 1), mode=mode)(0.5, X3)
    assert {k: v for k, v in jax.tree.map(jnp.shape, jac).items() if k != "c"} == {
        "a": ((3,), (3, 3)),
        "b": ((), (3,)),
    }
    close(jac["a"][0], X3)
    close(jac["a"][1], 0.5 * np.eye(3))
    close(jac["b"][0], 1.0)
    close(jac["b"][1], np.zeros(3))
    close(jac["c"][0][1], np.full(3, 0.5))


def partly_empty(tree):
    return [tree["x"] ** 2, tree["empty"], jnp.zeros((2, 0), F), None, {}]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_size_leaves_among_others(mode, layout):
    tree = {"none": None, "empty": array(np.zeros((0, 2))), "x": X2, "nothing": ()}
    jac = linjac.jacobian(partly_empty, mode=mode, layout=layout, chunk_size=1)(tree)
    if layout == "matrix":
        return close(jac, np.diag(2 * X2))
    value = partly_empty(tree)
    assert [jac[i]["empty"].shape for i in range(3)] == [(2, 0, 2), (0, 2, 0, 2), (2, 0, 0, 2)]
    close(jac[0]["x"], np.diag(2 * X2))
    close(matrix_of(jac, value, tree), np.diag(2 * X2))
    return None


def from_nothing(tree):
    del tree
    return SIX * 2.0


def to_nothing(x):
    del x
    return None, {}, []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_in_or_nothing_out(mode, layout):
    jac = functools.partial(linjac.jacobian, mode=mode, layout=layout)
    into = jac(from_nothing)({"a": None, "b": ()})
    out = jac(to_nothing)(X3)
    both = jac(to_nothing)({})
    scalar = linjac.value_and_jacobian(from_nothing, mode=mode, layout=layout)(())
    if layout == "matrix":
        assert (into.shape, out.shape, both.shape) == ((6, 0), (0, 3), (0, 0))
    else:
        assert into == {"a": None, "b": ()}
        assert out == (None, {}, [])
        assert both == (None, {}, [])
        assert scalar[1] == ()
    close(scalar[0], 2 * SIX)


SIX = array(real(6, seed=81))


def held_leaves(tree):
    return tree["w"][tree["index"]] * jax.random.uniform(tree["key"], (), F) * (2 if tree["name"] == "two" else 1)


HELD = {"w": X3, "index": jnp.asarray([1, 0], jnp.int32), "key": jax.random.key(3), "name": "two", "act": jnp.tanh}


@pytest.mark.parametrize("mode", BOTH)
def test_leaves_that_cannot_move_are_held(mode):
    jac = linjac.jacobian(held_leaves, mode=mode)(HELD)
    assert {k for k, v in jac.items() if v is None} == {"index", "key", "name", "act"}
    noise = 2 * float(jax.random.uniform(HELD["key"], (), F))
    close(jac["w"], noise * np.eye(3)[[1, 0]])


@pytest.mark.parametrize("mode", BOTH)
def test_allow_int_gives_float0(mode):
    tree = {k: HELD[k] for k in ("w", "index")}
    jac = linjac.jacobian(lambda t: t["w"][t["index"]] ** 2, mode=mode, allow_int=True)(tree)
    assert (jac["index"].dtype, jac["index"].shape) == (float0, (2, 2))
    close(jac["w"], 2 * np.asarray(X3)[[1, 0]][:, None] * np.eye(3)[[1, 0]])


class Strict:
    """A container that takes arrays of one shape only, whenever it is built."""

    def __init__(self, weight, bias):
        for leaf, ndim in ((weight, 2), (bias, 1)):
            if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray) or leaf.ndim != ndim:
                raise TypeError(f"a Strict takes arrays, got {type(leaf).__name__}")
        self.weight, self.bias = weight, bias


def _flatten_strict(node):
    return ((jax.tree_util.GetAttrKey("weight"), node.weight), (jax.tree_util.GetAttrKey("bias"), node.bias)), None


jax.tree_util.register_pytree_with_keys(Strict, _flatten_strict, lambda _, leaves: Strict(*leaves))


class Lenient:
    """A container that insists on arrays, of whatever shape."""

    def __init__(self, weight, bias):
        for leaf in (weight, bias):
            if not isinstance(leaf, jax.Array):
                raise TypeError(f"a Lenient takes arrays, got {type(leaf).__name__}")
        self.weight, self.bias = weight, bias


jax.tree_util.register_pytree_with_keys(Lenient, _flatten_strict, lambda _, leaves: Lenient(*leaves))


def of_container(node):
    return node.weight @ node.bias


def through_container(x):
    node = Strict(W43, x)
    return node.weight @ jnp.sin(node.bias)


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_containers_that_insist_on_arrays(mode, chunk_size):
    jac = linjac.jacobian(of_container, mode=mode, chunk_size=chunk_size)(Lenient(W43, X3))
    assert isinstance(jac, Lenient)
    close(jac.bias, W43)
    close(jac.weight, np.einsum("ij,k->ijk", np.eye(4), X3))
    close(linjac.jacobian(through_container, mode=mode)(X3), np.asarray(W43) * np.cos(X3)[None, :])


@pytest.mark.parametrize("mode", BOTH)
def test_containers_that_insist_on_shapes_give_a_matrix(mode):
    """A block has another rank than the leaf, so a tree of blocks cannot exist, but a matrix can."""
    jac = linjac.jacobian(of_container, mode=mode, layout="matrix")(Strict(W43, X3))
    close(jac, np.concatenate([np.kron(np.eye(4), X3[None, :]), W43], axis=1))
    with pytest.raises(TypeError, match="a Strict takes arrays") as caught:
        linjac.jacobian(of_container, mode=mode)(Strict(W43, X3))
    assert any("linjac.jacobian" in note for note in caught.value.__notes__)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "rest"], meta_fields=["name"])
@dataclass
class Node:
    """A dataclass with a static field."""

    first: Any
    rest: Any
    name: str


Point = collections.namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize("mode", BOTH)
def test_containers_on_both_sides(mode):
    point = Node(Point(X2, None), collections.OrderedDict(b=array(0.5), a=X3), "in")

    def fun(node):
        scaled = node.first.x * node.rest["b"]
        return Node(Pair(scaled, None), [jnp.sum(node.rest["a"] ** 2)], "out")

    jac = linjac.jacobian(fun, mode=mode)(point)
    assert (jac.name, jac.first.left.name) == ("out", "in")
    close(jac.first.left.rest["b"], X2)
    close(jac.rest[0].rest["a"], 2 * X3)
    want = jax.jacfwd(fun)(replace(point))
    assert jax.tree.structure(jac) == jax.tree.structure(want)
    jax.tree.map(close, jac, want)


# Dtypes ---------------------------------------------------------------------------------------------------------------

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, *([jnp.float64] if FULL else [])]


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_one_float_dtype(dtype, mode):
    x = array([0.5, -0.25, 2.0], dtype)
    for chunk_size in (None, 2):
        jac = linjac.jacobian(cubed, mode=mode, chunk_size=chunk_size)(x)
        assert jac.dtype == dtype
        np.testing.assert_allclose(np.asarray(jac, float), np.diag([0.75, 0.1875, 12.0]), rtol=1e-2)


def cubed(x):
    return x**3


PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] != pair[1]]


@pytest.mark.parametrize("into_and_out", PAIRS, ids=lambda p: f"{p[0].__name__}-{p[1].__name__}")
def test_a_block_has_the_promotion_of_both(into_and_out):
    into, out = into_and_out
    fun = CASTS[out]
    x = array([0.5, -0.25, 2.0], into)
    for mode, layout in itertools.product(BOTH, LAYOUTS):
        jac = linjac.jacobian(fun, mode=mode, layout=layout)(x)
        assert jac.dtype == promoted(np.zeros((), out), x)
        np.testing.assert_allclose(np.asarray(jac, float), np.diag([1.0, -0.5, 4.0]), rtol=1e-2)
        with jax.numpy_dtype_promotion("standard"):
            assert linjac.jacobian(fun, mode=mode, layout=layout)(x).dtype == jac.dtype


CASTS = {
    jnp.bfloat16: lambda x: (x**2).astype(jnp.bfloat16),
    jnp.float16: lambda x: (x**2).astype(jnp.float16),
    jnp.float32: lambda x: (x**2).astype(jnp.float32),
    jnp.float64: lambda x: (x**2).astype(jnp.float64),
}


def mixed(tree):
    a, b = tree["a"], tree["b"]
    return [a.astype(jnp.float32) * b[:2].astype(jnp.float32), jnp.sum(b) * 2, a.astype(jnp.float16)]


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_mixed_dtypes_are_the_same_in_both_modes(chunk_size):
    tree = {"a": array([0.5, -1.0], jnp.bfloat16), "b": array([1.0, 2.0, 4.0], F)}
    forward, reverse = (linjac.jacobian(mixed, mode=m, chunk_size=chunk_size)(tree) for m in BOTH)
    for jac in (forward, reverse):
        np.testing.assert_allclose(
            matrix_of(jac, mixed(tree), tree),
            [[1, 0, 0.5, 0, 0], [0, 2, 0, -1, 0], [0, 0, 2, 2, 2], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0]],
        )
    for mode in BOTH:
        matrix = linjac.jacobian(mixed, mode=mode, layout="matrix", chunk_size=chunk_size)(tree)
        assert matrix.dtype == F


def test_weak_types_do_not_widen():
    x = array([0.5, 1.0], jnp.float32)
    for mode in BOTH:
        assert linjac.jacobian(lambda y: y * 2.0 + 1.0, mode=mode)(x).dtype == jnp.float32
        assert linjac.jacobian(lambda t, y: t * y, mode=mode)(0.5, x).dtype == promoted(x, 0.5)


# Complex numbers ------------------------------------------------------------------------------------------------------

CW = cplx(4, 3, seed=82)
JCW = array(CW)
Z3 = array(cplx(3, seed=83))
MODES_AND_CHUNKS = [("auto", None), ("fwd", None), ("fwd", 2), ("rev", None), ("rev", 3), ("rev", 1)]


def to_complex(x):
    return jnp.exp(JCW @ x.astype(C))


def to_real(z):
    return jnp.abs(JCW @ z) ** 2


def entire(z):
    return jnp.sin(JCW @ z)


def halves(tree):
    """Real and complex leaves in, real ones out."""
    return jnp.real(jnp.conj(tree["z"]) * tree["z"]) * tree["x"], jnp.imag(tree["z"]) + tree["x"] ** 2


def parts_of(x):
    """Real in, real and complex out."""
    return {"z": to_complex(x), "r": W43 @ x**2}


@pytest.mark.parametrize(("mode", "chunk_size"), MODES_AND_CHUNKS)
def test_real_to_complex_in_both_modes(mode, chunk_size):
    want = np.exp(CW @ NX3)[:, None] * CW
    for fun, layout, jit in ((to_complex, "blocks", True), (to_complex, "matrix", False)):
        jac = linjac.jacobian(fun, mode=mode, chunk_size=chunk_size, layout=layout, jit=jit)(X3)
        assert jac.dtype == C
        close(jac, want)
    both = linjac.jacobian(parts_of, mode=mode, chunk_size=chunk_size)(X3)
    assert (both["z"].dtype, both["r"].dtype) == (C, F)
    close(both["z"], want)
    close(both["r"], 2 * np.asarray(W43) * NX3[None, :])


@pytest.mark.parametrize(("mode", "chunk_size"), MODES_AND_CHUNKS)
def test_complex_to_real_in_both_modes(mode, chunk_size):
    want = jax.jacrev(to_real)(Z3)
    for layout, jit in (("blocks", True), ("matrix", False)):
        jac = linjac.jacobian(to_real, mode=mode, chunk_size=chunk_size, layout=layout, jit=jit)(Z3)
        assert jac.dtype == C
        close(jac, want)
    tree = {"x": X3, "z": Z3}
    got = linjac.jacobian(halves, mode=mode, chunk_size=chunk_size)(tree)
    jax.tree.map(close, got, jax.jacrev(halves)(tree))
    assert matrix_of(got, halves(tree), tree).shape == (6, 6)


@pytest.mark.parametrize(("mode", "chunk_size"), MODES_AND_CHUNKS)
def test_holomorphic_in_both_modes(mode, chunk_size):
    jac = linjac.jacobian(entire, mode=mode, chunk_size=chunk_size, holomorphic=True)(Z3)
    close(jac, np.cos(CW @ np.asarray(Z3))[:, None] * CW)
    close(jac, jax.jacrev(entire, holomorphic=True)(Z3))
    close(jac, jax.jacfwd(entire, holomorphic=True)(Z3))


def test_complex_derivatives_of_jacobians():
    close(
        jax.grad(lambda x: jnp.sum(jnp.abs(linjac.jacobian(to_complex, mode="rev")(x)) ** 2))(X3),
        jax.grad(lambda x: jnp.sum(jnp.abs(jax.jacfwd(to_complex)(x)) ** 2))(X3),
    )
    close(jax.vmap(linjac.jacobian(to_real, mode="fwd"))(jnp.stack([Z3, 2 * Z3]))[0], jax.jacrev(to_real)(Z3))


@pytest.mark.parametrize("mode", BOTH)
def test_single_precision_complex(mode):
    x = array([0.5, -1.0], jnp.float32)
    jac = linjac.jacobian(lambda y: (y**2).astype(jnp.complex64) * 1j, mode=mode)(x)
    assert jac.dtype == jnp.complex64
    np.testing.assert_allclose(jac, 2j * np.diag([0.5, -1.0]), rtol=1e-5)


# At a point that is linearized already --------------------------------------------------------------------------------

method = pytest.mark.skipif(not hasattr(linjac.Linearization, "jacobian"), reason="not built yet")


@method
@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in USED[::2]])
def test_jacobian_of_a_linearization(scenario):
    settings = settings_of(scenario)
    extra = {k: settings[k] for k in ("holomorphic",) if k in settings}
    linear_fn = linjac.linearize_many(scenario.fun, *scenario.primals, **scenario.options)[1]
    jac = linear_fn.jacobian(**extra)
    scenario.close(np.concatenate([np.zeros(0), *_flat(jac)]), np.concatenate([np.zeros(0), *_flat_exact(scenario)]))
    scenario.close(linear_fn.jacobian(layout="matrix", **extra), exact(scenario))


def _flat(jac):
    return [np.ravel(x) for x in jax.tree.leaves(jac)]


def _flat_exact(scenario):
    """The blocks of the closed form in the order of the tree's leaves."""
    whole, above = exact(scenario), 0
    for out in moving_of(scenario.value):
        before = 0
        for into in moving_of(scenario.inputs):
            yield whole[above : above + np.size(out), before : before + np.size(into)].ravel()
            before += np.size(into)
        above += np.size(out)


@method
def test_jacobian_of_a_linearization_at_many_points():
    linear_fn = linjac.linearize_many(field, X3)[1]
    for mode, chunk_size in (("fwd", None), ("rev", 2)):
        close(linear_fn.jacobian(mode=mode, chunk_size=chunk_size), jax.jacfwd(field)(X3))
    batch = jnp.stack([X3, 2 * X3])
    got = jax.vmap(lambda x: linjac.linearize_many(field, x)[1].jacobian())(batch)
    close(got, jax.vmap(jax.jacfwd(field))(batch))
    close(jax.jit(lambda f: f.jacobian())(linear_fn), jax.jacfwd(field)(X3))


@method
@pytest.mark.parametrize("scenario", [pytest.param(BY_NAME[n], id=n) for n in ("custom_vjp", "aux")])
def test_jacobian_of_a_linearization_repeats_no_call(scenario):
    counted = Counted(scenario.fun)
    linear_fn = linjac.linearize_many(counted.fun, *scenario.primals, **scenario.options)[1]
    scenario.close(linear_fn.jacobian(layout="matrix"), exact(scenario))
    assert counted.calls == 1


@method
def test_jacobian_of_a_linearization_chooses_its_form():
    linear_fn = linjac.linearize_many(scalar_by_vector, array(0.5), X3)[1]
    want = jax.jacfwd(scalar_by_vector, (0, 1))(array(0.5), X3)
    jax.tree.map(close, linear_fn.jacobian(), want)
    assert jax.tree.structure(linear_fn.jacobian()) == jax.tree.structure(want)
    single = linjac.linearize_many(scalar_by_vector, array(0.5), X3, argnums=1)[1]
    want = jax.jacfwd(scalar_by_vector, 1)(array(0.5), X3)
    assert jax.tree.structure(single.jacobian()) == jax.tree.structure(want)
    jax.tree.map(close, single.jacobian(mode="rev"), want)
    with compiles(at_most=0):
        linjac.linearize_many(scalar_by_vector, array(0.5), X3, argnums=1)[1].jacobian(mode="rev")

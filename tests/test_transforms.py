"""A Linearization under transformations, its caches, its guards and its lifetime."""

import functools
import gc
import itertools
import re
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import linjac
from scenarios import BY_NAME, TOLERANCE, F, array, ravel, real

W = array(real(4, 3, seed=41))
X = array(real(3, seed=42))
V = array(real(3, seed=43))
POINTS = array(real(5, 3, seed=44))

close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE)


def dense(x):
    return jnp.tanh(W @ x)


def energy(x):
    return jnp.sum(jnp.sin(x) ** 3) * x[0]


def exact(x, v=V):
    """The product of `dense` in closed form."""
    return (1 - jnp.tanh(W @ x) ** 2) * (W @ v)


def exact_transposed(x, c):
    return W.T @ ((1 - jnp.tanh(W @ x) ** 2) * c)


def push(x):
    return linjac.linearize_many(dense, x)[1]


# Transformations ------------------------------------------------------------------------------------------------------


def test_leaves_a_jit():
    value, linear_fn = jax.jit(lambda x: linjac.linearize_many(dense, x))(X)
    close(value, dense(X))
    close(linear_fn(V), exact(X))
    close(linear_fn.transpose(value)[0], exact_transposed(X, value))
    close(linear_fn.primals[0], X)


def test_passes_through_a_jit():
    linear_fn = jax.jit(lambda f: f)(push(X))
    close(linear_fn.many(jnp.stack([V, 2 * V]))[1], 2 * exact(X))
    linear_fn.check_point(X)


def test_made_and_used_under_vmap():
    linear_fns = jax.vmap(push)(POINTS)
    got = jax.vmap(lambda f: f(V))(linear_fns)
    close(got, jnp.stack([exact(x) for x in POINTS]))


def test_nested_vmaps():
    grid = POINTS[:4].reshape(2, 2, 3)
    got = jax.vmap(jax.vmap(lambda x: push(x).many(jnp.stack([V, -V]), chunk_size=1)))(grid)
    close(got[1, 0, 1], -exact(grid[1, 0]))


def test_scan_carry_that_is_linearized_anew_each_step():
    def step(carry, _):
        x, linear_fn = carry
        x = x + 0.1 * linear_fn.transpose(jnp.ones(4, F))[0]
        return (x, push(x)), linear_fn(V)

    (x, linear_fn), products = jax.lax.scan(step, (X, push(X)), None, length=3)
    want, here = [], X
    for _ in range(3):
        want.append(exact(here))
        here = here + 0.1 * exact_transposed(here, jnp.ones(4, F))
    close(products, jnp.stack(want))
    close(x, here)
    close(linear_fn(V), exact(here))


@pytest.mark.parametrize("positive", [True, False])
def test_cond_branches_return_linearizations(positive):
    linear_fn = jax.lax.cond(positive, push, lambda x: push(2 * x), X)
    close(linear_fn(V), exact(X if positive else 2 * X))


def test_switch_over_linearizations_of_two_points():
    first, second = push(X), push(X + 1)
    got = jax.jit(lambda i: jax.tree.map(lambda a, b: jnp.where(i == 0, a, b), first, second)(V))(1)
    close(got, exact(X + 1))


def test_gradient_with_respect_to_the_point():
    def norm(x):
        return jnp.sum(push(x)(V) ** 2)

    want = jax.grad(lambda x: jnp.sum(jax.jvp(dense, (x,), (V,))[1] ** 2))(X)
    close(jax.grad(norm)(X), want)
    close(jax.jit(jax.grad(norm))(X), want)
    close(jax.jvp(norm, (X,), (V,))[1], want @ V)


def test_gradient_through_the_transposed_product():
    def norm(x):
        return jnp.sum(push(x).transpose(jnp.ones(4, F))[0] ** 2)

    want = jax.grad(lambda x: jnp.sum(jax.vjp(dense, x)[1](jnp.ones(4, F))[0] ** 2))(X)
    close(jax.grad(norm)(X), want)


def test_gradient_with_respect_to_the_tangent():
    linear_fn = push(X)
    close(jax.grad(lambda v: jnp.sum(linear_fn(v)))(V), exact_transposed(X, jnp.ones(4, F)))
    close(jax.linear_transpose(linear_fn, V)(jnp.ones(4, F))[0], exact_transposed(X, jnp.ones(4, F)))


def gradient_of_energy(x):
    return linjac.linearize_many(energy, x)[1].transpose(jnp.ones((), F))[0]


def test_hessian_products():
    want = jax.hessian(energy)(X) @ V
    close(linjac.linearize_many(jax.grad(energy), X)[1](V), want)
    close(linjac.linearize_many(gradient_of_energy, X)[1](V), want)
    close(linjac.linearize_many(gradient_of_energy, X)[1].transpose(V)[0], want)
    close(jax.hessian(energy)(X), jax.jacfwd(gradient_of_energy)(X))


def test_inside_another_linearize():
    _, outer = jax.linearize(lambda x: push(x)(V), X)
    close(outer(V), jax.jvp(lambda x: exact(x), (X,), (V,))[1])


def test_checkpoint_and_remat():
    close(jax.grad(jax.checkpoint(lambda x: jnp.sum(push(x)(V))))(X), jax.grad(lambda x: jnp.sum(exact(x)))(X))


def test_closes_over_outer_tracers():
    def product(w, x):
        return linjac.linearize_many(lambda y: jnp.tanh(w @ y), x)[1](V)

    def want(w, x):
        return jax.jvp(lambda y: jnp.tanh(w @ y), (x,), (V,))[1]

    close(jax.jit(product)(W, X), exact(X))
    close(jax.grad(lambda w: jnp.sum(product(w, X)))(W), jax.grad(lambda w: jnp.sum(want(w, X)))(W))
    many = jnp.stack([W, 2 * W])
    close(jax.vmap(product, (0, None))(many, X), jnp.stack([want(w, X) for w in many]))
    close(jax.vmap(jax.jit(product), (0, None))(many, X), jnp.stack([want(w, X) for w in many]))


def test_closes_over_outer_tracers_in_the_transposed_product():
    def product(w, x):
        return linjac.linearize_many(lambda y: jnp.tanh(w @ y), x)[1].transpose_many(jnp.eye(4, dtype=F))[0]

    close(jax.jit(product)(W, X), jax.jacrev(dense)(X))
    close(jax.lax.map(lambda w: product(w, X), jnp.stack([W, 2 * W]))[0], jax.jacrev(dense)(X))


# shard_map ------------------------------------------------------------------------------------------------------------


def sharded(body, in_specs):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec("d")))


ROWS = array(real(8, 3, seed=45))


def test_made_and_used_inside_shard_map():
    def body(x):
        linear_fn = push(x[0])
        return linear_fn(V)[None], linear_fn.transpose(jnp.ones(4, F))[0][None]

    pushed, pulled = sharded(body, PartitionSpec("d"))(ROWS)
    close(pushed, jnp.stack([exact(x) for x in ROWS]))
    close(pulled, jnp.stack([exact_transposed(x, jnp.ones(4, F)) for x in ROWS]))


def test_many_inside_shard_map():
    def body(x):
        return push(x[0]).many(jnp.stack([V, -V, 2 * V]), chunk_size=2)[None]

    want = [jnp.stack([exact(x, s * V) for s in (1, -1, 2)]) for x in ROWS]
    close(sharded(body, PartitionSpec("d"))(ROWS), jnp.stack(want))


def test_replicated_point_inside_shard_map_with_varying_directions():
    def body(x, v):
        return push(x)(v[0])[None]

    close(sharded(body, (PartitionSpec(), PartitionSpec("d")))(X, ROWS), jnp.stack([exact(X, v) for v in ROWS]))


def test_made_outside_and_passed_into_shard_map():
    def body(linear_fn, v):
        return linear_fn(v[0])[None], linear_fn.transpose(jnp.ones(4, F) * v[0, 0])[0][None]

    pushed, pulled = sharded(body, (PartitionSpec(), PartitionSpec("d")))(push(X), ROWS)
    close(pushed, jnp.stack([exact(X, v) for v in ROWS]))
    close(pulled, jnp.stack([exact_transposed(X, jnp.ones(4, F) * v[0]) for v in ROWS]))


def with_psum(x):
    return jax.lax.psum(x**2, "d")


def test_a_collective_inside_fun_is_refused():
    with pytest.raises(linjac.ModeError):
        sharded(lambda x: linjac.linearize_many(with_psum, x[0])[1](V)[None], PartitionSpec("d"))(ROWS)


# One trace ------------------------------------------------------------------------------------------------------------


NUMBERS = itertools.count()


def counted(fun):
    """`fun` (as code of its own, so that repeats here do not count as retraces) and a list of its Python calls."""
    calls = []

    def counting(*args):
        calls.append(1)
        return fun(*args)

    counting.__code__ = counting.__code__.replace(co_name=f"counting_{next(NUMBERS)}")
    return counting, calls


def test_treedefs_are_equal_at_every_point():
    trees = {jax.tree.structure(push(x)) for x in POINTS}
    assert len(trees) == 1
    assert jax.tree.structure(jax.jit(push)(X)) in trees


@pytest.mark.parametrize("name", ["nested_tree", "custom_node", "integer_leaves", "scan", "argnums_pair", "prng_key"])
def test_treedefs_are_equal_for_trees(name):
    s = BY_NAME[name]
    first, second = (linjac.linearize_many(s.fun, *s.primals, **s.options)[1] for _ in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(jax.tree.structure(first)) == hash(jax.tree.structure(second))


def test_flatten_and_unflatten_round_trip():
    leaves, tree = jax.tree.flatten(push(X))
    close(jax.tree.unflatten(tree, leaves)(V), exact(X))
    jax.tree.unflatten(tree, [object()] * len(leaves))
    assert jax.tree.structure(jax.tree.map(lambda _: None, push(X))) is not None


def test_consumer_is_traced_once_over_points():
    traces = []

    @jax.jit
    def consume(linear_fn, v):
        traces.append(1)
        return linear_fn(v), linear_fn.transpose(linear_fn(v))

    for x in POINTS:
        close(consume(push(x), V)[0], exact(x))
    assert len(traces) == 1


@pytest.mark.parametrize("strategy", ["stored", "recompute"])
def test_fun_is_called_once_over_points_and_products(strategy):
    fun, calls = counted(dense)
    for x in POINTS:
        _, linear_fn = linjac.linearize_many(fun, x, strategy=strategy)
        linear_fn(V)
        linear_fn.many(POINTS, chunk_size=2)
        linear_fn.many(POINTS)
        linear_fn.transpose(jnp.ones(4, F))
        linear_fn.transpose_many(jnp.eye(4, dtype=F))
    assert len(calls) == 1


def test_another_signature_is_another_trace():
    fun, calls = counted(lambda x: x**2)
    for size in (2, 3, 2, 3):
        close(linjac.linearize_many(fun, jnp.ones(size, F))[1](jnp.ones(size, F)), 2 * np.ones(size))
    assert len(calls) == 2


def test_another_matmul_precision_is_another_trace():
    fun, calls = counted(dense)
    linjac.linearize_many(fun, X)
    with jax.default_matmul_precision("highest"):
        linjac.linearize_many(fun, X)
    linjac.linearize_many(fun, X)
    assert len(calls) == 2


def test_a_new_batch_in_a_fixed_position_does_not_retrace():
    fun, calls = counted(lambda w, batch: jnp.tanh(batch @ w))
    for i in range(4):
        batch = array(real(2, 3, seed=50 + i))
        value, linear_fn = linjac.linearize_many(fun, X, batch, argnums=0)
        close(linear_fn(V), (1 - value**2) * (batch @ V))
    assert len(calls) == 1
    linjac.linearize_many(fun, X, array(real(5, 3)), argnums=0)
    assert len(calls) == 2


def test_a_python_float_in_a_fixed_position_does_not_retrace():
    fun, calls = counted(lambda x, scale: x * scale)
    for scale in (1.0, 2.0, 3.0):
        close(linjac.linearize_many(fun, X, scale, argnums=0)[1](V), scale * V)
    assert len(calls) == 1


def test_static_values_in_fixed_positions_retrace():
    fun, calls = counted(lambda x, name, flag: (jnp.sin if name == "sin" else jnp.cos)(x) * (2.0 if flag else 1.0))
    for _ in range(2):
        close(linjac.linearize_many(fun, X, "sin", True, argnums=0)[1](V), 2 * jnp.cos(X) * V)
        close(linjac.linearize_many(fun, X, "cos", False, argnums=0)[1](V), -jnp.sin(X) * V)
    assert len(calls) == 2


# Aux ------------------------------------------------------------------------------------------------------------------


def test_aux_may_be_any_object():
    marker = object()
    value, linear_fn, aux = linjac.linearize_many(lambda x: (x**2, {"name": "net", "marker": marker}), X, has_aux=True)
    assert aux["name"] == "net"
    assert aux["marker"] is marker
    close(value, X**2)
    close(linear_fn(V), 2 * X * V)


def squared_with_norm(x):
    return x**2, {"norm": jnp.sum(x), "none": None}


def test_aux_under_transformations():
    _, _, aux = jax.jit(lambda x: linjac.linearize_many(squared_with_norm, x, has_aux=True))(X)
    close(aux["norm"], jnp.sum(X))
    aux = jax.vmap(lambda x: linjac.linearize_many(squared_with_norm, x, has_aux=True)[2])(POINTS)
    close(aux["norm"], jnp.sum(POINTS, 1))
    for x in POINTS:
        close(linjac.linearize_many(squared_with_norm, x, has_aux=True)[2]["norm"], jnp.sum(x))


def test_aux_is_differentiable_with_respect_to_the_point():
    got = jax.grad(lambda x: linjac.linearize_many(squared_with_norm, x, has_aux=True)[2]["norm"])(X)
    close(got, np.ones(3))


def test_has_aux_without_a_pair_is_refused():
    with pytest.raises((TypeError, ValueError)):
        linjac.linearize_many(dense, X, has_aux=True)


# Models as arguments and functions ------------------------------------------------------------------------------------


def test_partial_arrays_are_arguments():
    fun, calls = counted(lambda w, x: jnp.tanh(w @ x))
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        _, linear_fn = linjac.linearize_many(functools.partial(fun, scale * W), X)
        close(linear_fn(V), jax.jvp(lambda x, s=scale: jnp.tanh(s * W @ x), (X,), (V,))[1])
    assert len(calls) == 1


def test_tree_util_partial():
    for scale in (1.0, 2.0):
        _, linear_fn = linjac.linearize_many(jax.tree_util.Partial(jnp.multiply, scale * X), X)
        close(linear_fn(V), scale * X * V)


def test_equinox_modules():
    eqx = pytest.importorskip("equinox")
    for seed in range(5):
        model = eqx.nn.MLP(3, 2, 4, 1, dtype=F, key=jax.random.key(seed))
        _, by_input = linjac.linearize_many(model, X)
        close(by_input(V), jax.jvp(model, (X,), (V,))[1])
        _, by_weights = linjac.linearize_many(apply_model, model, X, argnums=0)
        arrays, rest = eqx.partition(model, eqx.is_inexact_array)
        want = jax.jvp(lambda a, rest=rest: eqx.combine(a, rest)(X), (arrays,), (arrays,))[1]
        close(by_weights(arrays), want)
        (pulled,) = by_weights.transpose(jnp.ones(2, F))
        assert jax.tree.structure(pulled) == jax.tree.structure(arrays)


def test_flax_states():
    nnx = pytest.importorskip("flax.nnx")
    for seed in range(2):
        graph, state = nnx.split(nnx.Linear(3, 2, param_dtype=F, dtype=F, rngs=nnx.Rngs(seed)))
        fun = functools.partial(apply_state, graph)
        _, linear_fn = linjac.linearize_many(fun, state, X)
        tangents = jax.tree.map(jnp.ones_like, state), V
        close(linear_fn(*tangents), jax.jvp(fun, (state, X), tangents)[1])
        assert jax.tree.structure(linear_fn.transpose(jnp.ones(2, F))[0]) == jax.tree.structure(state)


def apply_state(graph, state, x):
    nnx = pytest.importorskip("flax.nnx")
    return jnp.tanh(nnx.merge(graph, state)(x))


def apply_model(model, x):
    return model(x)


def test_static_fields_of_a_module_are_seen():
    eqx = pytest.importorskip("equinox")

    class Power(eqx.Module):
        scale: jax.Array
        exponent: int = eqx.field(static=True)

        def __call__(self, x):
            return self.scale * x**self.exponent

    for exponent in (2, 3):
        _, linear_fn = linjac.linearize_many(Power(X, exponent), X)
        close(linear_fn(V), X * exponent * X ** (exponent - 1) * V)


# Threads --------------------------------------------------------------------------------------------------------------


def test_sixteen_threads_at_once():
    fun, _ = counted(lambda x: jnp.tanh(W @ x) * 2)
    start = threading.Barrier(16)
    points = array(real(16, 3, seed=60))

    def work(i):
        start.wait()
        _, linear_fn = linjac.linearize_many(fun, points[i])
        return linear_fn(V), linear_fn.many(points), linear_fn.transpose(jnp.ones(4, F))[0]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(work, range(16)))
    for x, (one, many, pulled) in zip(points, results, strict=True):
        close(one, 2 * exact(x))
        close(many[3], 2 * exact(x, points[3]))
        close(pulled, 2 * exact_transposed(x, jnp.ones(4, F)))


def test_sixteen_threads_share_one_linearization():
    linear_fn = push(X + 0.25)
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: linear_fn(i * V), [float(i) for i in range(16)]))
    close(jnp.stack(results), jnp.stack([exact(X + 0.25, i * V) for i in range(16)]))


# Lifetimes ------------------------------------------------------------------------------------------------------------


@jax.jit
def module_level_consumer(linear_fn, v):
    return linear_fn(v)


def fresh_functions(count, use):
    """Weak references to fresh functions over fresh 1 MB arrays, after `use(i, fun)`."""
    found = []
    for i in range(count):
        big = jnp.full((512, 512), float(i), jnp.float32)
        fun = lambda x, held=big: x * held[0, 0] + big[0, 1]
        found += [weakref.ref(fun), weakref.ref(big)]
        use(i, fun)
    return found


def live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def test_hundreds_of_fresh_functions_leave_nothing_alive():
    x = jnp.ones(2, jnp.float32)

    def use(i, fun):
        linear_fn = linjac.linearize_many(fun, x)[1]
        if i % 10 == 0:
            linear_fn(x)
        if i % 10 == 5:
            module_level_consumer(linear_fn, x)

    fresh_functions(1, use)
    before = live_bytes()
    with pytest.warns(linjac.PerformanceWarning) as caught:
        references = fresh_functions(250, use)
    assert len(caught) == 1
    assert live_bytes() - before < 2**20
    assert sum(r() is not None for r in references) == 0


@pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")
def test_closures_over_big_arrays_are_freed():
    def make(i):
        big = jnp.full((512, 512), float(i), jnp.float32)
        return (lambda x: jnp.tanh(big[:2, :2] @ x)), weakref.ref(big)

    x, references = jnp.ones(2, jnp.float32), []
    for i in range(20):
        fun, reference = make(i)
        linear_fn = linjac.linearize_many(fun, x)[1]
        module_level_consumer(linear_fn, x), linear_fn.transpose(x), linear_fn.many(jnp.stack([x, x]))
        references += [reference, weakref.ref(fun)]
    del fun, linear_fn
    gc.collect()
    assert [r() for r in references if r() is not None] == []


def test_a_linearization_outlives_its_function():
    def make():
        weights = array(real(4, 3, seed=41))
        return linjac.linearize_many(lambda x: jnp.tanh(weights @ x), X)[1]

    linear_fn = make()
    gc.collect()
    close(linear_fn(V), exact(X))
    close(linear_fn.many(POINTS)[2], exact(X, POINTS[2]))
    close(linear_fn.transpose(jnp.ones(4, F))[0], exact_transposed(X, jnp.ones(4, F)))


@pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")
def test_repeated_functions_of_one_code_warn_once():
    def use():
        return linjac.linearize_many(lambda x: x * 5, X)[1](V)

    with pytest.warns(linjac.PerformanceWarning) as caught:
        for _ in range(12):
            close(use(), 5 * V)
    assert sum(issubclass(w.category, linjac.PerformanceWarning) for w in caught) == 1


def test_no_warning_for_three_functions_or_inside_a_trace():
    for _ in range(3):
        linjac.linearize_many(lambda x: x * 6, X)
    for i in range(6):
        jax.jit(lambda x, i=i: linjac.linearize_many(lambda y: y * 7, x)[1](V) + i)(X)


# Guards ---------------------------------------------------------------------------------------------------------------

FACTOR = 2.0
TOOLS = types.SimpleNamespace()


def reads_a_global(x):
    return x**2 * FACTOR


def test_a_rebound_global_is_seen(monkeypatch):
    for factor in (2.0, 5.0, 7.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        close(linjac.linearize_many(reads_a_global, X)[1](V), 2 * factor * X * V)


def calls_a_helper(x):
    return helper(x)


def helper(x):
    return x**2


def test_a_rebound_helper_function_is_seen(monkeypatch):
    close(linjac.linearize_many(calls_a_helper, X)[1](V), 2 * X * V)
    monkeypatch.setitem(globals(), "helper", lambda x: x**3)
    close(linjac.linearize_many(calls_a_helper, X)[1](V), 3 * X**2 * V)


def test_a_rebound_closure_cell_is_seen():
    scale = 1.0

    def fun(x):
        return x**2 * scale

    for scale in (2.0, 3.0):
        close(linjac.linearize_many(fun, X)[1](V), 2 * scale * X * V)


def test_a_rebound_array_in_a_closure_is_seen():
    weights = W

    def fun(x):
        return weights @ x

    close(linjac.linearize_many(fun, X)[1](V), W @ V)
    weights = 2 * W
    close(linjac.linearize_many(fun, X)[1](V), 2 * W @ V)


def test_a_changed_default_is_seen():
    def fun(x, scale=2.0, *, shift=1.0):
        return x**2 * scale * shift

    close(linjac.linearize_many(fun, X)[1](V), 4 * X * V)
    fun.__defaults__ = (3.0,)
    close(linjac.linearize_many(fun, X)[1](V), 6 * X * V)
    fun.__kwdefaults__ = {"shift": 2.0}
    close(linjac.linearize_many(fun, X)[1](V), 12 * X * V)


class Model:
    """A plain object with a method, whose Python calls are counted."""

    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        CALLS.append(1)
        return x**2 * self.scale


CALLS = []
several_models = pytest.mark.filterwarnings("ignore::linjac.PerformanceWarning")


@several_models
def test_a_changed_attribute_of_a_bound_method_is_seen():
    model = Model(2.0)
    close(linjac.linearize_many(model.apply, X)[1](V), 4 * X * V)
    model.scale = 3.0
    close(linjac.linearize_many(model.apply, X)[1](V), 6 * X * V)
    model.scale = X
    close(linjac.linearize_many(model.apply, X)[1](V), 2 * X * X * V)


@several_models
def test_methods_of_two_objects_are_told_apart_without_retracing():
    first, second, before = Model(2.0), Model(3.0), len(CALLS)
    for _ in range(3):
        close(linjac.linearize_many(first.apply, X)[1](V), 4 * X * V)
        close(linjac.linearize_many(second.apply, X)[1](V), 6 * X * V)
    assert len(CALLS) - before == 2


@several_models
def test_a_linearization_is_not_changed_by_what_is_rebound_later():
    model = Model(2.0)
    linear_fn = linjac.linearize_many(model.apply, X)[1]
    model.scale = 3.0
    close(linear_fn(V), 4 * X * V)
    close(linear_fn.many(POINTS)[0], 4 * X * POINTS[0])
    close(linear_fn.transpose(V)[0], 4 * X * V)


@several_models
def test_recompute_is_not_changed_by_what_is_rebound_later():
    model = Model(2.0)
    linear_fn = linjac.linearize_many(model.apply, X, strategy="recompute")[1]
    model.scale = 3.0
    close(linear_fn(V), 4 * X * V)


# Control flow on values -----------------------------------------------------------------------------------------------


def piecewise(x):
    return x**2 if jnp.sum(x) > 0 else -(x**3)


def piecewise_quiet(x):
    return x**2 if jnp.sum(x) > 0 else -(x**3)


def test_value_dependent_control_flow_falls_back_with_a_warning():
    up, down = jnp.abs(X), -jnp.abs(X)
    with pytest.warns(linjac.PerformanceWarning) as caught:
        close(linjac.linearize_many(piecewise, up)[1](V), 2 * up * V)
        close(linjac.linearize_many(piecewise, down)[1](V), -3 * down**2 * V)
        _, linear_fn = linjac.linearize_many(piecewise, up)
        close(linear_fn.transpose(V)[0], 2 * up * V)
        close(linear_fn.many(POINTS)[1], 2 * up * POINTS[1])
    assert sum(issubclass(w.category, linjac.PerformanceWarning) for w in caught) == 1


def test_op_by_op_silences_it_and_sees_the_function_as_it_is():
    up, down = jnp.abs(X), -jnp.abs(X)
    close(linjac.linearize_many(piecewise_quiet, up, jit=False)[1](V), 2 * up * V)
    close(linjac.linearize_many(piecewise_quiet, down, jit=False)[1](V), -3 * down**2 * V)
    fun, calls = counted(dense)
    for _ in range(2):
        linjac.linearize_many(fun, X, jit=False)
    assert len(calls) == 2


def test_value_dependent_control_flow_under_jit_is_the_callers_error():
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: linjac.linearize_many(piecewise_quiet, x)[1](V))(X)


# Weights --------------------------------------------------------------------------------------------------------------

BIG = jnp.asarray(real(300, 300, seed=70) / 20, jnp.float32)


@jax.jit
def big_jit(x):
    return jnp.tanh(BIG @ x)


@jax.custom_jvp
def big_custom(x, w):
    return jnp.tanh(w @ x)


@big_custom.defjvp
def _big_custom_jvp(primals, tangents):
    (x, w), (t, _) = primals, tangents
    y = big_custom(x, w)
    return y, (1 - y**2) * (w @ t)


BIG_FUNCTIONS = {
    "direct": lambda x: jnp.tanh(BIG @ x),
    "nested_jit": lambda x: jnp.sin(big_jit(x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(BIG @ c), None), x, None, length=3)[0],
    "jit_in_scan": lambda x: jax.lax.scan(lambda c, _: (big_jit(c), None), x, None, length=3)[0],
    "cond": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda y: jnp.tanh(BIG @ y), jnp.sin, x),
    "custom_jvp": lambda x: big_custom(x, BIG),
    "partial": functools.partial(lambda w, x: jnp.tanh(w @ x), BIG),
}


@pytest.mark.parametrize("name", BIG_FUNCTIONS)
def test_weights_are_shared_and_not_copied(name):
    fun, x = BIG_FUNCTIONS[name], jnp.linspace(0.1, 0.4, 300, dtype=jnp.float32)
    _, linear_fn = linjac.linearize_many(fun, x, strategy="stored")
    leaves = [leaf for leaf in jax.tree.leaves(linear_fn) if isinstance(leaf, jax.Array)]
    assert any(leaf.unsafe_buffer_pointer() == BIG.unsafe_buffer_pointer() for leaf in leaves)
    assert sum(leaf.nbytes for leaf in leaves) < 1.5 * BIG.nbytes
    assert linear_fn.residual_bytes < BIG.nbytes
    assert linjac.residual_bytes(fun, x) < BIG.nbytes
    want = jax.jvp(fun, (x,), (x,))[1]
    np.testing.assert_allclose(linear_fn(x), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(linear_fn.transpose(want)[0] @ x, want @ want, rtol=1e-3)


@pytest.mark.parametrize("name", BIG_FUNCTIONS)
def test_products_of_a_linearization_hold_no_big_constant(name):
    _, linear_fn = linjac.linearize_many(BIG_FUNCTIONS[name], jnp.ones(300, jnp.float32))
    text = jax.jit(lambda f, v: (f(v), f.transpose(v))).lower(linear_fn, jnp.ones(300, jnp.float32)).as_text()
    assert max((len(digits) for digits in re.findall(r'"0x([0-9A-F]+)"', text)), default=0) <= 2 * 1024


def test_a_linearization_counts_each_buffer_once():
    _, linear_fn = linjac.linearize_many(BIG_FUNCTIONS["scan"], jnp.ones(300, jnp.float32))
    leaves = [leaf for leaf in jax.tree.leaves(linear_fn) if isinstance(leaf, jax.Array)]
    pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.nbytes]
    assert len(pointers) == len(set(pointers))


def test_the_point_is_shared():
    _, linear_fn = linjac.linearize_many(dense, X)
    assert linear_fn.primals[0].unsafe_buffer_pointer() == X.unsafe_buffer_pointer()


def test_primals_hold_every_position():
    s = BY_NAME["argnums_pair"]
    _, linear_fn = linjac.linearize_many(s.fun, *s.primals, **s.options)
    assert len(linear_fn.primals) == 3
    close(ravel(linear_fn.primals), ravel(s.primals))
    linear_fn.check_point(*s.primals)

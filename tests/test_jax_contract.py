"""Undocumented behaviour of JAX that linjac relies on: when one of these fails, the message says what to look at.

Public JAX names only, and nothing of linjac.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0
from jax.extend.core import Literal, primitives
from jax.sharding import PartitionSpec

from scenarios import F, array, real, straight_through

W = array(real(3, 3, seed=21))
X = array(real(3, seed=22))
V = array(real(3, seed=23))


def dense(x):
    return jnp.tanh(W @ x)


def behind_jit(x):
    return jax.jit(dense)(x)


@jax.custom_batching.custom_vmap
def only_jvp(x):
    return jnp.sin(x)


@only_jvp.def_vmap
def _only_jvp_batched(axis_size, in_batched, x):
    del axis_size
    return jnp.sin(x), in_batched[0]


def doubled(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 50.0, lambda c: c * 2, x)


def linearized_jaxpr(fun, *primals):
    return jax.make_jaxpr(lambda *p: jax.linearize(fun, *p), return_shape=True)(*primals)


def linear_jaxpr(fun, *primals):
    """The linear program of `fun` with residuals as arguments."""
    push = jax.linearize(fun, *primals)[1]
    return jax.make_jaxpr(lambda f, *t: f(*t))(push, *primals)


# The trace of jax.linearize -------------------------------------------------------------------------------------------


def test_make_jaxpr_of_linearize_returns_the_linear_function():
    closed, (value, push) = linearized_jaxpr(dense, X)
    why = "the linear program is one make_jaxpr of jax.linearize, unflattened with its output tree"
    assert value.shape == (3,), why
    assert isinstance(push, jax.tree_util.Partial), why
    outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    got_value, got_push = jax.tree.unflatten(jax.tree.structure((value, push)), outs)
    np.testing.assert_allclose(got_value, dense(X), rtol=1e-5, err_msg=why)
    np.testing.assert_allclose(got_push(V), jax.jvp(dense, (X,), (V,))[1], rtol=1e-5, err_msg=why)


def test_residuals_that_are_constants_are_outputs_of_the_trace():
    closed, _ = linearized_jaxpr(dense, X)
    constvars = {id(v) for v in closed.jaxpr.constvars}
    forwarded = [v for v in closed.jaxpr.outvars if not isinstance(v, Literal) and id(v) in constvars]
    assert len(closed.consts) == 1, "closed-over weights are hoisted from the consts of the trace"
    assert closed.consts[0] is W, "constants of a trace are the caller's own buffers, forwarded without a copy"
    assert len(forwarded) == 1, "a residual that is a constant is recognised by its variable and not copied"


def test_two_linearizations_have_unequal_treedefs():
    first, second = jax.linearize(dense, X)[1], jax.linearize(dense, X + 1)[1]
    assert jax.tree.structure(first) != jax.tree.structure(second), (
        "JAX made its linear functions comparable: the Linearization's own static program may no longer be needed"
    )


def test_the_linear_jaxpr_transposes():
    closed = linear_jaxpr(dense, X)
    residuals = jax.tree.leaves(jax.linearize(dense, X)[1])

    def push(t):
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *residuals, t)

    (got,) = jax.linear_transpose(push, X)([V])
    np.testing.assert_allclose(
        got, jax.vjp(dense, X)[1](V)[0], rtol=1e-5, err_msg="Linearization.transpose is linear_transpose of the program"
    )


def test_while_loop_keeps_nothing_and_does_not_transpose():
    push = jax.linearize(doubled, X + 2)[1]
    assert [leaf.shape for leaf in jax.tree.leaves(push)] == [(3,)], "residual_bytes of a while_loop is its input"
    with pytest.raises(ValueError, match="while_loop"):
        jax.linear_transpose(push, X)(X)


def test_integer_outputs_and_inputs_have_float0_tangents():
    value, push = jax.linearize(lambda x, i: (x * 2, i), X, jnp.arange(3))
    got = push(V, np.zeros(3, float0))
    assert value[1].dtype == jnp.arange(3).dtype, "held leaves go through jax.linearize"
    assert got[1].dtype == float0, "held outputs of the linear program are float0"


# Constants ------------------------------------------------------------------------------------------------------------


def test_replace_consts_none_moves_constants_to_leading_invars():
    closed, _ = linearized_jaxpr(dense, X)
    free = closed.jaxpr.replace(consts=None)
    why = "cached programs hold no data: jaxpr.replace(consts=None) makes constants the leading arguments"
    assert (len(free.consts), len(free.constvars), len(free.invars)) == (0, 0, 2), why
    got = jax.core.eval_jaxpr(free, [], W, X)
    want = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, X)
    np.testing.assert_array_equal(got[0], want[0], err_msg=why)
    np.testing.assert_array_equal(jax.core.eval_jaxpr(free, [], 2 * W, X)[0], jnp.tanh(2 * W @ X), err_msg=why)


def test_the_const_free_jaxpr_keeps_no_array_alive():
    def make():
        weights = array(real(3, 3, seed=24))
        return jax.make_jaxpr(lambda x: weights @ x)(X).replace(consts=None), weakref.ref(weights)

    free, alive = make()
    gc.collect()
    assert len(free.invars) == 2
    assert alive() is None, "the program of a Linearization would keep weights alive as long as its treedef"


def test_a_nested_jit_hides_its_constants():
    closed = jax.make_jaxpr(behind_jit)(X)
    (eqn,) = closed.eqns
    assert closed.consts == [], "constants of nested jits were hoisted: opening jit equations may be unnecessary now"
    assert eqn.primitive.name == "jit", "nested jits are found by the name of their primitive"
    assert eqn.primitive is primitives.jit_p, "nested jits are found by their primitive"
    assert eqn.params["jaxpr"].consts[0] is W, "constants of a nested jit are found in its params['jaxpr'].consts"


def test_a_nested_jit_in_a_scan_hides_its_constants():
    def fun(x):
        return jax.lax.scan(lambda c, _: (behind_jit(c), None), x, None, length=3)[0]

    closed = jax.make_jaxpr(fun)(X)
    (eqn,) = closed.eqns
    inner = [e.params["jaxpr"] for e in eqn.params["jaxpr"].eqns if e.primitive.name == "jit"]
    found = [c for jaxpr in inner for c in jaxpr.consts]
    assert any(c is W for c in [*closed.consts, *eqn.params["jaxpr"].consts, *found]), (
        "constants behind a jit in a scan body are lifted from the body's own jit equations"
    )


def test_a_cond_lifts_constants_of_its_branches():
    closed = jax.make_jaxpr(lambda x: jax.lax.cond(jnp.sum(x) > 0, dense, jnp.sin, x))(X)
    assert any(c is W for c in closed.consts), "constants of cond branches are arguments of the traced program"


# Traces as keys -------------------------------------------------------------------------------------------------------


def test_trace_returns_the_same_jaxpr_in_an_equal_context():
    traced = jax.jit(dense)
    first = traced.trace(X).jaxpr
    why = "jit(...).trace(...).jaxpr is the cache key of a program: the same object for an equal context"
    assert traced.trace(X + 1).jaxpr is first, why
    seen = {}

    def look(name):
        def body(x):
            seen[name] = traced.trace(x).jaxpr is first
            return jnp.sum(x)

        return body

    jax.jit(look("jit"))(X)
    jax.vmap(look("vmap"))(jnp.stack([X, X]))
    jax.grad(look("grad"))(X)
    jax.lax.scan(lambda c, _: (c, look("scan")(c)), X, None, length=2)
    assert seen == {"jit": True, "vmap": True, "grad": True, "scan": True}, why


def test_trace_returns_another_jaxpr_in_another_context():
    traced = jax.jit(dense)
    first = traced.trace(X).jaxpr
    with jax.default_matmul_precision("highest"):
        assert traced.trace(X).jaxpr is not first, "matmul precision is part of the cache key only through the trace"
    with jax.numpy_dtype_promotion("standard"):
        assert traced.trace(X).jaxpr is not first, "dtype promotion is part of the cache key only through the trace"
    assert traced.trace(X).jaxpr is first, "leaving a context gives the first program back"


def test_trace_keeps_closed_over_arrays_in_consts():
    traced = jax.jit(dense).trace(X)
    assert traced.jaxpr.consts[0] is W, "captured arrays are read from the trace without a copy"
    assert traced.closure_convert()[0][0] is W, "captured arrays are read from closure_convert without a copy"


def test_closure_convert_returns_captured_tracers_in_order():
    seen = {}

    def outer(a, b, x):
        traced = jax.jit(lambda y: jnp.tanh(a @ y) * b).trace(x)
        values = list(traced.closure_convert()[0])
        seen["values"] = [v is want for v, want in zip(values, (a, b), strict=True)]
        seen["consts"] = len(traced.jaxpr.consts)
        seen["invars"] = len(traced.jaxpr.invars)
        return x

    jax.jit(outer)(W, V, X)
    assert seen == {"values": [True, True], "consts": 0, "invars": 3}, (
        "closed-over tracers are leading invars of the traced jaxpr, in the order of closure_convert()[0]"
    )


def test_control_flow_on_values_raises_a_concretization_error():
    def fun(x):
        return x if jnp.sum(x) > 0 else -x

    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(fun).trace(X)
    jax.linearize(fun, X)  # the fall-back, op by op, works


def test_typeof_tells_weak_types_apart():
    weak, strong = jax.typeof(2.0), jax.typeof(jnp.asarray(2.0, F))
    assert weak.shape == strong.shape == ()
    assert (weak.weak_type, strong.weak_type) == (True, False), "signatures are jax.typeof of every leaf"
    assert weak != strong, "a weakly typed point is another signature"


# Functions with rules of their own ------------------------------------------------------------------------------------


def test_custom_vjp_linearizes_to_custom_lin():
    names = [e.primitive for e in linear_jaxpr(straight_through, X).eqns]
    assert primitives.custom_lin_p in names, "a function without a forward rule is recognised by custom_lin"


def test_custom_vjp_fails_only_when_applied():
    _, push = jax.linearize(straight_through, X)
    with pytest.raises(TypeError, match="custom_vjp"):
        push(V)
    jax.eval_shape(lambda x: jax.jvp(straight_through, (x,), (x,)), X)  # says nothing: hence the search for custom_lin


def test_custom_vjp_pushes_forward_by_transposing_its_pullback():
    value, pullback = jax.vjp(straight_through, X)
    (got,) = jax.linear_transpose(pullback, value)((V,))
    why = "products with a custom_vjp function transpose its pullback"
    np.testing.assert_allclose(got, jnp.exp(X) * V, rtol=1e-5, err_msg=why)
    (back,) = jax.linear_transpose(jax.linearize(straight_through, X)[1], X)(V)
    np.testing.assert_allclose(back, jnp.exp(X) * V, rtol=1e-5, err_msg="custom_lin itself transposes")


def test_custom_vmap_fails_in_linearize_and_works_in_jvp():
    with pytest.raises(ValueError, match="known values"):
        jax.linearize(only_jvp, X)
    got = jax.vmap(lambda t: jax.jvp(only_jvp, (X,), (t,))[1])(jnp.stack([V, 2 * V]))
    np.testing.assert_allclose(got[1], 2 * jnp.cos(X) * V, rtol=1e-5, err_msg="custom_vmap falls back to jvp")


def test_bound_methods_are_equal_but_not_identical():
    class Model:
        def apply(self, x):
            return x

    model = Model()
    assert model.apply == model.apply
    assert hash(model.apply) == hash(model.apply), "caches go by function object and guard __self__ on their own"
    assert model.apply is not model.apply


def test_keyed_leaves_have_an_extended_dtype():
    key = jax.random.key(0)
    assert jnp.issubdtype(jax.typeof(key).dtype, jax.dtypes.prng_key), "PRNG keys are held leaves, found by dtype"
    assert not jnp.issubdtype(key.dtype, jnp.inexact)


def test_promotion_of_mixed_dtypes_needs_the_standard_rules():
    with jax.numpy_dtype_promotion("strict"), pytest.raises(jax.dtypes.TypePromotionError):
        jnp.promote_types(jnp.float32, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert jnp.promote_types(jnp.float32, jnp.bfloat16) == jnp.float32, "operator dtypes use the standard rules"


# Devices and lifetimes ------------------------------------------------------------------------------------------------


def _inside_shard_map(body):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (PartitionSpec("d"), PartitionSpec())
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d")))


def test_typeof_shows_the_manual_axes_under_shard_map():
    seen = {}

    def body(a, b):
        seen["shapes"] = (a.shape, a.dtype) == (b.shape, b.dtype)
        seen["types"] = jax.typeof(a) == jax.typeof(b)
        seen["varying"] = [set(jax.typeof(t).manual_axis_type.varying) for t in (a, b)]
        seen["cast"] = jax.typeof(jax.lax.pcast(b, "d", to="varying")) == jax.typeof(a)
        return a + b

    _inside_shard_map(body)(jnp.ones(24, F), jnp.ones(3, F))
    assert seen == {"shapes": True, "types": False, "varying": [{"d"}, set()], "cast": True}, (
        "signatures go by jax.typeof whole, and points and constants are cast to the union of varying axes with pcast"
    )


def test_eight_virtual_devices():
    assert jax.device_count() == 8, "tests of shard_map need the eight devices that conftest.py asks for"


def test_a_deleted_array_says_so():
    x = jnp.ones(3, F) + 0
    x.delete()
    assert x.is_deleted(), "a donated point is recognised by is_deleted()"
    with pytest.raises(RuntimeError, match="deleted"):
        x + 1


def test_a_buffer_is_forwarded_through_a_tree_and_a_jit_argument():
    leaves, tree = jax.tree.flatten(jax.tree_util.Partial(dense, W))
    assert leaves[0] is W, "flattening copies nothing: residuals share the caller's buffers"
    assert jax.tree.unflatten(tree, leaves).args[0] is W


def test_a_jit_beside_a_weakly_held_function_does_not_keep_it():
    def fun(x):
        return x * 3

    holder = weakref.WeakKeyDictionary({fun: "program"})
    compiled = jax.jit(lambda x, ref=weakref.ref(fun): ref()(x))
    compiled(X)
    del fun
    gc.collect()
    assert len(holder) == 0, "caches hold functions weakly: a jit over a weak reference must not keep the function"

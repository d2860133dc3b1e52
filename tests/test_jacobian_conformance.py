"""What JAX documents of `jax.jacfwd` and `jax.jacrev`, asked of `linjac.jacobian` in every mode.

Where the two differ from each other, linjac answers the same in both modes; the docs page of differences lists them.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0

import linjac
from scenarios import TOLERANCE, C, F, array, cplx, real

close = functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE)
every_mode = pytest.mark.parametrize("mode", ["auto", "fwd", "rev"])
W43 = array(real(4, 3, seed=61))
X3, Y2, Z3 = array(real(3, seed=62, low=0.3)), array(real(2, seed=63)), array(cplx(3, seed=64))
NX3, NY2 = np.asarray(X3), np.asarray(Y2)


def same(got, want):
    """Equal trees: structure, shapes, dtypes and entries."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        close(g, w)


# The documented examples ----------------------------------------------------------------------------------------------


def example(x):
    """The function in the docstrings of jax.jacfwd and jax.jacrev."""
    return jnp.asarray([x[0], 5 * x[2], 4 * x[1] ** 2 - 2 * x[2], x[2] * jnp.sin(x[0])])


@every_mode
def test_the_example_of_the_docstrings(mode):
    got = linjac.jacobian(example, mode=mode)(jnp.array([1.0, 2.0, 3.0]))
    want = [[1, 0, 0], [0, 0, 5], [0, 16, -2], [3 * np.cos(1.0), 0, np.sin(1.0)]]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@every_mode
def test_rows_are_outputs(mode):
    """The worked example: f(x) = (x0^2 + x1, x0 x1) at (2, 3)."""
    got = linjac.jacobian(lambda x: jnp.stack([x[0] ** 2 + x[1], x[0] * x[1]]), mode=mode)(array([2.0, 3.0]))
    close(got, [[4, 1], [3, 2]])


# argnums --------------------------------------------------------------------------------------------------------------


def three(x, y, z):
    return {"outer": x[:, None] * y[None, :], "sum": jnp.sum(x) * z**2}


ARGNUMS = [0, 1, 2, -1, -3, (0,), (2, 0), (0, 1, 2), (-1, 0), [1, 0], np.int64(1), np.int32(-2), (np.int64(0), 2)]


@every_mode
@pytest.mark.parametrize("argnums", ARGNUMS, ids=repr)
def test_argnums(argnums, mode):
    plain = argnums
    if isinstance(argnums, np.integer):  # jax.jacrev gives a 1-tuple here
        plain = int(argnums)
    plain = tuple(int(i) for i in plain) if isinstance(plain, tuple | list) else plain
    same(linjac.jacobian(three, argnums, mode=mode)(X3, Y2, array(0.5)), jax.jacfwd(three, plain)(X3, Y2, array(0.5)))


def test_argnums_by_name_and_position():
    same(linjac.jacobian(three, argnums=1)(X3, Y2, array(0.5)), linjac.jacobian(three, 1)(X3, Y2, array(0.5)))


def test_no_argnums_at_all():
    """JAX fails here too, obscurely."""
    with pytest.raises(ValueError, match="argnums"):
        linjac.jacobian(three, ())(X3, Y2, array(0.5))


@pytest.mark.parametrize("argnums", [3, -4, (0, 3)])
def test_argnums_out_of_range(argnums):
    with pytest.raises(ValueError, match=r"argnums.*3"):
        linjac.jacobian(three, argnums)(X3, Y2, array(0.5))


@pytest.mark.parametrize("argnums", [1.0, "x", True, (0, "x")])
def test_argnums_of_another_kind(argnums):
    with pytest.raises(TypeError, match="argnums"):
        linjac.jacobian(three, argnums)(X3, Y2, array(0.5))


def test_argnums_twice():
    with pytest.raises(ValueError, match="argnums"):
        linjac.jacobian(three, (0, 0))(X3, Y2, array(0.5))


@every_mode
def test_negative_argnums_count_positional_arguments(mode):
    def fun(x, y, *rest, scale=1.0):
        return (x * rest[0] + jnp.sum(y)) * scale

    close(linjac.jacobian(fun, -1, mode=mode)(X3, Y2, array(2.0), scale=3.0), 3 * X3)


# Trees ----------------------------------------------------------------------------------------------------------------


def nested(tree, y):
    a, (b, _) = tree["a"], tree["b"]
    return (a * jnp.sum(b), [{"c": b[0] * y, "none": None}, ()])


TREE = {"a": X3, "b": (Y2, None)}


@every_mode
@pytest.mark.parametrize("argnums", [0, (0,), (0, 1), (1, 0)], ids=repr)
def test_nested_trees(argnums, mode):
    same(linjac.jacobian(nested, argnums, mode=mode)(TREE, Y2), jax.jacfwd(nested, argnums)(TREE, Y2))


@every_mode
@pytest.mark.parametrize("empty", [{}, (), [], None, {"a": [None, ()]}], ids=repr)
def test_empty_trees(empty, mode):
    def fun(tree, x):
        del tree
        return {"x": x**2, "empty": empty}

    jac = linjac.jacobian(fun, (0, 1), mode=mode)(empty, X3)
    assert jac["empty"] == empty
    assert jac["x"][0] == empty
    close(jac["x"][1], np.diag(2 * NX3))


@every_mode
def test_none_output_is_none_in_both(mode):
    assert linjac.jacobian(lambda x: None, mode=mode)(X3) is None
    got = linjac.jacobian(lambda x: [None, x], mode=mode)(X3)
    assert got[0] is None
    close(got[1], np.eye(3))


@every_mode
def test_scalar_to_scalar(mode):
    got = linjac.jacobian(jnp.sin, mode=mode)(array(0.5))
    assert got.shape == ()
    close(got, np.cos(0.5))


@every_mode
def test_a_constant_function_has_zeros(mode):
    got = linjac.jacobian(lambda x: W43, mode=mode)(X3)
    assert (got.shape, got.dtype) == ((4, 3, 3), F)
    assert not np.any(got)


@every_mode
def test_output_of_a_python_scalar(mode):
    got = linjac.jacobian(lambda x: 1.0, mode=mode)(X3)
    assert got.shape == (3,)
    assert not np.any(got)


# has_aux --------------------------------------------------------------------------------------------------------------


def with_aux(x, y):
    return x[:2] * y, {"norm": jnp.sum(x**2), "shape": x.shape, "none": None}


@every_mode
def test_has_aux(mode):
    jac, aux = linjac.jacobian(with_aux, (0, 1), mode=mode, has_aux=True)(X3, Y2)
    want, _ = jax.jacfwd(lambda x, y: (with_aux(x, y)[0], ()), (0, 1), has_aux=True)(X3, Y2)
    same(jac, want)
    close(aux["norm"], np.sum(NX3**2))
    assert aux["shape"] == (3,)


@every_mode
def test_has_aux_under_jit_and_vmap(mode):
    def fun(x):
        return x**2, {"norm": jnp.sum(x)}

    jac = linjac.jacobian(fun, mode=mode, has_aux=True)
    close(jax.jit(jac)(X3)[1]["norm"], np.sum(NX3))
    found, aux = jax.vmap(jac)(jnp.stack([X3, 2 * X3]))
    close(found[1], np.diag(4 * NX3))
    close(aux["norm"], [np.sum(NX3), 2 * np.sum(NX3)])


@every_mode
def test_aux_may_be_an_integer_output(mode):
    jac, aux = linjac.jacobian(lambda x: (x**2, jnp.argmax(x)), mode=mode, has_aux=True)(X3)
    assert int(aux) == int(np.argmax(NX3))
    close(jac, np.diag(2 * NX3))


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
@pytest.mark.parametrize("result", ["single", "triple"])
def test_has_aux_needs_a_pair(what, result):
    fun = {"single": lambda x: x**2, "triple": lambda x: (x, x, x)}[result]
    with pytest.raises(TypeError, match=rf"linjac\.{what}.*(pair|aux)"):
        getattr(linjac, what)(fun, has_aux=True)(X3)


# holomorphic ----------------------------------------------------------------------------------------------------------


@every_mode
def test_holomorphic(mode):
    got = linjac.jacobian(lambda z: z**3, mode=mode, holomorphic=True)(Z3)
    assert got.dtype == C
    close(got, np.diag(3 * np.asarray(Z3) ** 2))


@every_mode
def test_holomorphic_needs_complex_inputs(mode):
    with pytest.raises(TypeError, match="holomorphic=True needs complex inputs"):
        linjac.jacobian(lambda x: x.astype(C), mode=mode, holomorphic=True)(X3)
    with pytest.raises(TypeError, match=r"holomorphic=True needs complex inputs[^$]*args\[1\]"):
        linjac.jacobian(lambda z, x: z * x.astype(C), (0, 1), mode=mode, holomorphic=True)(Z3, X3)


@every_mode
def test_holomorphic_needs_complex_outputs(mode):
    with pytest.raises(TypeError, match="holomorphic=True needs complex outputs"):
        linjac.jacobian(lambda z: z.real, mode=mode, holomorphic=True)(Z3)


@every_mode
@pytest.mark.parametrize("jit", [True, False])
def test_complex_to_complex_needs_holomorphic(mode, jit):
    with pytest.raises(TypeError, match="pass holomorphic=True"):
        linjac.jacobian(lambda z: jnp.conj(z), mode=mode, jit=jit)(Z3)


@every_mode
def test_complex_python_scalar(mode):
    got = linjac.jacobian(lambda z: z**2, mode=mode, holomorphic=True)(0.5 + 1j)
    assert jnp.issubdtype(got.dtype, jnp.complexfloating)
    close(got, 1 + 2j)


# Integers -------------------------------------------------------------------------------------------------------------

INTEGERS = [jnp.asarray([1, 2], jnp.int32), jnp.asarray([True, False]), np.asarray([1, 2], np.uint8), 3, True]


@every_mode
@pytest.mark.parametrize("value", INTEGERS, ids=lambda v: str(jnp.result_type(v)) + type(v).__name__)
def test_integer_inputs_are_refused(value, mode):
    with pytest.raises(TypeError, match=r"linjac\.jacobian"):
        linjac.jacobian(lambda x: jnp.asarray(x).astype(F), mode=mode)(value)


@every_mode
def test_integer_among_argnums_is_refused(mode):
    with pytest.raises(TypeError, match=r"args\[1\]: i32\[2\][^$]*allow_int"):
        linjac.jacobian(lambda x, i: x[i], (0, 1), mode=mode)(X3, jnp.asarray([1, 0], jnp.int32))


@every_mode
def test_allow_int(mode):
    """Blocks of float0 of the shape out + in, as `jax.grad` gives; `jax.jacrev` gives integer zeros of that shape."""
    index = jnp.asarray([1, 0], jnp.int32)
    jac = linjac.jacobian(lambda x, i: x[i] ** 2, (0, 1), mode=mode, allow_int=True)(X3, index)
    want = jax.jacrev(lambda x, i: x[i] ** 2, (0, 1), allow_int=True)(X3, index)
    close(jac[0], want[0])
    assert (jac[1].dtype, jac[1].shape) == (float0, (2, 2))
    assert want[1].shape == (2, 2)
    assert not np.any(np.asarray(want[1], bool))


@every_mode
def test_allow_int_alone(mode):
    jac = linjac.jacobian(lambda i: jnp.asarray(i).astype(F), mode=mode, allow_int=True)(3)
    assert (jac.dtype, jac.shape) == (float0, ())


@every_mode
@pytest.mark.parametrize("jit", [True, False])
def test_integer_outputs_are_refused(mode, jit):
    """`jax.jacfwd` gives integer zeros here, `jax.jacrev` an error."""
    with pytest.raises(TypeError, match=r"\['n'\]: i32\[3\][^$]*aux"):
        linjac.jacobian(lambda x: {"n": x.astype(jnp.int32), "x": x}, mode=mode, jit=jit)(X3)


@every_mode
def test_a_held_argument_may_be_anything(mode):
    def fun(x, index, name, key, none):
        assert none is None
        return {"sin": jnp.sin}[name](x[index]) * jax.random.uniform(key, (), F)

    args = (jnp.asarray([2, 0], jnp.int32), "sin", jax.random.key(1), None)
    got = linjac.jacobian(fun, mode=mode)(X3, *args)
    close(got, jax.jacfwd(lambda x: fun(x, *args))(X3))


# Weak types -----------------------------------------------------------------------------------------------------------


@every_mode
def test_weak_types(mode):
    """A Python scalar takes the dtype of its partner, and the default dtype alone."""
    half = array([0.5, 1.0], jnp.float16)
    assert linjac.jacobian(lambda x: x * 2.0, mode=mode)(half).dtype == jnp.float16
    assert linjac.jacobian(lambda t: t * 2.0, mode=mode)(0.5).dtype == jnp.result_type(float)
    with jax.numpy_dtype_promotion("standard"):
        assert linjac.jacobian(lambda x, t: x * t, (0, 1), mode=mode)(half, 0.5)[0].dtype == jnp.float16


@every_mode
def test_weak_and_strong_points_are_two_signatures(mode):
    jac = linjac.jacobian(lambda x: x * 3.0, mode=mode)
    close(jac(1.0), 3.0)
    close(jac(array(1.0, jnp.float16)), 3.0)
    assert jac(array(1.0, jnp.float16)).dtype == jnp.float16
    assert jac(1.0).dtype == jnp.result_type(float)


# Keyword arguments ----------------------------------------------------------------------------------------------------


def keywords(x, *, scale, power=2, tree=None):
    return scale * x**power + (0.0 if tree is None else jnp.sum(tree["a"]))


@every_mode
def test_keyword_arguments(mode):
    jac = linjac.jacobian(keywords, mode=mode)
    close(jac(X3, scale=2.0), np.diag(4 * NX3))
    close(jac(X3, scale=array(2.0), power=3), np.diag(6 * NX3**2))
    close(jac(X3, scale=np.asarray(2.0, F), tree={"a": X3}), np.diag(4 * NX3))


@every_mode
def test_a_differentiated_argument_must_be_positional(mode):
    """As in JAX: a keyword argument is never differentiated."""
    with pytest.raises(ValueError, match="argnums"):
        linjac.jacobian(lambda x: x**2, mode=mode)(x=X3)


def test_default_arguments():
    close(linjac.jacobian(lambda x, scale=3.0: scale * x)(X3), 3 * np.eye(3))


# Static arguments, donation and wrapping ------------------------------------------------------------------------------


def static(x, name, power=2, *, flip=False):
    """A docstring that is carried over."""
    assert isinstance(name, str)
    out = {"sin": jnp.sin, "square": jnp.square}[name](x) ** power
    return jnp.flip(out) if flip else out


@every_mode
def test_static_arguments_under_jit(mode):
    jac = linjac.jacobian(static, mode=mode)
    want = np.diag(2 * np.sin(NX3) * np.cos(NX3))
    close(jac(X3, "sin"), want)
    close(jax.jit(jac, static_argnums=(1,))(X3, "sin"), want)
    close(jax.jit(jac, static_argnums=(1, 2))(X3, "sin", 2), want)
    close(jax.jit(jac, static_argnames=("name", "power", "flip"))(X3, name="sin", flip=True), want[::-1])
    close(jax.jit(jac, static_argnames="name")(X3, "sin"), want)  # needs the signature of `fun`


@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
def test_signature_and_docstring_are_carried_over(what):
    wrapped = getattr(linjac, what)(static)
    assert inspect.signature(wrapped) == inspect.signature(static)
    assert "carried over" in wrapped.__doc__
    assert wrapped.__name__ == "static"


def test_callables_without_a_name():
    close(linjac.jacobian(functools.partial(static, name="sin"))(X3), np.diag(2 * np.sin(NX3) * np.cos(NX3)))

    class Call:
        def __call__(self, x):
            return jnp.sin(x)

    close(linjac.jacobian(Call())(X3), np.diag(np.cos(NX3)))
    close(linjac.jacobian(jax.jit(jnp.sin))(X3), np.diag(np.cos(NX3)))


@every_mode
def test_the_input_may_be_donated(mode):
    """Donation of a point of the shape of the result: the buffer is gone afterwards, the result is right."""
    jac = jax.jit(linjac.jacobian(jnp.sum if mode != "fwd" else total, mode=mode), donate_argnums=0)
    x = array(NX3.copy())
    close(jac(x), np.ones(3))
    if x.is_deleted():
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            linjac.jacobian(total, mode=mode)(x)


def total(x):
    return jnp.sum(x)


def test_a_result_of_an_undonated_call_survives_the_donation_of_its_input():
    """The identity's residuals are the point itself: the Jacobian must own its memory."""
    x = array(NX3.copy())
    value, jac = linjac.value_and_jacobian(lambda y: y * y)(x)
    x.delete()
    close(jac, np.diag(2 * NX3))
    close(value, NX3**2)
    y = array(NX3.copy())
    value, jac = linjac.value_and_jacobian(same_object)(y)
    y.delete()
    close(value, NX3)
    close(jac, np.eye(3))


def same_object(y):
    return y


# Exceptions -----------------------------------------------------------------------------------------------------------


class OddError(Exception):
    """An exception that no library knows."""


def raising(x):
    raise OddError("from inside")


@every_mode
@pytest.mark.parametrize(("what", "jit"), [("jacobian", True), ("jacobian", False), ("value_and_jacobian", True)])
def test_exceptions_of_fun_come_through(what, jit, mode):
    with pytest.raises(OddError, match="from inside") as caught:
        getattr(linjac, what)(raising, mode=mode, jit=jit)(X3)
    assert type(caught.value) is OddError
    assert "raising" in [frame.name for frame in caught.traceback]


def test_exceptions_of_fun_come_through_plan():
    with pytest.raises(OddError, match="from inside"):
        linjac.plan_jacobian(raising)(X3)


@every_mode
def test_errors_of_jax_inside_fun_come_through(mode):
    with pytest.raises(TypeError, match=r"incompatible|contracting"):
        linjac.jacobian(lambda x: W43.T @ x, mode=mode)(X3)


@every_mode
def test_wrong_arguments_of_fun(mode):
    with pytest.raises(TypeError, match="argument"):
        linjac.jacobian(static, mode=mode)(X3)
    with pytest.raises(TypeError, match="unexpected keyword"):
        linjac.jacobian(static, mode=mode)(X3, "sin", color="red")


@pytest.mark.parametrize("fun", [3, "sin", None, [1]], ids=repr)
@pytest.mark.parametrize("what", ["jacobian", "value_and_jacobian", "plan_jacobian"])
def test_fun_must_be_callable(fun, what):
    with pytest.raises(TypeError, match=rf"linjac\.{what}"):
        getattr(linjac, what)(fun)


@every_mode
def test_a_side_effect_runs_while_tracing_only(mode):
    seen = []

    def fun(x):
        seen.append(type(x))
        return x**2

    jac = linjac.jacobian(fun, mode=mode)
    jac(X3)
    jac(X3)
    assert len(seen) == 1


# Compositions that JAX documents --------------------------------------------------------------------------------------


def quadratic(x):
    return jnp.sum(x**3) + x[0] * x[1]


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(["fwd", "rev"], repeat=2)))
def test_hessian_of_the_documentation(outer, inner):
    """`jax.hessian` is `jacfwd(jacrev(f))`; any pair of modes gives the same."""
    got = linjac.jacobian(linjac.jacobian(quadratic, mode=inner), mode=outer)(X3)
    close(got, jax.hessian(quadratic)(X3))


@every_mode
def test_hessian_of_a_tree(mode):
    def fun(tree):
        return jnp.sum(tree["a"] ** 2) * jnp.prod(tree["b"])

    tree = {"a": X3, "b": Y2}
    same(linjac.jacobian(jax.grad(fun), mode=mode)(tree), jax.hessian(fun)(tree))


@every_mode
def test_disable_jit(mode):
    with jax.disable_jit():
        close(linjac.jacobian(example, mode=mode)(X3), jax.jacfwd(example)(X3))


@every_mode
def test_debug_nans_and_x64_contexts(mode):
    with jax.debug_nans(True):
        close(linjac.jacobian(example, mode=mode)(X3), jax.jacfwd(example)(X3))


@jax.custom_jvp
def doubled(x):
    """A rule that is not the derivative."""
    return jnp.sin(x)


doubled.defjvp(lambda p, t: (jnp.sin(p[0]), 2.0 * t[0]))


@every_mode
def test_custom_rules_are_respected(mode):
    close(linjac.jacobian(doubled, mode=mode)(X3), 2 * np.eye(3))


@every_mode
def test_stop_gradient_and_integer_paths_have_no_derivative(mode):
    def fun(x):
        return jax.lax.stop_gradient(x) * x + jnp.floor(x).astype(jnp.int32).astype(F)

    close(linjac.jacobian(fun, mode=mode)(X3), np.diag(NX3))

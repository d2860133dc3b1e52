"""Faults of Jacobians that were found once, and must not come back. The classes of fault are headings."""

import copy
import dataclasses
import functools
import pickle
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import linjac
from scenarios import F, array, real

X = array(real(3, seed=90, low=0.3))
W = array(real(3, 3, seed=91))
BOTH = ["fwd", "rev"]


def close(have, want):
    np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-5, atol=1e-6)


# Python that needs values ---------------------------------------------------------------------------------------------
NEEDS_VALUES = {
    "a shape": (lambda x, n: jnp.ones(n, F) * x.sum(), np.int64(2)),
    "a slice": (lambda x, n: x[:n], np.int64(2)),
    "a reshape": (lambda x, n: x.reshape((n, -1)), jnp.int32(3)),
    "a shape of random numbers": (lambda x, n: jax.random.normal(jax.random.key(0), (n,), F) * x[0], np.int64(2)),
    "a dict key": (lambda x, n: {2: x}[n] * x, np.int64(2)),
    "a format": (lambda x, n: x * float(len(f"{n:03d}")), jnp.int32(2)),
    "a static argument": (jax.jit(lambda x, n: x * n, static_argnums=1), 3.0),
    "a slice of the point": (lambda x, n: x[: x.argmax() + 1], 0.0),
    "a branch": (lambda x, n: x * n if n > 0 else x, 2.0),
}


@pytest.mark.parametrize("name", list(NEEDS_VALUES))
def test_a_value_used_in_python_runs_op_by_op(name):
    fun, n = NEEDS_VALUES[name]
    with pytest.warns(linjac.PerformanceWarning, match="needs the value of an array in Python"):
        got = linjac.jacobian(fun)(X, n)
    close(got, jax.jacfwd(fun)(X, n))


def test_an_error_of_the_function_itself_is_not_tried_again():
    calls: list[None] = []

    def fun(x):
        calls.append(None)
        return jnp.dot(x, jnp.ones(5, F))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        linjac.jacobian(fun)(X)
    assert len(calls) == 1


def branching(x):
    return x**3 if x[0] > 0 else x


def scaled(x, s):
    return x * s if s > 0 else x


MASK = np.array([True, False, True])
UNDER = {
    "grad": lambda J: jax.grad(lambda x: J(branching)(x).sum())(X),
    "jvp": lambda J: jax.jvp(J(branching), (X,), (X,))[1],
    "a Jacobian of it": lambda J: J(J(branching))(X),
    "vmap, a fixed float": lambda J: jax.vmap(lambda x: J(scaled)(x, 2.0))(X[None]),
    "jit, a fixed float": lambda J: jax.jit(lambda x: J(scaled)(x, 2.0))(X),
    "jit, a fixed mask": lambda J: jax.jit(lambda x: J(lambda x, n: x[n])(x, MASK))(X),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", list(UNDER))
def test_a_value_used_in_python_under_a_transformation_that_knows_it(name, jit):
    want = UNDER[name](jax.jacfwd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linjac.PerformanceWarning)
        close(UNDER[name](functools.partial(linjac.jacobian, jit=jit)), want)


@pytest.mark.parametrize("jit", [True, False])
def test_a_value_that_a_transformation_hides_is_named(jit):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(linjac.jacobian(branching, jit=jit))(X)
    assert "linjac.jacobian: fun needs in Python a value that an enclosing transformation traces" in (
        caught.value.__notes__
    )


@pytest.mark.parametrize("jit", [True, False])
def test_numpy_on_a_traced_value_is_jax_own_error_with_the_line(jit):
    def user(x):
        return jnp.asarray(np.sin(x))

    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        linjac.jacobian(user, jit=jit)(X)
    frames, trace = [], caught.value.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "user" in frames


def test_other_types_are_traced_although_some_need_values():
    def fun(x):
        return jnp.sin(x) if x.ndim == 2 or x[0] > 0 else x

    with pytest.warns(linjac.PerformanceWarning):
        linjac.jacobian(fun)(X)
    assert isinstance(linjac.plan_jacobian(fun)(W).compile(), int), "a plan of what runs op by op does not compile"


def test_a_branch_with_jit_disabled_is_not_called_slow():
    def fun(x):
        return branching(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax.disable_jit():
            close(linjac.jacobian(fun)(X), jax.jacfwd(fun)(X))
    with pytest.warns(linjac.PerformanceWarning, match="op by op"):
        linjac.jacobian(fun)(X)


@pytest.mark.parametrize("who", ["plan_jacobian", "residual_bytes"])
def test_types_cannot_stand_for_values(who):
    struct = jax.ShapeDtypeStruct((3,), F)
    with pytest.raises(TypeError) as caught:
        linjac.plan_jacobian(branching)(struct) if who == "plan_jacobian" else linjac.residual_bytes(branching, struct)
    root = "args" if who == "plan_jacobian" else "primals"
    assert str(caught.value) == (
        f"linjac.{who}: fun needs the values of its arguments in Python, and these are types\n"
        f"  {root}[0]: {'f64' if jnp.float64 == F else 'f32'}[3]\n"
        "pass arrays"
    )


# arguments ------------------------------------------------------------------------------------------------------------
def test_argnums_as_a_set():
    got = linjac.jacobian(lambda x, y: x * y, {0, 1})(X, 2 * X)
    assert isinstance(got, tuple) and len(got) == 2
    close(got[0], jnp.diag(2 * X))
    close(got[1], jnp.diag(X))


def test_ragged_argnums():
    with pytest.raises(TypeError, match=r"^linjac\.jacobian: argnums must hold ints, got tuple$"):
        linjac.jacobian(lambda x, y: x * y, (0, (1, 2)))(X, X)  # type: ignore[arg-type]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["factor"])
@dataclasses.dataclass
class Scaled:
    w: Any
    factor: Any


def test_metadata_that_cannot_be_compared():
    def fun(tree):
        return tree.w * tree.factor

    linjac.jacobian(fun)(Scaled(X, np.ones(3)))
    with pytest.raises(TypeError, match=r"^linjac\.jacobian: a class among the arguments has metadata that cannot be"):
        linjac.jacobian(fun)(Scaled(X, np.ones(3) * 2))
    close(linjac.jacobian(fun, jit=False)(Scaled(X, np.ones(3) * 2)).w, 2 * np.eye(3))


def test_a_module_changed_in_place_is_seen():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=F)

    def fun(x):
        return model(x)

    close(linjac.jacobian(fun)(X), model.kernel[...].T)
    model.kernel[...] = model.kernel[...] * 2
    close(linjac.jacobian(fun)(X), model.kernel[...].T)


@pytest.mark.skipif(jnp.float32 != F, reason="needs x64 off")
def test_arrays_of_64_bits_with_x64_off():
    with jax.enable_x64(True):
        x = jnp.asarray(np.ones(3))
    with pytest.raises(TypeError) as caught:
        linjac.jacobian(jnp.sin)(x)
    assert str(caught.value) == (
        "linjac.jacobian: arguments have 64 bits while jax_enable_x64 is off\n"
        "  f64[3]\n"
        "turn jax_enable_x64 on, or cast them to 32 bits"
    )


# what a call does to its surroundings ---------------------------------------------------------------------------------
def test_nothing_is_measured_inside_a_trace_on_concrete_arguments():
    def fun(x):
        return jnp.sin(x) * 3

    def outer(z, mode):
        return linjac.jacobian(fun, mode=mode)(X) @ z

    def equations(mode):
        return len(jax.make_jaxpr(functools.partial(outer, mode=mode))(X).eqns)

    assert equations("measure") == equations("auto")
    notes: list[str] = []
    jax.make_jaxpr(lambda z: (notes.extend(linjac.plan_jacobian(fun, mode="measure")(X).notes), z)[1])(X)
    assert notes[-1] == "not measured: inside a trace, with no cached answer; chosen by the size rule"


def test_types_are_not_measured():
    plan = linjac.plan_jacobian(jnp.sin, mode="measure")(jax.ShapeDtypeStruct((3,), F))
    assert plan.notes[-1] == "not measured: types without values; chosen by the size rule"


def test_no_transfer_is_made():
    with jax.transfer_guard("disallow"):
        J = linjac.jacobian(lambda x: jnp.sin(x))(X)
    close(J, jnp.diag(jnp.cos(X)))


def test_wrappers_of_one_function_are_no_repeated_trace():
    def f(x):
        return jnp.sin(x) * x.sum()

    for fun in (f, linjac.jacobian(f), jax.jacfwd(f), jax.jit(f), jax.checkpoint(f)):
        linjac.jacobian(fun)(X)  # a warning would be an error
    for precision in ("default", "high", "highest", "float32"):
        with jax.default_matmul_precision(precision):
            linjac.jacobian(f)(X)


def test_a_warning_that_is_an_error_is_not_taken_for_a_need_of_values():
    def make():
        return lambda x: jnp.cos(x) * 2

    kept = [make() for _ in range(4)]
    for fun in kept[:3]:
        linjac.jacobian(fun)(X)
    with pytest.raises(linjac.PerformanceWarning, match="was traced 4 times at one signature"):
        linjac.jacobian(kept[3])(X)


# plans ----------------------------------------------------------------------------------------------------------------
def test_a_plan_travels():
    plan = linjac.plan_jacobian(jnp.sin, mode="rev", chunk_size=2)(X)
    there = pickle.loads(pickle.dumps(plan))
    assert there == plan and hash(there) == hash(plan) and str(there) == str(plan)
    assert there.rows == plan.rows
    close(linjac.jacobian(jnp.sin, mode=there)(X), jnp.diag(jnp.cos(X)))
    said = (
        ": the plan comes from another process (it was pickled), so it has no program\n"
        "make a plan here with linjac.plan_jacobian, or give this one to linjac.jacobian as mode"
    )
    with pytest.raises(ValueError) as caught:
        there.compile()
    assert str(caught.value) == "linjac.JacobianPlan.compile" + said
    with pytest.raises(ValueError) as caught:
        there.unflatten(np.eye(3))
    assert str(caught.value) == "linjac.JacobianPlan.unflatten" + said
    assert copy.deepcopy(plan) is plan
    assert dataclasses.asdict(plan)["m"] == 3


def test_unflatten_of_a_plan_with_integers_has_float0():
    plan = linjac.plan_jacobian(lambda t: t["x"] * t["i"].astype(F), allow_int=True)({"x": X, "i": jnp.arange(3)})
    blocks = plan.unflatten(np.eye(3))
    assert blocks["i"].dtype == jax.dtypes.float0 and blocks["i"].shape == (3, 3)


def test_unflatten_of_rows_of_several_sizes():
    with pytest.raises(ValueError, match=r"unflatten: expected shape \(3, 3\), got rows of several sizes$"):
        linjac.plan_jacobian(jnp.sin)(X).unflatten([[1.0, 2.0], [3.0]])


# sizes, dtypes, callbacks ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", BOTH)
def test_a_matrix_without_rows_or_columns(mode):
    matrix = functools.partial(linjac.jacobian, mode=mode, layout="matrix")
    assert matrix(lambda s, x: x)({}, X).shape == (3, 0)
    assert matrix(lambda x: x[:0])(X).shape == (0, 3)
    assert matrix(lambda i: i.astype(F) * 2, allow_int=True)(jnp.arange(3)).shape == (3, 0)


@pytest.mark.parametrize("mode", BOTH)
def test_complex_numbers_of_8_bit_floats(mode):
    x = X.astype(jnp.float8_e4m3fn)
    J = linjac.jacobian(lambda x: x.astype(jnp.complex64) * 2, mode=mode)(x)
    assert J.dtype == jnp.complex64
    close(J, 2 * np.eye(3))


@jax.custom_jvp
def sine_by_callback(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@sine_by_callback.defjvp
def _sine_by_callback_jvp(primals, tangents):
    struct = jax.ShapeDtypeStruct(primals[0].shape, primals[0].dtype)
    tangent = jax.pure_callback(lambda x, t: np.cos(x) * t, struct, primals[0], tangents[0])
    return sine_by_callback(primals[0]), tangent


@pytest.mark.parametrize("jit", [True, False])
def test_a_chunk_that_cannot_be_mapped_is_taken_one_by_one(jit):
    close(linjac.jacobian(sine_by_callback, chunk_size=2, jit=jit)(X), jnp.diag(jnp.cos(X)))
    plan = linjac.plan_jacobian(sine_by_callback, chunk_size=2)(X)
    assert plan.chunk_size == 1
    assert "one direction at a time: jax.vmap cannot map a host callback of this kind" in plan.notes


LARGE = array(real(256, 256, seed=92)) / 16
COPIED = {
    "two inputs, blocks": (lambda t: jnp.tanh(LARGE @ (t["a"] + t["b"])), "blocks", "fwd", "rev"),
    "two outputs, blocks": (lambda t: (jnp.tanh(LARGE @ t), LARGE @ t), "blocks", "rev", "fwd"),
    "two inputs, matrix": (lambda t: jnp.tanh(LARGE @ (t["a"] + t["b"])), "matrix", "rev", "fwd"),
}


@pytest.mark.parametrize("name", list(COPIED))
def test_a_result_cut_or_joined_from_parts_counts_as_scratch(name):
    fun, layout, copying, direct = COPIED[name]
    x = jnp.ones(256, F)
    point = x if "outputs" in name else {"a": x, "b": x}
    modes = (copying, direct)
    plans = [linjac.plan_jacobian(fun, mode=mode, layout=layout, chunk_size=16)(point) for mode in modes]
    assert plans[0].scratch_bytes >= plans[0].result_bytes > plans[1].scratch_bytes
    assert plans[0].scratch_bytes >= 0.9 * plans[0].compile()


def test_a_rule_inside_jax_has_no_place():
    from jax.experimental.ode import odeint

    def fun(x):
        return odeint(lambda y, t: -y, x, jnp.array([0.0, 1.0], F))

    with pytest.raises(linjac.ModeError) as caught:
        linjac.jacobian(fun, mode="fwd")(X)
    assert " at  " not in str(caught.value)


def test_nan_stays_in_its_entry():
    x = jnp.array([np.nan, 2.0], F)
    for mode in BOTH:
        J = np.asarray(linjac.jacobian(jnp.sin, mode=mode)(x))
        assert np.isnan(J[0, 0]) and J[0, 1] == J[1, 0] == 0.0
        np.testing.assert_array_equal(J, jax.jit(jax.jacfwd(jnp.sin))(x))


@pytest.mark.parametrize("options", [{}, {"mode": "rev"}, {"layout": "matrix"}])
def test_op_by_op_the_result_is_never_the_callers_own_array(options):
    matrix = jnp.ones((2, 3), F)
    assert linjac.jacobian(lambda x: matrix @ x, jit=False, **options)(X) is not matrix
    assert linjac.value_and_jacobian(lambda x: matrix @ x, jit=False, **options)(X)[1] is not matrix
    taken = linjac.jacobian(lambda a, x: a @ x, 1, jit=False, **options)(matrix, X)
    jax.jit(lambda j: 2 * j, donate_argnums=0)(taken)
    close(matrix, np.ones((2, 3)))

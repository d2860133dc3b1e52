"""`bisect_linearization` names the equation, and the line, at which a derivative goes wrong."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linjac import testing
from linjac.testing import Bisection, bisect_linearization
from scenarios import BY_NAME, SHORT, C, F, array, real

X = array([0.3, 0.5, -2.0])


def line_of(fun, text):
    """`file:line` of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(fun)
    (number,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"test_bisect.py:{number}"


def names_line(found, fun, text):
    """Whether the place is that line; a column may follow it."""
    return re.search(re.escape(line_of(fun, text)) + r"(:|\D|$)", found.place) is not None


def custom(rule):
    """sin(x) y with a rule of its own."""

    @jax.custom_jvp
    def product(x, y):
        return jnp.sin(x) * y

    product.defjvp(lambda p, t: (product(*p), rule(*p, *t)))
    return product


def inside(product):
    def fun(x):
        y = jnp.cos(x)
        z = product(x, y)  # here
        return jnp.sum(z * z)

    return fun


RULES = {
    "factor": (lambda x, y, dx, dy: 1.01 * (jnp.cos(x) * y * dx + jnp.sin(x) * dy), "1.01 times as large"),
    "sign": (lambda x, y, dx, dy: jnp.cos(x) * y * dx - jnp.sin(x) * dy, "in operand 1"),
    "affine": (lambda x, y, dx, dy: jnp.cos(x) * y * dx + jnp.sin(x) * dy + 1e-3, "3 of 3 elements"),
    "not linear": (lambda x, y, dx, dy: jnp.cos(x) * y * dx + jnp.sin(x) * jnp.abs(dy), "in operand 1"),
    "one element": (lambda x, y, dx, dy: (jnp.cos(x) * y * dx + jnp.sin(x) * dy).at[1].mul(2.0), "1 of 3 elements"),
}


# wrong rules ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RULES)
def test_a_wrong_custom_jvp_is_named(name):
    rule, words = RULES[name]
    fun = inside(custom(rule))
    found = bisect_linearization(fun, X)
    assert not found
    assert (found.kind, found.equation) == ("rule", "custom_jvp_call of product")
    assert names_line(found, fun, "# here")
    assert words in found.detail
    assert f"the rule is of product at {__file__}:" in found.detail
    assert found.checked == 1  # the cosine before it
    assert str(found).splitlines()[0] == (
        "linjac.testing.bisect_linearization: a rule that is no derivative: custom_jvp_call of product"
    )


def test_the_right_rule_passes():
    found = bisect_linearization(inside(custom(lambda x, y, dx, dy: jnp.cos(x) * y * dx + jnp.sin(x) * dy)), X)
    assert found
    assert found.skipped == ()
    assert str(found) == (
        "linjac.testing.bisect_linearization: nothing found (4 equations compared with finite differences)"
    )


def test_a_rule_that_returns_another_value_is_named():
    @jax.custom_jvp
    def shifted(x):
        return jnp.sin(x)

    shifted.defjvp(lambda p, t: (jnp.sin(p[0]) + 1.0, jnp.cos(p[0]) * t[0]))
    found = bisect_linearization(lambda x: 2.0 * shifted(x), X)
    assert (found.kind, found.equation) == ("rule", "custom_jvp_call of shifted")
    assert found.detail.startswith("the value that the rule returns is not the value of the function")


@pytest.mark.parametrize(
    "backward,wrong",
    [
        (lambda r, c: (c * jnp.cos(r[0]) * r[1], c * jnp.sin(r[0])), None),
        (lambda r, c: (1.01 * c * jnp.cos(r[0]) * r[1], 1.01 * c * jnp.sin(r[0])), "is 1.01 times"),
        (lambda r, c: (c * jnp.cos(r[0]) * r[1], -c * jnp.sin(r[0])), "in operand 1"),
    ],
    ids=["right", "factor", "sign"],
)
def test_a_custom_vjp_is_compared(backward, wrong):
    @jax.custom_vjp
    def product(x, y):
        return jnp.sin(x) * y

    product.defvjp(lambda x, y: (product(x, y), (x, y)), backward)
    fun = inside(product)
    found = bisect_linearization(fun, X)
    if wrong is None:
        assert found
        assert found.checked == 4
        return
    assert (found.kind, found.equation) == ("rule", "custom_vjp_call of product")
    assert names_line(found, fun, "# here")
    assert wrong in found.detail


def test_a_wrong_rule_behind_a_custom_vjp_is_found():
    """Behind a rule that cannot be pushed, differences give the tangents."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, c: (c * jnp.cos(x),))
    product = custom(lambda x, y, dx, dy: jnp.cos(x) * y * dx)
    found = bisect_linearization(lambda x: product(x, sine(x)), X)
    assert (found.kind, found.equation, found.checked) == ("rule", "custom_jvp_call of product", 1)


def wrong_tanh():
    @jax.custom_jvp
    def squash(x):
        return jnp.tanh(x)

    squash.defjvp(lambda p, t: (squash(*p), 2.0 * (1 - jnp.tanh(p[0]) ** 2) * t[0]))
    return squash


def test_inside_jit_scan_cond_while_and_checkpoint():
    squash = wrong_tanh()

    def in_jit(x):
        @jax.jit
        def inner(y):
            return squash(y) + 1.0  # in jit

        return inner(x) * 2.0

    def in_scan(x):
        def body(carry, row):
            carry = carry * squash(row)  # in scan
            return carry, carry

        return jax.lax.scan(body, jnp.ones((), F), x)

    def in_cond(x):
        return jax.lax.cond(
            x[0] > 0,
            lambda y: squash(y),  # in cond
            lambda y: y,
            x,
        )

    def in_while(x):
        def body(state):
            return state[0] + 1, squash(state[1])  # in while

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    def in_checkpoint(x):
        return jax.checkpoint(lambda y: squash(y) * y)(x)  # in checkpoint

    def in_vmap(x):
        return jax.vmap(lambda y: squash(y))(x)  # in vmap

    cases = [(in_jit, ""), (in_scan, ", turn 0 of a scan"), (in_cond, ""), (in_while, ", turn 0 of a while_loop")]
    for fun, turn in [*cases, (in_checkpoint, ""), (in_vmap, "")]:
        found = bisect_linearization(fun, X)
        assert (found.kind, found.equation) == ("rule", "custom_jvp_call of squash"), fun.__name__
        assert names_line(found, fun, "# " + fun.__name__.replace("_", " ")), (fun.__name__, found.place)
        assert found.place.endswith(turn)


def test_the_branch_that_is_not_taken_is_not_compared():
    squash = wrong_tanh()
    found = bisect_linearization(lambda x: jax.lax.cond(x[0] < 0, squash, lambda y: y * y, x), X)
    assert found


# NaN and infinity -----------------------------------------------------------------------------------------------------
def test_a_masked_square_root_is_found_in_reverse():
    def fun(x):
        scaled = 2.0 * x
        root = jnp.sqrt(scaled)  # the root
        return jnp.sum(jnp.where(scaled > 0, root, 0.0))

    found = bisect_linearization(fun, array([0.0, 1.0, 4.0]))
    assert (found.kind, found.equation) == ("cotangent", "sqrt")
    assert names_line(found, fun, "# the root")
    assert found.detail == f"{SHORT}[3]: 1 of 3 elements is NaN, for finite cotangents of its results"
    assert str(found).splitlines()[0] == (
        "linjac.testing.bisect_linearization: the first cotangent that is not finite: sqrt"
    )
    assert bisect_linearization(fun, array([0.5, 1.0, 4.0]))


def test_a_tangent_that_is_not_finite_is_found():
    def fun(x):
        norm = jnp.sqrt(jnp.sum(x * x))  # the norm
        return x * norm

    found = bisect_linearization(fun, array([0.0, 0.0]))
    assert (found.kind, found.equation) == ("tangent", "sqrt")
    assert names_line(found, fun, "# the norm")
    assert found.detail == f"{SHORT}[]: it is NaN, for finite tangents of its operands"


def test_overflow_and_the_logarithm_of_zero():
    def overflow(x):
        big = jnp.exp(1e5 * x)  # overflow
        return big / (1 + big)

    found = bisect_linearization(overflow, X)
    assert (found.kind, found.equation) == ("value", "exp")
    assert names_line(found, overflow, "# overflow")
    assert found.detail == f"{SHORT}[3]: 2 of 3 elements are infinite, and all its operands are finite"

    def logarithm(x):
        harmless = jnp.log(jnp.maximum(x, 0.0))
        masked = jnp.where(x > 0, harmless, 0.0)
        return masked + jnp.log(x - x)  # logarithm

    found = bisect_linearization(logarithm, X)
    assert (found.kind, found.equation) == ("value", "log")
    assert names_line(found, logarithm, "# logarithm")


def test_where_it_arises_inside_loops_and_rules():
    def body(carry, row):
        carry = carry + jnp.log(row)  # in the loop
        return carry, None

    rows = array([1.0, 2.0, 0.0, 3.0])
    found = bisect_linearization(lambda xs: jax.lax.scan(body, jnp.zeros((), F), xs)[0], rows)
    assert (found.kind, found.equation) == ("value", "log")
    assert names_line(found, body, "# in the loop")
    assert found.place.endswith(", turn 2 of a scan")

    @jax.custom_jvp
    def ruled(x):
        return 1.0 + jnp.log(x)  # in the rule

    ruled.defjvp(lambda p, t: (ruled(*p), t[0] / p[0]))
    found = bisect_linearization(lambda x: ruled(x - x) * x, X)
    assert (found.kind, found.equation) == ("value", "log")
    assert names_line(found, ruled.__wrapped__, "# in the rule")


def test_an_argument_that_is_not_finite():
    found = bisect_linearization(lambda tree: tree["a"] * 2.0, {"a": array([1.0, np.nan]), "b": array([np.inf])})
    assert (found.kind, found.equation, found.place) == ("value", "no equation", "primals[0]['a']")


def test_infinity_that_does_no_harm_is_no_finding():
    def attention(x):
        scores = jnp.where(jnp.arange(3) < 2, x, -jnp.inf)
        return jax.nn.softmax(scores)

    assert bisect_linearization(attention, X)


# no false alarms ------------------------------------------------------------------------------------------------------
CLEAN = [
    *("dense_tall", "scalar", "python_float", "empty_input", "empty_output", "nested_tree", "custom_node"),
    *("integer_leaves", "prng_key", "not_holomorphic", "complex_to_real", "real_to_complex", "mixed_floats", "aux"),
    *("scan", "cond_false", "while_loop", "custom_vmap", "nested_jit", "argnums_pair", "static_arguments"),
    *("callable_leaf", "partly_constant", "linear_solve", "inner_vmap"),
]


@pytest.mark.parametrize("name", CLEAN)
def test_scenarios_are_clean(name):
    scenario = BY_NAME[name]
    found = bisect_linearization(scenario.fun, *scenario.primals, **scenario.options)
    assert found, found


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_scenarios_with_wrong_rules_are_not(name):
    scenario = BY_NAME[name]
    found = bisect_linearization(scenario.fun, *scenario.primals)
    assert found.kind == "rule"
    assert name in found.equation


@pytest.mark.parametrize(
    "fun,x",
    [
        (jnp.abs, [0.0, 1.0]),
        (jax.nn.relu, [0.0, -1.0, 2.0]),
        (lambda x: jnp.maximum(x, jnp.flip(x)), [1.0, 1.0, 2.0]),
        (jnp.sort, [2.0, 1.0, 2.0]),
        (jnp.max, [3.0, 3.0, 1.0]),
        (lambda x: jnp.clip(x, 0.0, 1.0), [0.0, 1.0, 0.5]),
        (jnp.round, [0.2, 1.5, 2.7]),
        (lambda x: jnp.floor(x) * x, [1.0, 2.5]),
        (lambda x: x % 1.0, [0.5, 2.25]),
        (jax.lax.stop_gradient, [1.0, 2.0]),
        (jnp.sqrt, [1e-6, 1.0, 1e6]),
        (lambda x: jnp.log(x) * jnp.exp(-x), [1e-8, 1.0, 30.0]),
        (lambda x: jnp.arctan2(x, jnp.flip(x)), [1.0, -2.0]),
        (lambda x: jax.nn.logsumexp(1e3 * x), [1.0, -2.0]),
        (lambda x: jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(2, dtype=F)), [1.0, -2.0]),
        (lambda x: jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(3, dtype=F), upper=True), [1.0, -2.0, 0.5]),
        (lambda x: jax.scipy.linalg.expm(jnp.outer(x, x)), [1.0, -0.5]),
        (lambda x: jax.random.gamma(jax.random.key(0), jnp.exp(x), dtype=F), [1.0, -2.0]),
        (lambda x: jnp.linalg.eigh(jnp.outer(x, x) + jnp.diag(x)), [1.0, -2.0]),
        (lambda x: jnp.fft.rfft(x), [1.0, -2.0, 3.0]),
        (lambda x: jnp.cumsum(x).at[0].set(x[1]), [1.0, -2.0, 3.0]),
        (lambda x: jnp.prod(x), [0.0, 2.0, 3.0]),
    ],
    ids=lambda value: "",
)
def test_kinks_and_common_operations_raise_no_alarm(fun, x):
    found = bisect_linearization(fun, array(x))
    assert found, found


def test_a_rule_outside_the_slopes_of_a_kink_is_found():
    @jax.custom_jvp
    def size(x):
        return jnp.abs(x)

    size.defjvp(lambda p, t: (size(*p), jnp.where(p[0] == 0, 2.0, jnp.sign(p[0])).astype(F) * t[0]))
    found = bisect_linearization(lambda x: size(x) * 3.0, array([0.0, 1.0]))
    assert found.kind == "rule"
    assert "1 of 2 elements" in found.detail


def test_what_is_cast_down_inside_is_skipped_or_compared_coarsely():
    def in_float32(x):
        return jnp.sin(x.astype(jnp.float32)) * 2.0

    assert bisect_linearization(in_float32, X).skipped == ()
    squash = wrong_tanh()
    assert bisect_linearization(lambda x: squash(x.astype(jnp.float32)), X).kind == "rule"
    found = bisect_linearization(lambda x: jnp.sin(x.astype(jnp.bfloat16)), X)
    assert found
    assert [line.partition(":")[0].split()[0] for line in found.skipped] == ["convert_element_type", "sin"]
    assert found.skipped[1].endswith("its dtype is too short for finite differences")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, C])
def test_dtypes_of_the_primals(dtype):
    x = jnp.asarray(real(4), dtype)
    assert bisect_linearization(lambda x: jnp.sum(jnp.tanh(x) * x), x)
    product = custom(lambda x, y, dx, dy: jnp.cos(x) * y * dx + 2 * jnp.sin(x) * dy)
    found = bisect_linearization(lambda x: product(x, x * x), x)
    assert (found.kind, found.equation) == ("rule", "custom_jvp_call of product")


# options --------------------------------------------------------------------------------------------------------------
def test_argnums_has_aux_key_and_tolerances():
    product = custom(lambda x, y, dx, dy: jnp.cos(x) * y * dx)
    assert bisect_linearization(product, X, X, argnums=0)
    assert not bisect_linearization(product, X, X, argnums=(1,))
    assert not bisect_linearization(product, X, X, key=jax.random.key(3))
    assert not bisect_linearization(lambda x, y: (product(x, y), jnp.log(x)), X, X, has_aux=True)
    assert bisect_linearization(lambda x: (x * x, jnp.log(x)), X, has_aux=True)
    near = custom(lambda x, y, dx, dy: 1.001 * (jnp.cos(x) * y * dx + jnp.sin(x) * dy))
    assert not bisect_linearization(near, X, X)
    assert bisect_linearization(near, X, X, rtol=1e-2)
    assert bisect_linearization(near, X, X, atol=1.0)


def test_fun_is_traced_twice_and_not_called():
    calls = []

    def fun(x):
        calls.append(isinstance(x, jax.core.Tracer))
        return jnp.sin(x)

    assert bisect_linearization(fun, X)
    assert calls == [True, True]


def test_long_loops_stay_one_equation(monkeypatch):
    from linjac import _tape

    monkeypatch.setattr(_tape, "LIMIT", 50)
    long_scan = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=100)[0]
    found = bisect_linearization(long_scan, X)
    assert found
    assert found.checked == 1
    long_while = lambda x: jax.lax.while_loop(lambda s: s[0] < 100, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]
    assert bisect_linearization(long_while, X).checked == 1


def test_refusals():
    def message(kind, *args, **kwargs):
        with pytest.raises(kind) as caught:
            bisect_linearization(*args, **kwargs)
        return str(caught.value)

    who = "linjac.testing.bisect_linearization: "
    assert message(TypeError, 3, X) == who + "fun must be callable, got int"
    assert message(ValueError, jnp.sin, X, argnums=2) == who + "argnums=2 is out of range for 1 positional argument"
    assert message(TypeError, jnp.sin, X, key=3).startswith(who + "key must be a PRNG key, got")
    assert (
        message(ValueError, jnp.sin, X, rtol=-1.0)
        == who + "rtol must be a non-negative finite number or None (from the dtype), got -1.0"
    )
    assert message(TypeError, lambda x: x if x[0] > 0 else -x, X) == (
        who + "fun branches in Python on the value of an array (TracerBoolConversionError): it has no one program\n"
        "use jax.lax.cond, jax.lax.while_loop or jnp.where"
    )
    with pytest.raises(TypeError) as caught:
        jax.jit(lambda x: bool(bisect_linearization(jnp.sin, x)))(X)
    assert str(caught.value) == (
        who + "it compares values, which are not known inside a trace\ncall it outside jax.jit, jax.vmap and jax.grad"
    )


def test_names_are_public():
    assert {"Bisection", "bisect_linearization"} <= set(testing.__all__)
    assert Bisection.__module__ == bisect_linearization.__module__ == "linjac.testing"


@pytest.mark.parametrize(
    ("fun", "x"),
    [
        (lambda x: x**2, jnp.array([50.0, 20.0], jnp.float16)),
        (lambda x: x**4, jnp.array([1e8, 2e8], jnp.float32)),
        (lambda x: jnp.sum(x * jnp.sin(x)), jnp.array([1e4, 2.0], jnp.float16)),
    ],
    ids=["square", "fourth power", "sum"],
)
def test_a_large_finite_derivative_is_not_accused_of_overflow(fun, x):
    found = bisect_linearization(fun, x)
    assert found.kind is None, found

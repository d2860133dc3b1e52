"""`check_linearization`: planted faults are caught where they are, right functions pass, skips say why."""

import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from linjac import testing
from scenarios import BY_NAME, FULL, F

KEY = jax.random.key(0)
X = jnp.asarray([0.3, -0.7, 1.1], F)


def check(fun, *primals, key=KEY, directions=1, **options):
    return testing.check_linearization(fun, *primals, key=key, directions=directions, **options)


def found(report, stage, name=""):
    """The one criterion of a stage whose name contains a word."""
    (criterion,) = [c for c in report.criteria if c.stage == stage and name in c.name]
    return criterion


def leaves(criterion):
    return {(d.output, d.input) for d in criterion.differences}


def order_of(criterion):
    """The order of the Taylor remainder that a criterion reports."""
    return float(re.match(r"order of the remainder ([\d.]+), 2 where right", criterion.detail)[1])


# right functions ------------------------------------------------------------------------------------------------------
def loss(params, x):
    y = jnp.tanh(params["w"] * x)
    return {"loss": jnp.sum(y), "y": y}


def test_right_function_passes_every_criterion():
    report = check(loss, {"w": X, "n": 3}, X, directions=2)
    assert report, str(report)
    assert report.where is None
    expected = {
        "keys": "fun uses no typed PRNG key (jax.random.key)",
        "other backend": "the default backend is the CPU",
    }
    if FULL:
        expected["precision"] = "the products are in float64"
    if jax.default_backend() == "cpu":
        assert {c.stage: c.detail for c in report.skipped} == expected
    assert order_of(found(report, "finite differences")) == pytest.approx(2, abs=0.1)
    assert found(report, "products", "jvp").detail == "4 directions"
    assert report.raise_if_failed() is None


def test_report_is_deterministic_and_plain():
    first, second = (check(loss, {"w": X}, X).to_dict() for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first))["passed"] is True
    assert first["title"].startswith("check_linearization(loss: f")
    assert first["environment"]["jax"] == jax.__version__


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("nested_tree", 1),
        ("integer_leaves", 3),
        ("not_holomorphic", 4),
        ("mixed_floats", 5),
        ("aux", 6),
        ("empty_input", 7),
    ],
)
def test_no_false_alarm(name, seed):
    scenario = BY_NAME[name]
    report = check(scenario.fun, *scenario.primals, key=jax.random.key(seed), **scenario.options)
    assert report, str(report)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_false_alarm_in_a_short_dtype(dtype):
    with jax.numpy_dtype_promotion("standard"):
        report = check(lambda x: jnp.tanh(x * jnp.sum(x * x)) / x, X.astype(dtype), directions=2)
    assert report, str(report)
    assert report.tolerances.startswith(f"from {'f32' if dtype == jnp.float32 else 'bf16'}, the coarsest")
    assert found(report, "precision").outcome == "passed"


def test_linear_function_says_so():
    report = check(lambda x: 3.0 * x, X, key=jax.random.PRNGKey(3))  # a raw key is taken too
    assert found(report, "finite differences").detail.startswith("linear up to roundoff")


# what is skipped ------------------------------------------------------------------------------------------------------
def test_custom_vjp_is_compared_with_the_transpose_of_its_pullback():
    scenario = BY_NAME["custom_vjp"]
    report = check(scenario.fun, *scenario.primals)
    assert "against the transpose of jax.vjp: jax.jvp is impossible" in found(report, "products", "jvp").detail
    assert {c.stage for c in report.failed} == {"finite differences"}  # a straight-through rule is not the derivative


def test_no_reverse_direction_is_skipped():
    scenario = BY_NAME["while_loop"]
    report = check(scenario.fun, *scenario.primals)
    assert report, str(report)
    assert "fun has no reverse direction" in found(report, "other mode").detail
    assert found(report, "products", "jvp").outcome == "passed"


def test_value_dependent_branches_run_op_by_op_without_a_warning():
    report = check(lambda x: jnp.sin(x) if x[0] > 0 else x, X)
    assert report, str(report)
    assert "fun cannot be traced" in found(report, "jit", "linearized inside").detail
    assert found(report, "finite differences").outcome == "passed"


def test_function_that_casts_down_has_no_finite_differences():
    with jax.numpy_dtype_promotion("standard"):
        report = check(lambda x: jnp.sin(x.astype(jnp.float16)), X)
    assert report, str(report)
    detail = found(report, "finite differences").detail
    assert detail.startswith("fun itself casts down: convert_element_type to f16 at ")
    assert "test_check_linearization.py" in detail
    assert report.tolerances == "from f16, the coarsest of the leaves"


def test_kinks_are_left_out_and_the_rest_is_judged():
    report = check(lambda x: jnp.maximum(x, 0.0) * 2.0, X.at[1].set(0.0))
    assert report, str(report)
    assert "1 of 3 outputs have no derivative along the step" in found(report, "finite differences").detail
    nowhere = check(jnp.abs, jnp.zeros(3, F))
    assert found(nowhere, "finite differences").outcome == "skipped"


def test_wrong_rule_beside_a_kink_still_fails():
    @jax.custom_jvp
    def wrong(x):
        return jnp.abs(x)

    wrong.defjvp(lambda p, t: (wrong(*p), 1.5 * jnp.sign(p[0]) * t[0]))
    report = check(wrong, X.at[1].set(0.0))
    assert report.where == "finite differences"
    assert found(report, "finite differences").differences[0].index in ((0,), (2,))


# planted faults -------------------------------------------------------------------------------------------------------
def ruled(rule):
    """sin(x) y with a custom rule."""

    @jax.custom_jvp
    def fun(x, y):
        return jnp.sin(x) * y

    fun.defjvp(lambda p, t: (fun(*p), rule(*p, *t)))
    return lambda d: {"value": fun(d["x"], d["y"])}


POINT = {"x": X, "y": X + 2}


def test_rule_off_by_a_factor():
    report = check(ruled(lambda x, y, dx, dy: 1.01 * jnp.cos(x) * y * dx + jnp.sin(x) * dy), POINT)
    assert report.where == "finite differences"
    criterion = found(report, "finite differences")
    assert leaves(criterion) == {("output['value']", "primals[0]['x']")}
    assert order_of(criterion) == pytest.approx(1, abs=0.1)
    assert criterion.differences[0].error > criterion.differences[0].allowed


def test_rule_with_the_wrong_sign_in_one_leaf():
    report = check(ruled(lambda x, y, dx, dy: jnp.cos(x) * y * dx - jnp.sin(x) * dy), POINT)
    assert report.where == "finite differences"
    assert leaves(found(report, "finite differences")) == {("output['value']", "primals[0]['y']")}
    assert [c.stage for c in report.failed] == ["finite differences"]


def test_affine_rule():
    report = check(ruled(lambda x, y, dx, dy: jnp.cos(x) * y * dx + jnp.sin(x) * dy + 1e-3), POINT)
    assert report.where == "linearity"
    assert found(report, "linearity").detail.startswith("broken: L(0) = 0")
    assert {d.output for d in found(report, "linearity").differences} == {"output['value']"}


def test_rule_that_is_not_linear():
    report = check(ruled(lambda x, y, dx, dy: jnp.cos(x) * y * dx + jnp.sin(x) * jnp.abs(dy)), POINT)
    assert report.where == "linearity"
    criterion = found(report, "linearity")
    assert criterion.detail.startswith("broken: L(-v) = -L(v)")
    assert ("output['value']", "primals[0]['y']") in leaves(criterion)
    assert ("output['value']", "primals[0]['x']") not in leaves(criterion)


def test_stale_closure_is_seen_in_the_value():
    state = types.SimpleNamespace(scale=2.0)  # an attribute of an object: no guard sees it

    def fun(x):
        return {"a": jnp.sin(x), "b": x * state.scale}

    linjac.linearize_many(fun, X)
    state.scale = 3.0
    report = check(fun, X)
    assert report.where == "value"
    assert leaves(found(report, "value")) == {("output['b']", None)}


def test_kept_linearization_that_is_stale():
    state = types.SimpleNamespace(scale=2.0)

    def fun(d):
        return d["x"] * state.scale + jnp.sin(d["y"])

    _, kept = linjac.linearize_many(fun, POINT, jit=False)
    state.scale = 3.0
    report = check(fun, POINT, linear_fn=kept, directions=2)
    assert report.where == "products"
    assert leaves(found(report, "products", "jvp")) == {("output", "primals[0]['x']")}


def test_kept_linearization_at_another_point():
    _, kept = linjac.linearize_many(jnp.sin, X)
    report = check(jnp.sin, X + 1, linear_fn=kept)
    assert report.where == "value"
    assert "PointError" in found(report, "value", "is at these primals").detail


def test_another_tree_than_before():
    state = types.SimpleNamespace(extra=False)

    def fun(x):
        return {"a": x, "b": jnp.sin(x)} if state.extra else {"a": x}

    linjac.linearize_many(fun, X)
    state.extra = True
    report = check(fun, X)
    assert report.where == "structure"
    assert found(report, "structure").detail == "output['b']: missing"
    assert all(c.outcome == "skipped" and c.detail == "the trees differ" for c in report.criteria[1:])


def test_another_shape_than_before():
    state = types.SimpleNamespace(count=2)

    def fun(x):
        return {"a": x[: state.count] ** 2}

    linjac.linearize_many(fun, X)
    state.count = 3
    report = check(fun, X)
    assert report.where == "shapes and dtypes"
    assert leaves(found(report, "shapes and dtypes")) >= {("output['a']", None)}


def test_nan_at_a_masked_branch_in_reverse():
    report = check(lambda d: jnp.where(d["x"] > 0, jnp.sqrt(d["x"]), 0.0), {"x": X.at[1].set(0.0)})
    assert report.where == "finite values"
    assert found(report, "finite values", "J v").outcome == "passed"
    criterion = found(report, "finite values", "Jᵀ c")
    assert criterion.differences[0].input == "primals[0]['x']"
    assert criterion.differences[0].index == (1,)


def test_accumulation_in_float32():
    def fun(d):
        add = lambda total, _: (total + d["x"] * jnp.asarray(0.1, d["x"].dtype), None)
        return {"sum": jax.lax.scan(add, d["x"], None, length=10_000)[0], "same": d["y"]}

    point = {"x": jnp.ones((), jnp.float32), "y": jnp.ones((), jnp.float32)}
    report = check(fun, point)
    assert report.where == "precision"
    assert leaves(found(report, "precision")) == {("output['sum']", "primals[0]['x']")}
    assert found(report, "finite differences").outcome == "passed"


def test_dropped_chunk(monkeypatch):
    from linjac import _directions

    whole = _directions.balanced

    def dropping(count, limit):
        chunks, size = whole(count, limit)
        return (chunks - 1 if chunks > 2 else chunks), size

    monkeypatch.setattr(_directions, "balanced", dropping)
    report = check(lambda x: jnp.sin(x) * 2.0, X)
    assert report.where == "chunked"
    criterion = found(report, "chunked", "linear_fn.many")
    assert criterion.detail == "directions 6 of 7 with chunk_size=1; directions 6 of 7 with chunk_size=3"
    assert leaves(criterion) == {("output", None)}


def test_key_used_twice():
    key = jax.random.key(3)

    def fun(x):
        return x * jax.random.normal(key, (3,), F) + jax.random.normal(key, (3,), F)

    report = check(fun, X)
    assert report.where == "keys"
    assert "already consumed" in found(report, "keys").detail
    assert not jax.config.jax_debug_key_reuse
    with jax.debug_key_reuse(True):
        jax.random.normal(key)  # the check has not used it up


def test_key_used_once():
    scenario = BY_NAME["prng_key"]
    assert found(check(scenario.fun, *scenario.primals), "keys").outcome == "passed"


def test_value_that_is_not_finite():
    report = check(lambda x: {"log": jnp.log(jnp.abs(x)), "x": x}, X.at[2].set(0.0))
    assert report.where == "finite values"
    assert found(report, "finite values", "J v").differences[0].output == "output['log']"
    assert found(report, "finite values", "J v").differences[0].index == (2,)


# options --------------------------------------------------------------------------------------------------------------
def test_argnums_and_aux_name_the_callers_positions():
    def fun(a, b, c):
        return slightly_wrong(c) * b.sum() + a, {"aux": b}

    report = check(fun, X, X, X, argnums=(-1, 0), has_aux=True)
    assert leaves(found(report, "finite differences")) == {("output", "primals[2]")}


def test_elements_of_very_different_sizes_are_reached():
    @jax.custom_jvp
    def wrong(x):
        return jnp.log(x)

    wrong.defjvp(lambda p, t: (wrong(*p), 1.01 * t[0] / p[0]))
    assert check(wrong, jnp.exp(10 * X)).where == "finite differences"


@jax.custom_jvp
def slightly_wrong(x):
    return jnp.sin(x)


slightly_wrong.defjvp(lambda p, t: (slightly_wrong(*p), 1.001 * jnp.cos(p[0]) * t[0]))


def test_given_tolerances_count():
    assert not check(slightly_wrong, X)
    report = check(slightly_wrong, X, rtol=1e-2, atol=1e-8)
    assert report, str(report)
    assert (report.rtol, report.atol, report.tolerances) == (1e-2, 1e-8, "given")


def test_failed_report_raises_with_its_text():
    report = check(slightly_wrong, X)
    assert not report
    with pytest.raises(testing.VerificationError) as caught:
        report.raise_if_failed()
    text = str(caught.value)
    head = text.splitlines()[0]
    assert head.startswith("linjac.testing.check_linearization(slightly_wrong: ")
    assert "FAILED, first at finite differences (" in head
    assert "output with respect to primals[0] at [" in text
    assert "tolerances: rtol=" in text
    assert f"JAX {jax.__version__}" in text


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"key": 3}, TypeError, "key must be a PRNG key, got i"),
        ({"key": jnp.zeros(2)}, TypeError, "key must be a PRNG key, got f"),
        ({"directions": 0}, ValueError, "directions must be a positive int or None (8), got 0"),
        ({"directions": None}, TypeError, "directions must be a positive int, got None"),
        ({"directions": True}, TypeError, "directions must be a positive int or None (8), got True"),
        ({"rtol": -1.0}, ValueError, "rtol must be a non-negative finite number or None (from the dtype), got -1.0"),
        ({"atol": "x"}, TypeError, "atol must be a non-negative finite number or None (from the dtype), got str"),
        ({"linear_fn": jnp.sin}, TypeError, "linear_fn must be a linjac.Linearization or None, got "),
        ({"argnums": 4}, ValueError, "argnums=4 is out of range for 1 positional argument"),
        ({"has_aux": 1}, TypeError, "has_aux must be True or False, got int"),
    ],
)
def test_refusals(options, kind, text):
    with pytest.raises(kind) as caught:
        check(jnp.sin, X, **options)
    assert str(caught.value).startswith(f"linjac.testing.check_linearization: {text}")


def test_refused_inside_a_trace():
    with pytest.raises(TypeError, match=r"^linjac\.testing\.check_linearization: a check compares values"):
        jax.jit(lambda x: np.float32(bool(check(jnp.sin, x))))(X)


def test_random_numbers_of_the_default_dtype_are_not_compared_with_those_of_float64():
    """Drawn in float64 they are other numbers, so the function is another one there."""

    def fun(x, key):
        return x * jax.random.normal(key, x.shape)

    with jax.enable_x64(False):
        x = jnp.arange(1.0, 4.0, dtype=jnp.float32)
        report = testing.check_linearization(fun, x, jax.random.key(3), argnums=0, key=KEY, directions=2)
    assert report
    why = "fun draws other random numbers in float64: give the functions of jax.random a dtype"
    assert [c.stage for c in report.skipped if c.detail == why] == ["precision", "finite differences"]


def test_a_function_of_python_floats_may_return_one():
    assert testing.check_linearization(lambda s: s**2, 2.0, key=KEY, directions=2)
    assert testing.check_jacobian(lambda s: s**2, 2.0)


def test_a_gamma_distribution_has_no_differences():
    """Its rule is the derivative of the distribution at the quantile of the draw, not of one draw."""

    def fun(a):
        return jax.random.gamma(jax.random.key(3), jnp.abs(a) + 1.5, dtype=F)

    report = check(fun, X)
    assert report, str(report)
    assert "finite differences" in {c.stage for c in report.skipped}
    assert "gamma" in found(report, "finite differences").detail


STAIRS = {
    "1e2": lambda x: jnp.round(x * 1e2) / 1e2 + x,
    "1e4": lambda x: jnp.round(x * 1e4) / 1e4 + x,
    "1e6": lambda x: jnp.round(x * 1e6) / 1e6 + jnp.sin(x),
    "floor": lambda x: jnp.floor(x * 1e3) * x,
}


@pytest.mark.parametrize("name", STAIRS)
def test_a_function_of_small_stairs_raises_no_alarm(name):
    point = jnp.asarray([0.3123, 1.7001, -0.42], F)
    assert check(STAIRS[name], point), name
    assert testing.bisect_linearization(STAIRS[name], point), name


@pytest.mark.parametrize("stairs", [1e3, 1e6])
def test_a_wrong_rule_on_small_stairs_still_fails(stairs):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda p, t: (sine(*p), (jnp.cos(p[0]) * t[0] * 1.01).astype(F)))
    report = check(lambda x: jnp.round(x * stairs) / stairs + sine(x), X)
    assert report.where == "finite differences"


CANCELLING = {
    "square": lambda x: (1e4 + x) ** 2 - 1e8,
    "product": lambda x: (1e3 + x) * (1e3 - x) - 1e6,
    "sum": lambda x: jnp.sum(x * 1e4) - jnp.sum(x) * 1e4 + x,
    "variance": lambda x: jnp.mean((x + 1e3) ** 2) - jnp.mean(x + 1e3) ** 2 + x[0],
}


@pytest.mark.parametrize("name", CANCELLING)
def test_roundings_inside_are_no_fault_of_a_product(name):
    """Compiled code rounds elsewhere than code that runs op by op: only `precision` may say that digits are lost."""
    report = check(CANCELLING[name], jnp.asarray([0.3123, 1.7, -0.42], jnp.float32), directions=4)
    assert {c.stage for c in report.failed} <= {"precision"}, str(report)
    report = testing.check_jacobian(CANCELLING[name], jnp.asarray([0.3123, 1.7, -0.42], jnp.float32))
    assert {c.stage for c in report.failed} <= {"precision"}, str(report)


def test_checks_of_functions_made_in_a_loop_do_not_warn():
    for scale in range(6):
        fun = lambda x: jnp.sin(x) * scale
        assert testing.check_jacobian(fun, X)
        assert testing.check_linearization(fun, X, key=KEY, directions=1)
        linjac.measure_jacobian(fun, rounds=1, seconds=1e-9)(X)
    linjac.jacobian(fun)(X)


def test_random_numbers_that_do_not_move_excuse_nothing():
    square = jax.custom_jvp(lambda x: x**2)
    square.defjvp(lambda p, t: (square(*p), (2.02 * p[0] * t[0]).astype(F)))

    def fun(x):
        return square(x) * jax.random.gamma(jax.random.key(1), 2.0, x.shape, dtype=F)

    assert check(fun, X).where == "finite differences"


def test_what_cannot_be_mapped_is_skipped():
    fun = lambda x: jax.custom_derivatives.linear_call(lambda _, v: 2 * v, lambda _, c: 2 * c, (), x)
    report = check(fun, X)
    assert report, str(report)
    assert {"vmap", "chunked"} <= {c.stage for c in report.skipped}

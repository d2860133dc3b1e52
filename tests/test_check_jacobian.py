"""`check_jacobian`: planted faults are caught where they are, and right Jacobians pass in every mode."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import linjac
from dense import settings_of
from linjac import testing
from linjac.testing import check_jacobian
from scenarios import BY_NAME, FULL, SHORT, C, F

X = jnp.asarray([0.3, -0.7, 1.1], F)
W = jnp.asarray(np.arange(6.0).reshape(2, 3) / 5, F)
POINT = {"b": X, "w": W}


def model(p):
    return {"loss": jnp.sum(jnp.tanh(p["w"] @ p["b"])), "y": p["w"] ** 2 * p["b"][None, :]}


def found(report, stage, name=""):
    """The one criterion of a stage whose name contains a word."""
    (criterion,) = [c for c in report.criteria if c.stage == stage and name in c.name]
    return criterion


def leaves(criterion):
    return {(d.output, d.input) for d in criterion.differences}


def replaced(tree, output, name, change):
    """A copy of a Jacobian with one block changed."""
    return {**tree, output: {**tree[output], name: change(tree[output][name])}}


# right Jacobians ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["auto", "rev"])
def test_right_function_passes(mode):
    report = check_jacobian(model, POINT, mode=mode)
    assert report, str(report)
    skipped = {"linearity", "keys", "other backend"} | ({"precision"} if FULL else set())
    if jax.default_backend() == "cpu":
        assert {c.stage for c in report.skipped} == skipped
    first = {"auto": "mode='fwd' against mode='rev'", "rev": "mode='rev' against mode='fwd'"}[mode]
    assert found(report, "other mode").detail == first
    assert f"mode={mode!r}" in report.title


@pytest.mark.parametrize(
    "name", ["holomorphic", "complex_to_real", "real_to_complex", "argnums_pair", "mixed_floats", "aux", "empty_output"]
)
def test_no_false_alarm(name):
    scenario = BY_NAME[name]
    report = check_jacobian(scenario.fun, *scenario.primals, **settings_of(scenario))
    assert report, str(report)


def test_own_jacobian_as_tree_matrix_or_function():
    mine = jax.jacfwd(model)(POINT)
    assert check_jacobian(model, POINT, jacobian=mine)
    assert check_jacobian(model, POINT, jacobian=jax.jacrev(model))
    matrix = linjac.jacobian(model, layout="matrix")(POINT)
    assert check_jacobian(model, POINT, jacobian=np.asarray(matrix))


def test_impossible_modes_are_named():
    report = check_jacobian(*_custom_vjp())
    assert {c.stage for c in report.failed} == {"finite differences"}  # a straight-through rule is not the derivative
    scenario = BY_NAME["while_loop"]
    report = check_jacobian(scenario.fun, *scenario.primals)
    assert report, str(report)
    assert found(report, "other mode").detail.startswith("mode='rev' is impossible: ")
    assert "while_loop" in found(report, "other mode").detail


def _custom_vjp():
    scenario = BY_NAME["custom_vjp"]
    return scenario.fun, *scenario.primals


# orientation ----------------------------------------------------------------------------------------------------------
def test_transposed_block_is_recognized_by_its_shape():
    mine = replaced(jax.jacfwd(model)(POINT), "y", "b", lambda block: jnp.moveaxis(block, -1, 0))
    report = check_jacobian(model, POINT, jacobian=mine)
    assert report.where == "shapes and dtypes"
    criterion = found(report, "shapes and dtypes")
    assert criterion.detail == (
        "this is the transpose: rows are outputs, columns are inputs: output['y'] with respect to args[0]['b']: "
        f"expected {SHORT}[2,3,3], got {SHORT}[3,2,3]"
    )
    assert leaves(criterion) == {("output['y']", "args[0]['b']")}


def test_transposed_square_jacobian_is_recognized_by_its_values():
    square = jnp.asarray(np.arange(9.0).reshape(3, 3) / 7, F)
    fun = lambda x: jnp.sin(square @ x)
    report = check_jacobian(fun, X, jacobian=jax.jacfwd(fun)(X).T)
    assert report.where == "products"
    criterion = found(report, "products", "block by block")
    assert criterion.detail == "this is the transpose: rows are outputs, columns are inputs"
    assert leaves(criterion) == {("output", "args[0]")}


def test_transposed_matrix_and_transposed_tree():
    matrix = linjac.jacobian(model, layout="matrix")(POINT)
    report = check_jacobian(model, POINT, jacobian=matrix.T)
    assert report.where == "shapes and dtypes"
    assert found(report, "shapes and dtypes").detail == (
        "this is the transpose: rows are outputs, columns are inputs: expected (7, 9), got (9, 7)"
    )
    mine = jax.jacfwd(model)(POINT)
    turned = {name: {out: mine[out][name] for out in mine} for name in POINT}
    report = check_jacobian(model, POINT, jacobian=turned)
    assert report.where == "structure"
    assert found(report, "structure").detail == (
        "this is the transpose: rows are outputs, columns are inputs (inputs are outside, outputs inside)"
    )


def test_missing_block():
    mine = jax.jacfwd(model)(POINT)
    report = check_jacobian(model, POINT, jacobian={**mine, "loss": {"b": mine["loss"]["b"]}})
    assert report.where == "structure"
    assert found(report, "structure").detail == "jacobian['loss']['w']: missing"


# planted faults -------------------------------------------------------------------------------------------------------
def test_one_wrong_element_of_an_own_jacobian():
    mine = replaced(jax.jacfwd(model)(POINT), "loss", "w", lambda block: block.at[1, 2].multiply(1.1))
    report = check_jacobian(model, POINT, jacobian=mine)
    assert report.where == "products"
    criterion = found(report, "products", "block by block")
    assert leaves(criterion) == {("output['loss']", "args[0]['w']")}
    assert criterion.differences[0].index == (1, 2)


def test_shorter_dtype_of_an_own_jacobian():
    mine = replaced(jax.jacfwd(model)(POINT), "y", "b", lambda block: block.astype(jnp.float16))
    report = check_jacobian(model, POINT, jacobian=mine)
    assert report.where == "shapes and dtypes"
    assert leaves(found(report, "shapes and dtypes")) == {("output['y']", "args[0]['b']")}


def test_rule_off_by_a_factor():
    @jax.custom_jvp
    def off(x):
        return jnp.sin(x)

    off.defjvp(lambda p, t: (off(*p), 1.01 * jnp.cos(p[0]) * t[0]))
    report = check_jacobian(lambda p: {"a": off(p["x"]) * p["y"], "b": p["y"]}, {"x": X, "y": X})
    assert report.where == "finite differences"
    assert leaves(found(report, "finite differences")) == {("output['a']", "args[0]['x']")}
    order = re.match(r"order of the remainder ([\d.]+), 2 where right", found(report, "finite differences").detail)
    assert float(order[1]) == pytest.approx(1, abs=0.1)


def test_stale_closure():
    state = types.SimpleNamespace(scale=2.0)

    def fun(x):
        return jnp.sin(x) * state.scale

    linjac.jacobian(fun)(X)
    state.scale = 3.0
    report = check_jacobian(fun, X)
    assert report.where == "value"
    assert leaves(found(report, "value")) == {("output", None)}


def test_nan_in_reverse_at_a_masked_branch():
    fun = lambda d: {"root": jnp.where(d["x"] > 0, jnp.sqrt(d["x"]), 0.0)}
    report = check_jacobian(fun, {"x": X.at[1].set(0.0)})
    assert report.where == "finite values"
    assert found(report, "finite values", "fwd").outcome == "passed"
    criterion = found(report, "finite values", "rev")
    assert leaves(criterion) == {("output['root']", "args[0]['x']")}
    assert criterion.differences[0].index[1] == 1
    assert found(report, "other mode").outcome == "failed"


@pytest.mark.parametrize("lie", [lambda z: jnp.conj(z) * (1 + 2j), lambda z: (jnp.abs(z) + 0j) * z])
def test_function_that_lies_about_being_holomorphic(lie):
    z = jnp.asarray(np.asarray(X) * (1 + 0.5j), C)
    fun = lambda p: {"lie": lie(p["z"]), "true": p["y"] ** 2}
    with jax.numpy_dtype_promotion("standard"):
        report = check_jacobian(fun, {"y": z, "z": z}, holomorphic=True)
    assert report.where == "linearity"
    criterion = found(report, "linearity")
    assert criterion.name == "J(iv) = i J v"
    assert leaves(criterion) == {("output['lie']", "args[0]['z']")}
    assert "not holomorphic" in found(report, "products", "jvp").detail


def test_dropped_chunk(monkeypatch):
    from linjac import _directions

    whole = _directions.balanced

    def dropping(count, limit):
        chunks, size = whole(count, limit)
        return (chunks - 1 if limit == 1 else chunks), size

    from linjac import _sweeps

    monkeypatch.setattr(_directions, "balanced", dropping)
    if hasattr(_sweeps, "balanced"):
        monkeypatch.setattr(_sweeps, "balanced", dropping)
    report = check_jacobian(lambda x: jnp.sin(x) * 2.0, X)
    assert report.where == "chunked"
    assert found(report, "chunked").detail == "chunk_size=1"
    assert found(report, "chunked").differences[0].index == (2, 2)


def test_key_used_twice():
    key = jax.random.key(3)
    fun = lambda x: x * jax.random.normal(key, (3,), F) + jax.random.normal(key, (3,), F)
    report = check_jacobian(fun, X)
    assert report.where == "keys"


# options --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mode": "both"}, ValueError, "mode must be one of 'auto', 'fwd', 'rev', got 'both'"),
        ({"argnums": None}, TypeError, "argnums must be an int or a sequence of ints, got None"),
        ({"holomorphic": 1}, TypeError, "holomorphic must be True or False, got int"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be a positive int or None (chosen from memory_budget), got 0"),
        ({"rtol": True}, TypeError, "rtol must be a non-negative finite number or None (from the dtype), got bool"),
        (
            {"atol": float("inf")},
            ValueError,
            "atol must be a non-negative finite number or None (from the dtype), got inf",
        ),
    ],
)
def test_refusals(options, kind, text):
    with pytest.raises(kind) as caught:
        check_jacobian(jnp.sin, X, **options)
    assert str(caught.value) == f"linjac.testing.check_jacobian: {text}"


def test_what_jacobian_refuses_is_refused():
    with pytest.raises(TypeError, match="holomorphic=True if it is"):
        check_jacobian(lambda z: jnp.conj(z), X.astype(C))
    with pytest.raises(linjac.ModeError):
        check_jacobian(BY_NAME["while_loop"].fun, *BY_NAME["while_loop"].primals, mode="rev")


@pytest.mark.parametrize("argnums", [0, (0,), (0, 1)])
def test_integer_arguments_have_no_blocks(argnums):
    fun = lambda i, x: i.astype(F) * x
    report = check_jacobian(fun, jnp.array([1, 2]), jnp.asarray([1.0, 2.0], F), argnums=argnums, allow_int=True)
    assert report, str(report)
    ran = {c.stage for c in report.criteria if c.outcome == "passed"}
    assert ("products" in ran) == (argnums == (0, 1))


KINKS = {
    "maximum": lambda x: jnp.maximum(x, 0.1) * jnp.arange(1.0, 4.0, dtype=x.dtype),
    "clip": lambda x: jnp.clip(x, 0.1, 5.0) * jnp.arange(1.0, 4.0, dtype=x.dtype),
    "jump": lambda x: jnp.where(x > 0.1, 2 * x, x),
    "relu, one sum": lambda x: jnp.sum(jax.nn.relu(x - 0.1)),
}


@pytest.mark.parametrize("name", KINKS)
def test_one_element_at_a_kink_excuses_no_other(name):
    """0.1 is on one side in float32 and on the other in float64; one rounding of the point changes the slope there."""
    x = jnp.asarray([0.1, 1.0, 2.0], jnp.float32)
    right = jax.jacrev(KINKS[name])(x)
    with jax.numpy_dtype_promotion("standard"):
        assert check_jacobian(KINKS[name], x)
        for seed in range(4):
            assert testing.check_linearization(KINKS[name], x, key=jax.random.key(seed), directions=1)
        for wrong in (-right, 0 * right, right.at[..., 2].multiply(-1)):
            assert check_jacobian(KINKS[name], x, jacobian=wrong).where == "products"


def test_a_deep_net_in_bfloat16_excuses_no_wrong_jacobian():
    draw = np.random.default_rng(0).standard_normal
    weights = [jnp.asarray(draw((16, 16)) / 3, jnp.bfloat16) for _ in range(8)]

    def net(x):
        for w in weights:
            x = jnp.tanh(w @ x)
        return x

    x = jnp.full(16, 0.3, jnp.bfloat16)
    right = jax.jacfwd(net)(x)
    assert check_jacobian(net, x)
    for wrong in (right * 0.5, 0 * right, -right):
        report = check_jacobian(net, x, jacobian=wrong.astype(jnp.bfloat16))
        assert report.where == "products"
        assert "transpose" not in report.failed[0].detail


def test_a_rule_wrong_in_reverse_beside_a_kink():
    half = Primitive("half_wrong")
    half.def_impl(lambda v: 2 * v)
    half.def_abstract_eval(lambda v: v)
    mlir.register_lowering(half, mlir.lower_fun(lambda v: 2 * v, multiple_results=False))
    batching.defvectorized(half)
    ad.deflinear2(half, lambda ct, v: [half.bind(ct) * 1.5])
    fun = lambda x: half.bind(jnp.maximum(x, 0.1))
    x = jnp.asarray([0.1, 1.0, 2.0], jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(3):
            report = testing.check_linearization(fun, x, key=jax.random.key(seed), directions=2)
            assert "other mode" in {c.stage for c in report.failed}
        assert not check_jacobian(fun, x)

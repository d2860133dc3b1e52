"""Baselines: recorded, checked, refused where they cannot be trusted."""

import json
import os
import pickle
import re
import struct
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from linjac import testing
from linjac.testing import Refused, VerificationError, check_baseline, record_baseline
from scenarios import FULL, SCENARIOS, SHORT, C, F, Layer, Pair, array, real

IDS = [scenario.name for scenario in SCENARIOS]
W = array(real(3, 2, seed=1))
X = array(real(4, 3, seed=2))
PARAMS = {"w": W, "b": array([0.1, -0.2])}


def model(params, x):
    return {"y": jnp.tanh(x @ params["w"] + params["b"][None, :]), "rest": [jnp.sum(x), None]}


CASES = {
    "standard": (PARAMS, X),
    "one example": (PARAMS, X[:1]),
    "zeros": (PARAMS, 0 * X),
    "boundary": (PARAMS, 1e3 * X),
    "wrong shape": Refused((PARAMS, X.T), error=TypeError),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "base.npz"


def both(function):
    return pytest.mark.parametrize("stored", [True, False], ids=["stored", "hashed"])(function)


def message(kind, run, *args, **kwargs):
    with pytest.raises(kind) as caught:
        run(*args, **kwargs)
    return str(caught.value)


# right answers pass ---------------------------------------------------------------------------------------------------
@both
@pytest.mark.parametrize("scenario", SCENARIOS, ids=IDS)
def test_every_scenario_passes(scenario, stored, path):
    foreign = scenario.name in ("nested_tree", "custom_node", "callable_leaf")
    if foreign and stored:
        with pytest.raises(TypeError, match="a file cannot give these inputs back"):
            record_baseline(scenario.fun, {"point": scenario.primals}, path, **scenario.options)
        assert not path.exists()
        return
    cases = {"point": scenario.primals}
    record_baseline(scenario.fun, cases, path, store_inputs=stored, **scenario.options)
    report = check_baseline(scenario.fun, path, cases=None if stored else cases)
    assert report, report
    assert [c.stage for c in report.criteria] == [
        "environment",
        "structure",
        "shapes and dtypes",
        "value",
        "products",
        "products",
    ]
    assert all(c.outcome == "passed" for c in report.criteria)


@both
def test_cases_with_a_refusal(stored, path):
    record_baseline(model, CASES, path, store_inputs=stored)
    renamed = dict(reversed([(f"{name}!", case) for name, case in CASES.items()]))
    report = check_baseline(model, path, cases=None if stored else renamed)
    assert report, report
    assert len(report.criteria) == 1 + 4 * 5 + 1
    assert any(c.name == "case 'wrong shape': is refused with TypeError" for c in report.criteria)
    assert str(report).splitlines()[0] == (
        "linjac.testing.check_baseline(model, 'base.npz'), 5 cases: passed (22 passed, 0 failed, 0 skipped)"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64"])
@both
def test_dtypes_survive_the_file(stored, dtype, path):
    x = jnp.asarray(np.array([0.5, -1.5, 2.0]), dtype)
    cases = {"x": (x, jnp.asarray([1, 2], jnp.int8), jnp.asarray([True, False]))}

    def fun(x, i, b):
        wide = x if dtype.startswith("complex") else x.astype(jnp.float32)
        return (wide * wide).astype(dtype), i + i, b

    record_baseline(fun, cases, path, store_inputs=stored)
    assert check_baseline(fun, path, cases=None if stored else cases)

    def other(x, i, b):
        return (fun(x, i, b)[0], i + i + jnp.asarray([0, 1], jnp.int8), ~b)

    report = check_baseline(other, path, cases=None if stored else cases)
    assert [d.output for d in report.failed[0].differences] == ["output[1]", "output[2]"]
    assert report.where == "value"


def test_every_kind_of_leaf_comes_back(path):
    seen = []

    def fun(tree):
        seen.append({k: v for k, v in tree.items() if isinstance(v, str | int | bool) or v is None})
        noise = jax.random.normal(tree["key"], (2,), F)
        return tree["x"] * tree["scale"] + noise * tree["z"].real

    tree = {
        "x": array([1.0, 2.0]),
        "key": jax.random.key(3),
        "name": "net",
        "flag": True,
        "count": 3,
        "nothing": None,
        "scale": 0.1,
        "z": 1 + 2j,
        "list": [np.float32(2.0), (np.arange(3, dtype=np.int16),)],
        "empty": jnp.zeros((0, 3), F),
    }
    record_baseline(fun, {"tree": (tree,)}, path)
    assert check_baseline(fun, path)
    assert seen[0] == {"name": "net", "flag": True, "count": 3, "nothing": None}
    assert all(one == seen[0] for one in seen)


def test_weak_types_are_not_kept(path):
    weak = jnp.asarray(0.5)
    assert weak.weak_type
    record_baseline(jnp.sin, {"weak": (weak,)}, path)
    assert check_baseline(jnp.sin, path, cases={"weak": (weak,)})
    assert check_baseline(jnp.sin, path)


@both
def test_nan_and_infinities_have_their_places(stored, path):
    def fun(x, y):
        return jnp.sqrt(x), y / jnp.abs(jnp.sign(x))

    cases = {"x": (array([-1.0, 0.0, 4.0]), array([1.0, -1.0, 3.0]))}
    record_baseline(fun, cases, path, store_inputs=stored)
    given = None if stored else cases
    assert check_baseline(fun, path, cases=given)

    def another_sign(x, y):
        return jnp.sqrt(x), jnp.abs(y) / jnp.abs(jnp.sign(x))

    def another_place(x, y):
        return jnp.sqrt(jnp.flip(x)), y / jnp.abs(jnp.sign(x))

    for other, output in [(another_sign, "output[1]"), (another_place, "output[0]")]:
        report = check_baseline(other, path, cases=given)
        assert report.where == "value"
        assert [d.output for d in report.failed[0].differences] == [output]
        assert report.failed[0].differences[0].error == np.inf


# planted faults -------------------------------------------------------------------------------------------------------
@both
def test_a_changed_constant_is_found(stored, path):
    cases = {"standard": (X,), "zeros": (0 * X,)}

    def gain(constant):
        return lambda x: {"y": jnp.sin(x @ W) * constant, "other": jnp.sum(x)}

    record_baseline(gain(1.0), cases, path, store_inputs=stored)
    given = None if stored else cases
    assert check_baseline(gain(1.0), path, cases=given)
    report = check_baseline(gain(1.001), path, cases=given)
    assert not report
    assert report.where == "value"
    assert {d.output for c in report.failed if c.stage == "value" for d in c.differences} == {"output['y']"}
    # The value at zero is zero with any constant: there the derivative tells.
    assert not any(c.stage == "value" and "zeros" in c.name for c in report.failed)
    assert any(c.stage == "products" and "zeros" in c.name for c in report.failed)
    blocks = next(c for c in report.failed if c.name == "case 'zeros': norms and projections of the Jacobian")
    assert [(d.output, d.input) for d in blocks.differences] == [("output['y']", "args[0]")]
    assert blocks.differences[0].got_norm == pytest.approx(1.001 * blocks.differences[0].expected_norm, rel=1e-5)


def test_a_changed_constant_is_within_a_wide_tolerance(path):
    record_baseline(lambda x: 2.0 * x, {"x": (X,)}, path)
    other = lambda x: 2.001 * x
    assert not check_baseline(other, path)
    report = check_baseline(other, path, rtol=1e-2)
    assert report
    assert (report.rtol, report.tolerances) == (1e-2, "given")
    assert not check_baseline(other, path, atol=1e-4)
    assert check_baseline(other, path, atol=1e-1)


def test_recorded_tolerances_are_used(path):
    record_baseline(lambda x: 2.0 * x, {"x": (X,)}, path, rtol=1e-2)
    assert check_baseline(lambda x: 2.001 * x, path)
    report = check_baseline(lambda x: 2.001 * x, path, rtol=1e-4)
    assert report.where == "value"


def test_a_wrong_rule_with_the_right_value_is_found(path):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda p, t: (sine(p[0]), 1.01 * jnp.cos(p[0]) * t[0]))
    record_baseline(jnp.sin, {"x": (X,)}, path)
    report = check_baseline(sine, path)
    assert report.where == "products"
    assert len(report.failed) == 2


@both
def test_a_transposed_jacobian_is_found(stored, path):
    """The same value and the same norm of the Jacobian."""
    matrix = array(real(3, 3, seed=9))
    x = array([0.0, 0.0, 0.0])
    cases = {"x": (x,)}
    record_baseline(lambda x: matrix @ x, cases, path, store_inputs=stored)
    report = check_baseline(lambda x: matrix.T @ x, path, cases=None if stored else cases)
    assert report.where == "products"
    blocks = next(c for c in report.failed if "norms" in c.name)
    assert blocks.differences[0].expected_norm == pytest.approx(blocks.differences[0].got_norm)


def test_another_structure_or_type_is_found(path):
    record_baseline(lambda x: {"a": x, "b": [x]}, {"x": (X,)}, path)
    report = check_baseline(lambda x: {"a": x, "c": [x]}, path)
    assert report.where == "structure"
    assert report.failed[0].detail == "output['b'][0]: missing; output['c'][0]: new"
    assert [c.detail for c in report.skipped] == ["the structure differs"] * 3
    report = check_baseline(lambda x: {"a": x, "b": (x,)}, path)
    assert report.failed[0].detail == "the kinds of containers differ"
    report = check_baseline(lambda x: {"a": x.astype(jnp.bfloat16), "b": [x[:2]]}, path)
    assert report.where == "shapes and dtypes"
    assert report.failed[0].detail.startswith(
        f"output['a']: recorded {SHORT}[4,3], now bf16[4,3]; output['b'][0]: recorded {SHORT}[4,3], now {SHORT}[2,3]; "
        "the Jacobian: recorded (24, 12), now (18, 12)"
    )
    assert [c.detail for c in report.skipped] == ["the shapes and dtypes differ"] * 3


def test_a_case_that_raises_now_is_found(path):
    record_baseline(model, {"standard": (PARAMS, X)}, path)

    def strict(params, x):
        if x.shape[0] > 2:
            raise ValueError("too many rows\nsecond line")
        return model(params, x)

    report = check_baseline(strict, path)
    assert report.where == "value"
    assert [str(c) for c in report.failed] == [
        "failed  value: case 'standard': is accepted (raises ValueError: too many rows)"
    ]


def test_a_refusal_that_changed_is_found(path):
    def picky(kind, text):
        def fun(x):
            if x.ndim != 1 and kind is not None:
                raise kind(text)
            return x

        return fun

    cases = {"good": (array([1.0]),), "bad": Refused((X,), error=ValueError)}
    record_baseline(picky(ValueError, "one axis\nmore"), cases, path)
    assert check_baseline(picky(ValueError, "one axis"), path)
    assert check_baseline(picky(linjac.PointError, "one axis"), path)  # derives from it
    last = lambda report: next(c for c in report.criteria if "bad" in c.name)
    assert str(last(check_baseline(picky(ValueError, "other words"), path))) == (
        "passed  value: case 'bad': is refused with ValueError (with another message, was 'one axis', is 'other words')"
    )
    report = check_baseline(picky(TypeError, "one axis"), path)
    assert report.where == "value"
    assert str(last(report)) == "failed  value: case 'bad': is refused with ValueError (raises TypeError now)"
    report = check_baseline(picky(None, ""), path)
    assert str(last(report)) == "failed  value: case 'bad': is refused with ValueError (it is accepted now)"
    record_baseline(picky(ValueError, "secret 42"), cases, path, store_inputs=False)
    report = check_baseline(picky(ValueError, "other words"), path, cases=cases)
    assert str(last(report)) == "passed  value: case 'bad': is refused with ValueError (with another message)"
    assert b"secret" not in path.read_bytes()


def test_a_lost_reverse_direction_is_found(path):
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, 2.0 * c[1]), (0, x))[1]

    record_baseline(lambda x: 4.0 * x, {"x": (X[0],)}, path)
    report = check_baseline(loop, path)
    assert [c.detail for c in report.failed] == ["the reverse direction: there was one and is none now"]
    record_baseline(loop, {"x": (X[0],)}, path)
    report = check_baseline(loop, path)
    assert report
    assert "no reverse direction, as recorded" in str(report)
    assert not check_baseline(lambda x: 4.0 * x, path)


def test_jacobian_that_is_too_large_is_sampled(path, monkeypatch):
    from linjac import _fingerprint

    monkeypatch.setattr(_fingerprint, "EXACT", 10)
    record_baseline(model, {"x": (PARAMS, X)}, path)
    report = check_baseline(model, path)
    assert report
    assert report.criteria[-1].detail == "sampled: products along fixed directions"
    scaled = lambda params, x: model({**params, "b": 1.1 * params["b"]}, x)
    report = check_baseline(scaled, path)
    blocks = report.failed[-1]
    assert ("output['y']", "args[0]['b']") in [(d.output, d.input) for d in blocks.differences]


def test_fingerprint_is_the_frobenius_norm_of_each_block():
    from linjac._fingerprint import fingerprint

    for argnums in [None, (1, 0)]:
        _, linear_fn = linjac.linearize_many(model, PARAMS, X, argnums=argnums)
        for how in ("fwd", "rev"):
            found = fingerprint(linear_fn, how)
            dense = linear_fn.jacobian()
            for block in found["blocks"]:
                inner = dense
                order = (0, 1) if argnums is None else argnums
                names = re.findall(r"\['?(\w+)'?\]", block["output"])
                for name in names:
                    inner = inner[int(name) if name.isdigit() else name]
                place = re.findall(r"\['?(\w+)'?\]", block["input"])
                inner = inner[order.index(int(place[0]))]
                for name in place[1:]:
                    inner = inner[name]
                assert block["figures"][0] == pytest.approx(float(jnp.linalg.norm(inner.ravel())), rel=1e-5, abs=1e-7)
    assert found["shape"] == [9, 20]


def test_fixed_directions_never_change():
    from linjac._fingerprint import uniform

    assert [x.hex() for x in uniform(3, 0)] == [x.hex() for x in uniform(5, 0)[:3]]
    assert [x.hex() for x in uniform(2, 1, 3)] == [x.hex() for x in uniform(5, 1)[3:]]
    # SplitMix64 from zero begins with 0xE220A8397B1DCDAF: a change of the formula makes old files useless.
    assert uniform(1, 0)[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-52 - 1.0


@pytest.mark.skipif(not FULL, reason="needs a float64 input")
def test_inputs_that_would_be_narrowed_are_a_difference(path):
    record_baseline(jnp.sin, {"x": (X,)}, path)
    with jax.enable_x64(False):
        report = check_baseline(jnp.sin, path)
    assert report.where == "shapes and dtypes"
    assert report.failed[0].detail == "primals[0]: recorded f64, which cannot be had now (jax_enable_x64 is off)"
    assert "jax_enable_x64: True -> False" in report.skipped[0].detail


def test_environment_differences_are_listed(path):
    record_baseline(jnp.sin, {"x": (X,)}, path)
    rewrite(path, lambda body: body["environment"].update(jax="0.1.2"))
    report = check_baseline(jnp.sin, path)
    assert report
    assert report.skipped[0].detail == f"jax: 0.1.2 -> {jax.__version__}"


# what is in the file --------------------------------------------------------------------------------------------------
def manifest_of(path):
    return json.loads(np.load(path)["manifest"].tobytes())


def test_a_file_without_inputs_holds_no_raw_numbers(path):
    secret = array([0.123456789, -7.25, 3.0, 4.0, 5.0, 6.0])
    cases = {"x": ({"x": secret, "name": "somebody", "age": 42}, jax.random.key(123))}

    def fun(tree, key):
        return jnp.tanh(tree["x"]) * 3.0, tree["x"].astype(jnp.int32)

    record_baseline(fun, cases, path, store_inputs=False)
    raw = path.read_bytes()
    assert check_baseline(fun, path, cases=cases)
    value = np.asarray(fun(*cases["x"])[0])
    for array_ in (np.asarray(secret), value):
        for dtype in (np.float32, np.float64):
            for number in array_.astype(dtype):
                assert number.tobytes() not in raw
                assert float(number).hex().encode() not in raw
    assert b"somebody" not in raw
    manifest = manifest_of(path)
    assert manifest["arrays"] == {}
    leaves = manifest["body"]["cases"][0]["leaves"]
    assert all(leaf["text"] is None and leaf["data"] is None and len(leaf["sha256"]) == 64 for leaf in leaves)


def test_the_file_is_an_npz_that_numpy_reads(path):
    record_baseline(model, CASES, path)
    with np.load(path, allow_pickle=False) as file:
        names = set(file.files)
        kinds = {file[name].dtype.kind for name in names}
    assert "manifest" in names
    assert kinds <= set("biufc")
    environment = manifest_of(path)["body"]["environment"]
    assert environment["jax"] == jax.__version__


def test_the_same_content_gives_the_same_bytes(path, tmp_path):
    record_baseline(model, CASES, path)
    record_baseline(model, CASES, tmp_path / "again.npz")
    assert path.read_bytes() == (tmp_path / "again.npz").read_bytes()


# writing --------------------------------------------------------------------------------------------------------------
def test_a_failure_leaves_the_old_file(path, monkeypatch):
    record_baseline(jnp.sin, {"x": (X,)}, path)
    before = path.read_bytes()

    def fails(*_):
        raise OSError("no space")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="no space"):
                record_baseline(jnp.cos, {"x": (X,)}, path)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]

    def broken(x):
        raise ZeroDivisionError("in fun")

    with pytest.raises(ZeroDivisionError) as caught:
        record_baseline(broken, {"x": (X,)}, path)
    assert caught.value.__notes__[-1] == "linjac.testing.record_baseline: raised by case 'x'; nothing was written"
    assert path.read_bytes() == before


def test_permissions_and_links_are_kept(path, tmp_path):
    record_baseline(jnp.sin, {"x": (X,)}, path)
    path.chmod(0o600)
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    record_baseline(jnp.cos, {"x": (X,)}, link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert check_baseline(jnp.cos, path)


# refusals of a call ---------------------------------------------------------------------------------------------------
def test_cases_are_checked(path):
    refuse = lambda kind, cases, **options: message(kind, record_baseline, jnp.sin, cases, path, **options)
    assert refuse(TypeError, [(X,)]) == (
        "linjac.testing.record_baseline: cases must map names to tuples of primals, got list"
    )
    assert refuse(ValueError, {}) == "linjac.testing.record_baseline: there are no cases"
    assert refuse(TypeError, {3: (X,), "": (X,)}) == (
        "linjac.testing.record_baseline: the name of a case must be a text that is not empty\n  int\n  ''"
    )
    assert refuse(TypeError, {"x": X}) == (
        "linjac.testing.record_baseline: a case must be a tuple of primals, or testing.Refused\n"
        f"  cases['x']: {SHORT}[4,3]\nwrite (x,) for one argument"
    )
    assert refuse(ValueError, {"a": (X,), "b": (X + 0,)}) == (
        "linjac.testing.record_baseline: cases 'a' and 'b' have the same inputs"
    )
    assert refuse(ValueError, {"a": (X,)}, argnums=1) == (
        "linjac.testing.record_baseline: argnums=1 is out of range for 1 positional argument"
    )
    assert refuse(TypeError, {"a": (X,)}, store_inputs=1) == (
        "linjac.testing.record_baseline: store_inputs must be True or False, got int"
    )
    assert refuse(ValueError, {"a": (X,)}, rtol=-1.0) == (
        "linjac.testing.record_baseline: rtol must be a non-negative finite number or None (from the dtype), got -1.0"
    )
    assert not path.exists()


def test_leaves_that_cannot_be_recorded_are_named(path):
    tree = {"bytes": b"abc", "spec": jax.ShapeDtypeStruct((2,), F), "words": np.array(["a"]), "fine": X}
    text = message(TypeError, record_baseline, jnp.sin, {"x": (tree,)}, path, store_inputs=False)
    why = "only arrays, numbers, texts and named functions can be recorded"
    assert text == (
        "linjac.testing.record_baseline: these leaves cannot be recorded\n"
        f"  cases['x'][0]['bytes']: bytes, {why}\n"
        f"  cases['x'][0]['spec']: {SHORT}[2], {why}\n"
        f"  cases['x'][0]['words']: <U1[1], {why}"
    )
    with pytest.raises(TypeError, match="a value inside a trace"):
        jax.jit(lambda x: record_baseline(jnp.sin, {"x": (x,)}, path))(X)
    gone = X + 1
    gone.delete()
    assert "it has been deleted" in message(TypeError, record_baseline, jnp.sin, {"x": (gone,)}, path)
    deep = X
    for _ in range(40):
        deep = [deep]
    assert "nested deeper than 24 levels" in message(TypeError, record_baseline, jnp.sin, {"x": (deep,)}, path)


def test_containers_and_functions_need_the_caller(path):
    cases = {"x": (Layer(array(real(2, 3)), array([1.0, 2.0]), 3), Pair(X, jnp.tanh))}
    fun = lambda layer, pair: pair.right(pair.left @ layer.weight.T)
    assert message(TypeError, record_baseline, fun, cases, path) == (
        "linjac.testing.record_baseline: a file cannot give these inputs back\n"
        "  cases['x'][0]: Layer, a container\n"
        "  cases['x'][1]: Pair, a container\n"
        "  cases['x'][1].right: a function\n"
        "pass store_inputs=False, and the same cases to check_baseline"
    )
    record_baseline(fun, cases, path, store_inputs=False)
    assert check_baseline(fun, path, cases=cases)
    other = {"x": (cases["x"][0], Pair(X, jnp.sin))}
    assert message(ValueError, check_baseline, fun, path, cases=other) == (
        "linjac.testing.check_baseline: the cases are not those of the baseline\n"
        "  'x': not the inputs that were recorded (primals[1].right differs, now PjitFunction)\n"
        "pass the inputs that were recorded, all of them and no others"
    )


def test_cases_are_recognised_by_hash(path):
    record_baseline(model, CASES, path, store_inputs=False)
    assert message(ValueError, check_baseline, model, path) == (
        "linjac.testing.check_baseline: 'base.npz' holds the hashes of its inputs, not the inputs\n"
        "pass cases: the inputs that were recorded"
    )
    fewer = {name: case for name, case in CASES.items() if name != "zeros"}
    assert message(ValueError, check_baseline, model, path, cases=fewer) == (
        "linjac.testing.check_baseline: the cases are not those of the baseline\n"
        "  'zeros': recorded, and not among the cases\n"
        "pass the inputs that were recorded, all of them and no others"
    )
    more = {**CASES, "new": (PARAMS, X + 1)}
    assert "  'new': not recorded\n" in message(ValueError, check_baseline, model, path, cases=more)
    moved = {**CASES, "zeros": (PARAMS, 0 * X + 1e-30)}
    assert f"  'zeros': not the inputs that were recorded (primals[1] differs, now {SHORT}[4,3])\n" in message(
        ValueError, check_baseline, model, path, cases=moved
    )
    stored = path.with_name("stored.npz")
    record_baseline(model, CASES, stored)
    assert check_baseline(model, stored, cases=CASES)
    assert "'zeros': recorded" in message(ValueError, check_baseline, model, stored, cases=fewer)


def test_refused_is_checked():
    assert message(TypeError, Refused, X) == (
        f"linjac.testing.Refused: primals must be a tuple, got {SHORT}[4,3]\nwrite (x,) for one argument"
    )
    assert message(TypeError, Refused, (X,), error=int) == (
        "linjac.testing.Refused: error must be a class of exceptions, got int"
    )
    assert repr(Refused((X, "a"), error=ValueError)) == f"Refused(({SHORT}[4,3], str), error=ValueError)"


def test_a_refused_case_has_to_be_refused(path):
    with pytest.raises(VerificationError) as caught:
        record_baseline(jnp.sin, {"bad": Refused((X,), error=TypeError)}, path)
    assert str(caught.value) == (
        "linjac.testing.record_baseline: case 'bad' has to be refused with TypeError, and is accepted\n"
        "nothing was written"
    )
    with pytest.raises(VerificationError) as caught:
        record_baseline(model, {"bad": Refused((PARAMS, X.T), error=KeyError)}, path)
    assert str(caught.value) == (
        "linjac.testing.record_baseline: case 'bad' has to be refused with KeyError, and raises TypeError\n"
        "nothing was written"
    )
    assert isinstance(caught.value.__cause__, TypeError)
    assert not path.exists()


def test_paths_are_checked(tmp_path):
    assert message(TypeError, record_baseline, jnp.sin, {"x": (X,)}, 3) == (
        "linjac.testing.record_baseline: path must be a str or a path, got int"
    )
    lost = os.path.join(tmp_path, "no", "b.npz")
    assert message(FileNotFoundError, record_baseline, jnp.sin, {"x": (X,)}, lost) == (
        f"linjac.testing.record_baseline: there is no folder for {lost!r}"
    )
    with pytest.raises(FileNotFoundError):
        check_baseline(jnp.sin, tmp_path / "none.npz")
    assert message(TypeError, check_baseline, 3, tmp_path / "none.npz") == (
        "linjac.testing.check_baseline: fun must be callable, got int"
    )


# damaged and hostile files --------------------------------------------------------------------------------------------
def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy(array_):
    import io

    stream = io.BytesIO()
    np.save(stream, array_, allow_pickle=True)
    return stream.getvalue()


def pack(path, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries.items() if isinstance(entries, dict) else entries:
            archive.writestr(name, content)


def with_manifest(path, edit):
    entries = contents(path)
    manifest = manifest_of(path)
    manifest = edit(manifest) or manifest
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    pack(path, {**entries, "manifest.npy": npy(np.frombuffer(text, np.uint8))})


def rewrite(path, edit):
    def run(manifest):
        edit(manifest["body"])

    with_manifest(path, run)


REMEDY = "\nrestore the file from a copy, or record it anew"


def distrust(path):
    """What `check_baseline` says of a file that it refuses; the function is not even called."""

    def never(*_):
        raise AssertionError("fun was called")

    text = message(VerificationError, check_baseline, never, path)
    assert text.endswith(REMEDY)
    head = f"linjac.testing.check_baseline: {str(path)!r} is not a baseline that can be trusted\n  "
    assert text.startswith(head), text
    return text.removeprefix(head).removesuffix(REMEDY)


@pytest.fixture
def recorded(path):
    record_baseline(model, {"standard": (PARAMS, X), "key": (PARAMS, 2 * X)}, path)
    assert check_baseline(model, path)
    return path


def test_what_is_not_a_zip_is_refused(recorded):
    whole = recorded.read_bytes()
    for broken in (b"", b"hello", whole[: len(whole) // 2], whole[:-10]):
        recorded.write_bytes(broken)
        text = message(VerificationError, check_baseline, model, recorded)
        assert text.startswith(
            f"linjac.testing.check_baseline: {str(recorded)!r}: it is not a zip archive, or it is damaged ("
        )
        assert text.endswith(REMEDY)


def test_every_flipped_byte_is_refused_or_harmless(recorded):
    """A damaged file gives our error, or the same verdict as before; never another error."""
    whole = recorded.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for place in rng.integers(0, len(whole), 60):
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        recorded.write_bytes(bytes(damaged))
        try:
            assert check_baseline(model, recorded)
        except VerificationError:
            refused += 1
    assert refused > 50


def test_entries_are_those_of_the_manifest(recorded):
    entries = contents(recorded)
    pack(recorded, {name: content for name, content in entries.items() if name != "a1.npy"})
    assert distrust(recorded) == "entry 'a1.npy' is missing"
    pack(recorded, {**entries, "more.npy": npy(np.zeros(3))})
    assert distrust(recorded) == "entry 'more.npy' is not in its manifest"
    pack(recorded, {name: content for name, content in entries.items() if name != "manifest.npy"})
    assert distrust(recorded) == "it has no manifest"
    with pytest.warns(UserWarning, match="Duplicate name"):
        pack(recorded, [*entries.items(), ("a1.npy", entries["a1.npy"])])
    assert distrust(recorded) == "it has two entries 'a1.npy'"


@pytest.mark.parametrize("name", ["../a1.npy", "/etc/passwd", "A.npy", "a1.txt", "a/b.npy", "a1.npy\x7f", "..\\a.npy"])
def test_names_that_lead_elsewhere_are_refused(recorded, name):
    pack(recorded, {**contents(recorded), name: npy(np.zeros(3))})
    assert distrust(recorded) == f"it has an entry with the name {name!r}"


class _Bomb:
    def __reduce__(self):
        return (os.mkdir, ("pickle-was-executed",))


@pytest.mark.parametrize("name", ["a0", "manifest"])
def test_a_pickle_is_never_executed(recorded, name, monkeypatch):
    monkeypatch.chdir(recorded.parent)
    pack(recorded, {**contents(recorded), f"{name}.npy": npy(np.array([_Bomb()], object))})
    assert distrust(recorded) == f"entry '{name}.npy' holds objects (a pickle), which are never read"
    pack(recorded, {**contents(recorded), f"{name}.npy": pickle.dumps(_Bomb())})
    assert distrust(recorded) == f"entry '{name}.npy' is no plain array"
    assert not os.path.exists("pickle-was-executed")


def test_structured_arrays_and_other_types_are_refused(recorded):
    entries, shape = contents(recorded), manifest_of(recorded)["arrays"]["a0"]
    pack(recorded, {**entries, "a0.npy": npy(np.zeros(3, [("a", "<f4")]))})
    assert "holds objects" in distrust(recorded)
    pack(recorded, {**entries, "a0.npy": npy(np.zeros((7, 7), np.int16))})
    assert distrust(recorded) == f"entry 'a0.npy': expected {shape['dtype']}{shape['shape']}, got <i2[7, 7]"


def test_sizes_are_compared_before_anything_is_read(recorded):
    entries = contents(recorded)
    pack(recorded, {**entries, "a0.npy": b"\0" * 10_000_000}, zipfile.ZIP_DEFLATED)
    assert distrust(recorded) == "entry 'manifest.npy' is compressed or encrypted, which a baseline never is"
    pack(recorded, entries)
    header = npy(np.zeros((0,)))
    declared = manifest_of(recorded)["arrays"]["a0"]
    huge = header.replace(b"(0,)", b"(9**9,)")
    pack(recorded, {**entries, "a0.npy": huge})
    assert distrust(recorded) == "entry 'a0.npy' is no plain array"
    large = [10**6, 10**6]
    fake = npy(np.zeros((0, 0), declared["dtype"])).replace(b"(0, 0)", b"(1000000, 1000000)")
    fake = fake[:8] + struct.pack("<H", len(fake) - 10) + fake[10:]
    pack(recorded, {**entries, "a0.npy": fake})
    with_manifest(recorded, lambda manifest: manifest["arrays"]["a0"].update(shape=large))
    assert distrust(recorded) == "entry 'a0.npy': its shape and its size do not agree"


def test_overlapping_entries_are_refused(recorded):
    """Entries of the directory that share their bytes would add up to more than the file."""
    raw = bytearray(recorded.read_bytes())
    with zipfile.ZipFile(recorded) as archive:
        big = max(archive.infolist(), key=lambda entry: entry.file_size)
        others = [entry for entry in archive.infolist() if entry.filename != big.filename]
        start = archive.start_dir
    for entry in others:
        place = raw.index(entry.filename.encode(), start) - 46
        for offset, value in ((16, big.CRC), (20, big.compress_size), (24, big.file_size), (42, big.header_offset)):
            raw[place + offset : place + offset + 4] = struct.pack("<I", value)
    recorded.write_bytes(bytes(raw))
    assert distrust(recorded) == "its entries declare more bytes than the file has"


def test_a_newer_version_is_refused(recorded):
    with_manifest(recorded, lambda manifest: manifest.update(version=2, surprise=1))
    assert message(VerificationError, check_baseline, model, recorded) == (
        f"linjac.testing.check_baseline: {str(recorded)!r} was written by a newer linjac "
        "(format version 2; this one reads up to 1)\nupgrade linjac, or record the baseline anew"
    )


def test_manifests_are_validated(recorded):
    whole = recorded.read_bytes()

    def after(edit):
        recorded.write_bytes(whole)
        with_manifest(recorded, edit)
        return distrust(recorded)

    def body(edit):
        return after(lambda manifest: edit(manifest["body"]) and None)

    assert after(lambda _: b"[1, 2") == "its manifest is not valid JSON"
    assert after(lambda _: b"\xff\xfe") == "its manifest is not valid JSON"
    assert after(lambda _: b'{"a": NaN}') == "its manifest is not valid JSON"
    assert after(lambda _: b'{"a": 1, "a": 2}') == "its manifest is not valid JSON"
    assert after(lambda _: b"[" * 100_000 + b"]" * 100_000) == "its manifest is not valid JSON"
    assert after(lambda _: b"[" * 200 + b"]" * 200) == "its manifest is nested deeper than 96 levels"
    assert after(lambda _: b"[]") == "its manifest does not say 'linjac baseline'"
    assert after(lambda m: m.update(format="other")) == "its manifest does not say 'linjac baseline'"
    assert after(lambda m: m.update(version="1")) == "its manifest has no version"
    assert after(lambda m: m.update(version=True)) == "its manifest has no version"
    assert after(lambda m: m.update(more=1)) == "manifest: key 'more' is unknown"
    assert after(lambda m: m.pop("body") and None) == "manifest: key 'body' is missing"
    assert after(lambda m: m.update(arrays=[])) == "manifest['arrays']: expected an object, got a list"
    assert after(lambda m: m["arrays"]["a0"].update(shape=[True])) == (
        "manifest['arrays']['a0']['shape'][0]: did not expect true or false"
    )
    assert body(lambda b: b.update(cases={})) == "body['cases']: expected a list, got an object"
    assert body(lambda b: b.update(argnums="0")) == "body['argnums']: did not expect a text"
    assert body(lambda b: b.update(inputs="raw")) == "body['inputs']: did not expect a text"
    assert body(lambda b: b["environment"].update(devices=1.5)) == (
        "body['environment']['devices']: did not expect a number"
    )
    assert body(lambda b: b["environment"].update(flags=[["a"]])) == "the settings of the environment are malformed"
    case = "body['cases'][0]"
    assert body(lambda b: b["cases"][0].pop("digest")) == f"{case}: key 'digest' is missing"
    assert body(lambda b: b["cases"][0].update(digest="0")) == "case 'standard' is not what its hash says"
    assert body(lambda b: b["cases"][0].update(observed=None)) == "case 'standard' is neither observed nor refused"
    assert body(lambda b: b["cases"][0].update(tolerances=None)) == "case 'standard' has no tolerances"
    assert body(lambda b: b["cases"][0]["tolerances"].update(rtol="much")) == "a tolerance is no number"
    assert body(lambda b: b["cases"][0]["tolerances"].update(rtol="-0x1p0")) == "a tolerance is negative or not finite"
    assert body(lambda b: b["cases"][0].update(tree=["leaf", 0])) == "a tree does not fit its leaves"
    for tree in (None, [], ["leaf"], ["leaf", "0"], ["tuple", 3], ["dict", [[1.5, ["none"]]]], ["what"], {"leaf": 0}):
        assert body(lambda b, tree=tree: b["cases"][0].update(tree=tree)) == "a tree is malformed"

    def leaf(**changes):
        return body(lambda b: b["cases"][0]["leaves"][0].update(changes))

    name = "cases['standard'][0]['b']"
    assert leaf(dtype="object") == "'object' is no dtype"
    assert leaf(dtype="float99") == "'float99' is no dtype"
    assert leaf(dtype="int8") == f"an array of {np.dtype(F)} cannot hold int8"
    assert leaf(shape=[3]) == f"{name!r} is not what its hash says"
    assert leaf(data="a99") == f"{name!r} cannot be made from the file"
    assert leaf(kind="int") == f"{name!r} cannot be made from the file"
    assert leaf(kind="callable", text="os.system") == f"{name!r} cannot be made from the file"
    assert leaf(kind="object") == f"{case}['leaves'][0]['kind']: did not expect a text"
    assert leaf(sha256="0" * 64) == "case 'standard' is not what its hash says"

    def observed(edit):
        return body(lambda b: edit(b["cases"][0]["observed"]))

    assert observed(lambda o: o["value"][0].update(data="a99")).endswith("has no array")
    assert observed(lambda o: o["value"][0].update(data=None)).endswith("has neither entries nor figures")
    assert observed(lambda o: o["value"][0].update(shape=[99])).endswith("has another shape than its array")
    assert observed(lambda o: o["value"][0].update(figures=["x"])) == "a figure is no number"
    assert observed(lambda o: o["jacobian"]["blocks"][0].update(odd=[])) == (
        "a block of the Jacobian has the wrong number of figures"
    )
    assert observed(lambda o: o["jacobian"].update(how="magic")) == (
        f"{case}['observed']['jacobian']['how']: did not expect a text"
    )
    assert observed(lambda o: o.update(tree=["none"])) == "a tree does not fit its leaves"


def test_a_foreign_container_in_a_file_is_refused(recorded):
    def edit(body):
        from linjac._described import join_digests

        case = body["cases"][0]
        case["tree"][1][0] = ["node", "os.system", [["['b']", ["leaf", 0]], ["['w']", ["leaf", 1]]]]
        case["digest"] = join_digests(case["tree"], [leaf["sha256"] for leaf in case["leaves"]])

    rewrite(recorded, edit)
    assert distrust(recorded) == "a container of class 'os.system' cannot be made from a file"


def test_names_are_public():
    assert {"Refused", "check_baseline", "record_baseline"} <= set(testing.__all__)
    assert testing.record_baseline.__module__ == testing.Refused.__module__ == "linjac.testing"


def test_complex_norms_count_both_parts(path):
    z = jnp.asarray(np.array([3 + 4j, 0]), C)
    record_baseline(lambda z: z * z, {"z": (z,)}, path, store_inputs=False)
    blocks = manifest_of(path)["body"]["cases"][0]["observed"]["jacobian"]["blocks"]
    # J is diag(6 + 8i, 0): as a real map each complex entry counts twice.
    assert float.fromhex(blocks[0]["figures"][0]) == pytest.approx(10 * np.sqrt(2))


def test_texts_that_are_no_unicode_and_long_ints(path):
    """A lone surrogate (as in odd file names) is a text; an int that Python would not write is refused."""

    def fun(x, name):
        if name == "bad \udcff":
            raise ValueError(name)
        return 2.0 * x

    cases = {"odd": (X, "file \udcff"), "int": (X, 1 << 4000), "refused": Refused((X, "bad \udcff"))}
    for stored in (True, False):
        record_baseline(fun, cases, path, argnums=0, store_inputs=stored)
        assert check_baseline(fun, path, cases=None if stored else cases)
    text = message(TypeError, record_baseline, fun, {"long": (X, 10**5000)}, path, argnums=0)
    assert "cases['long'][1]: int, an int of too many digits" in text

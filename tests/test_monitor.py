"""`linjac.Monitor`: what is counted, what is refused, and that nothing of it is data."""

import contextlib
import functools
import json
import pickle
import sys
import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from linjac import _watch
from linjac._counts import BOUNDS, PENDING, Asked, Counts
from linjac._monitor import COMPILED
from scenarios import F, array, real

X = array(real(3, seed=1))
V = array(real(3, seed=2))
BATCH = array(real(5, 3, seed=3))
FLOAT = jnp.dtype(F).itemsize


def tall(x):
    """3 inputs, 4 outputs."""
    return jnp.concatenate([jnp.sin(x), jnp.sum(x)[None]])


def fresh():
    """`tall`, as a function that nothing has seen."""

    def fun(x):
        return tall(x)

    return fun


@pytest.fixture(autouse=True)
def _all_off():
    yield
    assert _watch.active == ()


@pytest.fixture(scope="module")
def linear_fn():
    return linjac.linearize_many(tall, X)[1]


def rows(monitor):
    return {(row["entry"], row["function"]): row for row in monitor.snapshot()["entries"]}


def only_row(monitor):
    (row,) = monitor.snapshot()["entries"]
    return row


def returned(row):
    return sum(row["dispatch"]["counts"])


# What a call is -------------------------------------------------------------------------------------------------------
ENTRIES = {
    "linearize_many": (lambda f: linjac.linearize_many(tall, X), (0, 0, 0)),
    "residual_bytes": (lambda f: linjac.residual_bytes(tall, X), (0, 0, 0)),
    "linear_fn": (lambda f: f(V), (1, 1, 1)),
    "linear_fn.many": (lambda f: f.many(BATCH, chunk_size=2), (5, 6, 3)),
    "linear_fn.transpose": (lambda f: f.transpose(jnp.ones(4, F)), (1, 1, 1)),
    "linear_fn.transpose_many": (lambda f: f.transpose_many(jnp.ones((2, 4), F)), (2, 2, 1)),
    "linear_fn.jacobian": (lambda f: f.jacobian(mode="rev"), (4, 4, 1)),
    "linear_fn.matvec": (lambda f: f.matvec(V), (1, 1, 1)),
    "linear_fn.rmatvec": (lambda f: f.rmatvec(jnp.ones(4, F)), (1, 1, 1)),
    "linear_fn.matmat": (lambda f: f.matmat(BATCH.T), (5, 5, 1)),
    "linear_fn.rmatmat": (lambda f: f.rmatmat(jnp.ones((4, 2), F)), (2, 2, 1)),
    "jvp_many": (lambda f: linjac.jvp_many(tall, (X,), (BATCH,)), (5, 5, 1)),
    "vjp_many": (lambda f: linjac.vjp_many(tall, (X,), jnp.ones((2, 4), F), chunk_size=1), (2, 2, 2)),
    "jacobian": (lambda f: linjac.jacobian(tall, mode="fwd", chunk_size=2)(X), (3, 4, 2)),
    "value_and_jacobian": (lambda f: linjac.value_and_jacobian(tall, mode="rev")(X), (4, 4, 1)),
    "plan_jacobian": (lambda f: linjac.plan_jacobian(tall)(X), (0, 0, 0)),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_counts_once_under_its_name(entry, linear_fn):
    call, (directions, sweeps, chunks) = ENTRIES[entry]
    with linjac.Monitor() as monitor:
        expected = call(linear_fn)
        again = call(linear_fn)
    plain = call(linear_fn)
    row = only_row(monitor)
    assert (row["entry"], row["function"]) == (entry, "tall")
    assert (row["calls"], row["traced_calls"], returned(row)) == (2, 0, 2)
    assert (row["directions"], row["chunks"]) == (2 * directions, 2 * chunks)
    if entry != "jacobian":  # its plan says how many
        assert row["sweeps"] == 2 * sweeps
    assert row["refused"] == row["failed"] == {}
    for one, two, three in zip(*map(jax.tree.leaves, (expected, again, plain)), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_the_sweeps_of_a_jacobian_are_those_of_its_plan():
    plan = linjac.plan_jacobian(tall, mode="fwd", chunk_size=2)(X)
    with linjac.Monitor() as monitor:
        linjac.jacobian(tall, mode=plan)(X)
    row = only_row(monitor)
    assert (row["directions"], row["sweeps"], row["chunks"]) == (plan.n, plan.sweeps, plan.chunks)


def test_calls_through_other_methods_count_once(linear_fn):
    with linjac.Monitor() as monitor:
        linear_fn.mv(V)
        linear_fn.as_matrix()
    found = rows(monitor)
    assert set(found) == {("linear_fn", "tall"), ("linear_fn.jacobian", "tall")}
    assert all(row["calls"] == 1 for row in found.values())


def test_a_call_inside_another_belongs_to_it():
    def outer(x):
        return linjac.jvp_many(tall, (x,), (jnp.stack([x, x]),))[0]

    with linjac.Monitor() as monitor:
        linjac.jacobian(outer)(X)
        linjac.jacobian(outer, jit=False)(X)
    row = only_row(monitor)
    assert (row["entry"], row["calls"], row["directions"]) == ("jacobian", 2, 6)
    assert row["function"].endswith("outer")


class Model:
    def apply(self, x):
        return x * 2

    def __call__(self, x):
        return x * 3


@pytest.mark.parametrize(
    ("fun", "name"),
    [
        (functools.partial(jnp.multiply, 2.0), "multiply"),
        (functools.partial(Model.apply, None), "Model.apply"),
        (Model().apply, "Model.apply"),
        (Model(), "Model"),
        (jax.jit(tall), "tall"),
        (lambda x: x, "<lambda>"),
    ],
)
def test_functions_go_by_their_names(fun, name):
    with linjac.Monitor() as monitor:
        linjac.jacobian(fun)(X)
        linjac.linearize_many(fun, X)[1](V)
    assert {row["function"] for row in monitor.snapshot()["entries"]} == {name}
    assert set(monitor.snapshot()["functions"]) <= {name}


def test_a_linearization_made_before_has_its_name_and_one_run_op_by_op_too():
    def branches(x):
        return jnp.sin(x) if x[0] > -9 else x

    with pytest.warns(linjac.PerformanceWarning, match="needs the value of an array"):
        found = [linjac.linearize_many(branches, X)[1]]
    found.append(linjac.linearize_many(branches, X, jit=False)[1])
    with linjac.Monitor() as monitor:
        for linear in found:
            linear(V)
            linear.many(BATCH)
        linjac.jacobian(branches, jit=False)(X)
    calls = {entry: row["calls"] for (entry, function), row in rows(monitor).items() if function.endswith("branches")}
    assert calls == {"linear_fn": 2, "linear_fn.many": 2, "jacobian": 1}


def test_off_nothing_of_it_runs(linear_fn):
    frames = []

    def see(frame, event, _):
        if event == "call":
            frames.append(frame.f_code.co_filename)

    def call():
        linear_fn(V)
        linear_fn.transpose(jnp.ones(4, F))
        linjac.jacobian(tall)(X)

    call()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert any(name.endswith("/_linearization.py") for name in frames)
    assert not [name for name in frames if name.endswith(("/_watch.py", "/_monitor.py", "/_counts.py"))]


# On and off -----------------------------------------------------------------------------------------------------------
def test_it_counts_while_it_is_on(linear_fn):
    monitor = linjac.Monitor()
    linear_fn(V)
    assert monitor.start() is monitor
    linear_fn(V)
    monitor.stop()
    linear_fn(V)
    with monitor as same:
        assert same is monitor
        linear_fn(V)
    assert only_row(monitor)["calls"] == 2


def test_turned_on_twice_it_counts_once_until_it_is_turned_off_twice(linear_fn):
    monitor = linjac.Monitor()
    with monitor:
        with monitor:
            linear_fn(V)
        linear_fn(V)
    linear_fn(V)
    assert only_row(monitor)["calls"] == 2


def test_several_count_every_call(linear_fn):
    first, second = linjac.Monitor(), linjac.Monitor(max_directions=1)
    with first:
        linear_fn(V)
        with second:
            linear_fn(V)
            with pytest.raises(linjac.LimitError):
                linear_fn.many(BATCH)
        linear_fn(V)
    assert {entry: row["calls"] for (entry, _), row in rows(first).items()} == {"linear_fn": 3, "linear_fn.many": 1}
    assert {entry: row["calls"] for (entry, _), row in rows(second).items()} == {"linear_fn": 1, "linear_fn.many": 1}
    assert rows(first)["linear_fn.many", "tall"]["refused"] == {"LimitError": 1}


def test_stop_without_start_is_refused():
    with pytest.raises(RuntimeError) as refusal:
        linjac.Monitor().stop()
    assert str(refusal.value) == "linjac.Monitor.stop: the monitor is not on"


def test_reset_begins_from_zero(linear_fn):
    with linjac.Monitor(non_finite=True) as monitor:
        linear_fn(V * jnp.nan)
        monitor.reset()
        assert monitor.snapshot()["entries"] == []
        linear_fn(V)
    row = only_row(monitor)
    assert (row["calls"], row["non_finite"]) == (1, 0)


def test_repr_says_on_or_off_and_the_limits():
    monitor = linjac.Monitor(max_directions=np.int64(7))
    assert repr(monitor) == "Monitor(off, max_directions=7)"
    with monitor:
        assert repr(monitor) == "Monitor(on, max_directions=7)"


@pytest.mark.parametrize("name", ["max_directions", "max_result_bytes", "max_signatures"])
@pytest.mark.parametrize(
    ("value", "error", "got"), [(0, ValueError, "0"), (True, TypeError, "True"), ("many", TypeError, "str")]
)
def test_limits_are_positive_ints(name, value, error, got):
    with pytest.raises(error) as refusal:
        linjac.Monitor(**{name: value})
    assert str(refusal.value) == f"linjac.Monitor: {name} must be a positive int or None (no limit), got {got}"


@pytest.mark.parametrize("name", ["completion", "non_finite", "shapes"])
def test_options_are_bools(name):
    with pytest.raises(TypeError) as refusal:
        linjac.Monitor(**{name: 1})
    assert str(refusal.value) == f"linjac.Monitor: {name} must be True or False, got int"


# The snapshot ---------------------------------------------------------------------------------------------------------
def test_a_snapshot_is_plain_and_new_each_time(linear_fn):
    with linjac.Monitor(completion=True, non_finite=True, shapes=True, max_signatures=9) as monitor:
        linear_fn(V)
        snapshot = monitor.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    assert list(snapshot) == [
        *("version", "note", "seconds", "limits", "bounds", "entries", "functions", "outside", "totals"),
    ]
    assert snapshot["limits"] == {"max_directions": None, "max_result_bytes": None, "max_signatures": 9}
    assert list(snapshot["entries"][0]) == [
        *("entry", "function", "calls", "traced_calls", "directions", "sweeps", "chunks", "refused", "failed"),
        *("dispatch", "completion", "non_finite", "shapes"),
    ]
    snapshot["entries"][0]["dispatch"]["counts"][0] = 1000
    snapshot["entries"][0]["shapes"].clear()
    assert sum(only_row(monitor)["dispatch"]["counts"]) == 1
    assert only_row(monitor)["shapes"]


def test_what_was_not_asked_for_is_none(linear_fn):
    with linjac.Monitor() as monitor:
        linear_fn(V)
    row = only_row(monitor)
    assert row["completion"] is row["non_finite"] is row["shapes"] is None


def test_totals_are_sums(linear_fn):
    with linjac.Monitor() as monitor:
        linear_fn(V)
        linear_fn.many(BATCH)
        with pytest.raises(linjac.TangentError):
            linear_fn(jnp.ones(4, F))
        with pytest.raises(ZeroDivisionError):
            linjac.jacobian(lambda x: 1 / 0)(X)
        jax.jit(linear_fn)(V)
    totals = monitor.snapshot()["totals"]
    compiles = totals.pop("compiles")
    assert totals == {
        "calls": 4,
        "traced_calls": 1,
        "directions": 6,
        "sweeps": 6,
        "chunks": 2,
        "refused": 1,
        "failed": 1,
        "non_finite": 0,
        "traces": 0,
        "retraces": 0,
    }
    assert compiles == sum(row["compiles"] for row in monitor.snapshot()["functions"].values())


def test_latency_goes_into_fixed_buckets_by_their_upper_bounds():
    assert BOUNDS[:4] == (1e-5, 2e-5, 5e-5, 1e-4)
    assert BOUNDS[-3:] == (2.0, 5.0, 10.0)
    assert list(BOUNDS) == sorted(set(BOUNDS))
    counts = Counts(
        {"max_directions": None, "max_result_bytes": None, "max_signatures": None}, Asked(True, False, False)
    )
    for seconds in (0.0, 1e-5, 1.1e-5, 10.0, 11.0):
        call = _watch.Call("linear_fn", "f", (), None)
        call.dispatch, call.completion = seconds, 2 * seconds
        counts.finished(call, None, None)
    (row,) = counts.copy()["entries"]
    dispatch, completion = row["dispatch"], row["completion"]
    assert dispatch["counts"] == [2, 1, *[0] * 16, 1, 1]
    assert completion["counts"] == [1, 1, 1, *[0] * 15, 0, 2]
    assert dispatch["sum"] == pytest.approx(21.000021)
    assert completion["sum"] == pytest.approx(42.000042)


def test_completion_waits_for_the_result_when_asked(linear_fn, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.append(tree))
    with linjac.Monitor():
        linear_fn(V)
    assert waited == []
    with linjac.Monitor(completion=True) as monitor, linjac.Monitor(completion=True):
        out = linear_fn(V)
        jax.jit(linear_fn)(V)
    (only,) = waited
    assert only is out
    row = only_row(monitor)
    assert sum(row["completion"]["counts"]) == 1
    assert row["completion"]["sum"] >= row["dispatch"]["sum"] > 0


def tells(x):
    raise ValueError("saw 12345.678 and password")


def test_no_value_is_ever_in_it_and_no_shape_unless_asked(linear_fn):
    secret = jnp.full(3, 12345.678, F)
    plain, shaped = linjac.Monitor(non_finite=True), linjac.Monitor(shapes=True)
    with plain, shaped:
        linear_fn(secret)
        linjac.jacobian(lambda x, word: x * 2)(secret, "password")
        with pytest.raises(linjac.TangentError):
            linear_fn(jnp.full(4, 12345.678, F))
        with pytest.raises(ValueError, match="12345"):
            linjac.jacobian(tells)(secret)
    kind = "f64" if jnp.dtype(F).itemsize == 8 else "f32"
    for monitor in (plain, shaped):
        text = json.dumps(monitor.snapshot())
        assert "12345" not in text
        assert "password" not in text
    assert f"{kind}[" not in json.dumps(plain.snapshot())
    assert rows(shaped)["linear_fn", "tall"]["shapes"] == {f"{kind}[3]": 1, f"{kind}[4]": 1}
    (words,) = [row["shapes"] for row in shaped.snapshot()["entries"] if f"{kind}[3], str" in row["shapes"]]
    assert words == {f"{kind}[3], str": 1}


def test_many_leaves_and_many_kinds_stay_bounded(linear_fn):
    many = [X] * 10
    counts = Counts(
        {"max_directions": None, "max_result_bytes": None, "max_signatures": None}, Asked(False, False, True)
    )
    for number in range(1100):
        call = _watch.Call("linear_fn", f"f{number}", [jnp.zeros((1,) * (number % 3), F)], None)
        counts.finished(call, None, None)
        counts.compiled(None, f"jit({number})", 1.0)
    copy = counts.copy()
    assert len(copy["entries"]) == 1001
    assert len(copy["outside"]) == 1001
    assert copy["outside"]["(others)"] == {"compiles": 100, "compile_seconds": 100.0}
    (others,) = [row for row in copy["entries"] if row["function"] == "(others)"]
    assert others["calls"] == 100
    with linjac.Monitor(shapes=True) as monitor:
        linjac.jacobian(lambda xs: xs[0])(many)
    assert next(iter(only_row(monitor)["shapes"])).endswith("and 2 more")


@contextlib.contextmanager
def compiled():
    """The names of the programs that are compiled in the block."""
    names = []

    def listen(event, duration, **details):
        if event == COMPILED:
            names.append(details.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Compiles and traces --------------------------------------------------------------------------------------------------
def test_jax_reports_a_compile_with_its_name_in_the_thread_that_called():
    seen = []

    def listen(event, duration, **details):
        if event == COMPILED:
            seen.append((details.get("fun_name"), duration, threading.get_ident()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:

        def once(x):
            return x * 2

        jax.jit(once)(X)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    why = "JAX's event of a compile has changed: Monitor counts compiles by it (linjac._monitor.COMPILED, fun_name)"
    assert [name for name, _, _ in seen] == ["jit(once)"], why
    assert all(duration > 0 and thread == threading.get_ident() for _, duration, thread in seen), why


def test_compiles_belong_to_the_function_of_the_call():
    fun, seen = fresh(), []

    def listen(event, duration, **_):
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with linjac.Monitor() as monitor:
            jac = linjac.jacobian(fun)
            jac(X)
            first = monitor.snapshot()["functions"]
            jac(X)
            second = monitor.snapshot()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    (name,) = first
    assert name.endswith("fun")
    assert first[name]["compiles"] == len(seen) >= 1
    assert first[name]["compile_seconds"] == pytest.approx(sum(seen))
    assert second["functions"] == first
    assert second["outside"] == {}


def test_a_compile_outside_any_call_goes_by_the_name_jax_gives():
    def step(x):
        return linjac.jacobian(tall)(x)

    with linjac.Monitor() as monitor:
        jax.jit(step)(X)
    outside = monitor.snapshot()["outside"]
    assert outside["jit(step)"]["compiles"] == 1
    assert outside["jit(step)"]["compile_seconds"] > 0


def test_its_own_programs_are_not_counted(linear_fn):
    linear_fn(V)
    jax.clear_caches()
    with linjac.Monitor() as plain:
        linear_fn(V)
    jax.clear_caches()
    with linjac.Monitor(non_finite=True) as monitor:
        linear_fn(V)
    assert monitor.snapshot()["totals"]["compiles"] == plain.snapshot()["totals"]["compiles"] >= 1
    assert monitor.snapshot()["outside"] == {}


def test_traces_and_retraces_of_a_function():
    scale = jnp.ones((), F)

    def fun(x):
        return x * scale

    linear = linjac.jacobian(fun)
    with linjac.Monitor() as monitor:
        linear(X)
        linear(X + 1)
        (first,) = monitor.snapshot()["functions"].values()
        linear(jnp.ones(4, F))  # another shape
        scale = 2 * scale  # something else closed over
        linear(X)
        (last,) = monitor.snapshot()["functions"].values()
    assert (first["traces"], first["retraces"]) == (1, 0)
    assert (last["traces"], last["retraces"]) == (3, 2)


def test_a_function_made_anew_at_each_call_is_retraced():
    with linjac.Monitor() as monitor:
        for _ in range(3):
            linjac.jacobian(lambda x: x * 2)(X)
    (found,) = monitor.snapshot()["functions"].values()
    assert (found["traces"], found["retraces"]) == (3, 2)


def test_the_listener_goes_with_the_last_monitor():
    from linjac._monitor import _listen

    with linjac.Monitor():
        with linjac.Monitor():
            pass
        jax.monitoring.unregister_event_duration_listener(_listen)
        jax.monitoring.register_event_duration_secs_listener(_listen)
    with pytest.raises(AssertionError):
        jax.monitoring.unregister_event_duration_listener(_listen)


def test_it_can_be_stopped_after_somebody_cleared_all_listeners(linear_fn):
    with linjac.Monitor() as monitor:
        jax.monitoring.clear_event_listeners()
        linear_fn(V)
    assert only_row(monitor)["calls"] == 1


# Refusals and failures ------------------------------------------------------------------------------------------------
def held(x):
    return x["a"] * 2


POINT = {"a": X, "name": "x", "count": jnp.ones(2, jnp.int32)}
GOOD = {"a": V, "name": None, "count": None}
KINDS = {
    "structure": (lambda f: f({"a": V}), lambda f: f.many({"a": BATCH})),
    "shape": (lambda f: f(GOOD | {"a": jnp.ones(4, F)}), lambda f: f.many(GOOD | {"a": jnp.ones((5, 4), F)})),
    "dtype": (
        lambda f: f(GOOD | {"a": jnp.ones(3, jnp.int32)}),
        lambda f: f.many(GOOD | {"a": jnp.ones((5, 3), jnp.int32)}),
    ),
    "batch": (lambda f: f(GOOD | {"a": BATCH}), lambda f: f.many(GOOD)),
    "held leaf": (lambda f: f(GOOD | {"count": V}), lambda f: f.many(GOOD | {"a": BATCH, "count": V})),
    "no array": (lambda f: f(GOOD | {"a": "v"}), lambda f: f.many(GOOD | {"a": "v"})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_tangent_counts_by_its_kind(kind):
    linear = linjac.linearize_many(held, POINT)[1]
    with linjac.Monitor() as monitor:
        for call in KINDS[kind]:
            with pytest.raises(linjac.TangentError) as refusal:
                call(linear)
            assert refusal.value.kind == kind
            assert pickle.loads(pickle.dumps(refusal.value)).kind == kind
    for row in monitor.snapshot()["entries"]:
        assert row["refused"] == {f"TangentError: {kind}": 1}
        assert (row["calls"], returned(row), row["directions"]) == (1, 0, 0)
    assert len(monitor.snapshot()["entries"]) == 2


def test_disagreeing_batches_and_flat_vectors_have_kinds_too(linear_fn):
    two = linjac.linearize_many(lambda x, y: x * y, X, X)[1]
    with linjac.Monitor() as monitor:
        for call in (
            lambda: two.many(BATCH, BATCH[:2]),
            lambda: linear_fn.matvec(jnp.ones(4, F)),
            lambda: linear_fn.rmatmat("words"),
            lambda: linear_fn.matmat(array(1j * np.ones((3, 2)))),
        ):
            with pytest.raises(linjac.TangentError):
                call()
    kinds = {entry: list(row["refused"]) for (entry, _), row in rows(monitor).items()}
    assert kinds == {
        "linear_fn.many": ["TangentError: batch"],
        "linear_fn.matvec": ["TangentError: shape"],
        "linear_fn.rmatmat": ["TangentError: no array"],
        "linear_fn.matmat": ["TangentError: dtype"],
    }


def forward_only(x):
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * 2 + 1, x)


def test_other_refusals_count_by_their_class(linear_fn):
    with linjac.Monitor() as monitor:
        with pytest.raises(ValueError, match="chunk_size"):
            linear_fn.many(BATCH, chunk_size=0)
        with pytest.raises(TypeError, match="jit must be"):
            linjac.linearize_many(tall, X, jit=1)
        with pytest.raises(ValueError, match="measure"):
            linear_fn.jacobian(mode="measure")
        with pytest.raises(TypeError, match="string"):
            linjac.linearize_many(tall, "x")
        with pytest.raises(TypeError, match="cannot be hashed"):
            linjac.jacobian(lambda x, y: x)(X, {1, 2})
        with pytest.raises(linjac.ModeError):
            linjac.jacobian(forward_only, mode="rev")(X)
    refused = {}
    for row in monitor.snapshot()["entries"]:
        for kind, count in row["refused"].items():
            refused[kind] = refused.get(kind, 0) + count
        assert row["failed"] == {}
    assert refused == {"ValueError": 2, "TypeError": 3, "ModeError": 1}


class Trouble(Exception):
    pass


def test_errors_of_the_function_are_counted_apart():
    def raises(x):
        raise Trouble

    with linjac.Monitor() as monitor:
        for jit in (True, False):
            with pytest.raises(Trouble):
                linjac.jacobian(raises, jit=jit)(X)
            with pytest.raises(Trouble):
                linjac.linearize_many(raises, X, jit=jit)
    for row in monitor.snapshot()["entries"]:
        assert row["failed"] == {"Trouble": 2}
        assert row["refused"] == {}
        assert (row["calls"], returned(row)) == (2, 0)


def test_an_error_leaves_no_trace_of_itself(linear_fn):
    with linjac.Monitor(max_directions=4) as monitor:
        for _ in range(2):
            with pytest.raises(linjac.LimitError):
                linear_fn.many(BATCH)
            with pytest.raises(linjac.TangentError):
                linear_fn(jnp.ones(4, F))
            linear_fn(V)
    assert _watch.current() is None
    assert rows(monitor)["linear_fn", "tall"]["calls"] == 4
    assert rows(monitor)["linear_fn", "tall"]["directions"] == 2


# Non-finite results ---------------------------------------------------------------------------------------------------
def test_results_with_a_nan_or_an_infinity_are_counted_once_each(linear_fn):
    with linjac.Monitor(non_finite=True) as monitor:
        linear_fn(V)
        linear_fn(V.at[1].set(jnp.nan))
        linear_fn(V.at[0].set(jnp.inf))
        linjac.jacobian(jnp.log)(jnp.zeros(2, F))
        linjac.jacobian(lambda x: x * 2)(X)
    found = {row["entry"]: row["non_finite"] for row in monitor.snapshot()["entries"] if row["non_finite"]}
    assert found == {"linear_fn": 2, "jacobian": 1}
    assert monitor.snapshot()["totals"]["non_finite"] == 3


def test_what_is_looked_at_is_what_was_computed():
    def fun(x):
        return {"y": x * 2, "n": jnp.ones(2, jnp.int32)}, x * jnp.nan

    bad = jnp.full(3, jnp.nan, F)
    with linjac.Monitor(non_finite=True) as monitor:
        linjac.linearize_many(fun, X, has_aux=True)
        linjac.jvp_many(fun, (X,), (BATCH,), has_aux=True)
        linjac.vjp_many(fun, (X,), {"y": BATCH, "n": None}, has_aux=True)
        linjac.jacobian(lambda x: (x * 2, x * jnp.nan), has_aux=True)(X)
        linjac.value_and_jacobian(lambda x: (x * 2, x * jnp.nan), has_aux=True)(X)
        linjac.linearize_many(lambda x: jnp.where(jnp.isnan(x), 0, x), bad)  # the point is not the result
    assert monitor.snapshot()["totals"]["non_finite"] == 0
    with linjac.Monitor(non_finite=True) as monitor:
        linjac.linearize_many(lambda x: x * 2, bad)
        linjac.value_and_jacobian(lambda x: (jnp.sum(x), None), has_aux=True)(bad)
    assert monitor.snapshot()["totals"]["non_finite"] == 2


def test_no_flag_is_lost_however_many_wait(linear_fn):
    count = 3 * PENDING + 5
    with linjac.Monitor(non_finite=True) as monitor:
        for i in range(count):
            linear_fn(V * jnp.nan if i % 2 else V)
    assert only_row(monitor)["non_finite"] == count // 2
    assert only_row(monitor)["non_finite"] == count // 2


# Inside transformations -----------------------------------------------------------------------------------------------
def test_inside_jit_a_call_is_counted_when_it_is_traced():
    @jax.jit
    def step(x, v):
        value, linear = linjac.linearize_many(tall, x)
        return value, linear(v), linear.many(jnp.stack([v, v])), linjac.jacobian(tall)(x)

    with linjac.Monitor(completion=True, non_finite=True) as monitor:
        for _ in range(3):
            step(X, V * jnp.nan)
        snapshot = monitor.snapshot()
    assert len(snapshot["entries"]) == 4
    for row in snapshot["entries"]:
        assert (row["calls"], row["traced_calls"], row["directions"]) == (0, 1, 0)
        assert returned(row) == row["non_finite"] == sum(row["completion"]["counts"]) == 0
    assert "counted once, under traced_calls" in snapshot["note"]


def test_closed_over_arrays_in_jit_and_vmap_and_grad_are_traced_too(linear_fn):
    identity = linjac.linearize_many(lambda x: (x, jnp.sin(x)), X)[1]
    with linjac.Monitor(non_finite=True) as monitor:
        jax.jit(lambda: linear_fn(V))()
        jax.vmap(linear_fn)(BATCH)
        jax.grad(lambda v: jnp.sum(linear_fn(v)))(V)
        jax.jit(lambda f: f(V))(identity)
    assert rows(monitor)["linear_fn", "tall"]["traced_calls"] == 3
    assert monitor.snapshot()["totals"]["non_finite"] == 0
    assert monitor.snapshot()["totals"]["failed"] == 0


def test_a_refusal_while_tracing_is_counted_as_traced(linear_fn):
    with linjac.Monitor() as monitor, pytest.raises(linjac.TangentError):
        jax.jit(linear_fn)(jnp.ones(4, F))
    row = only_row(monitor)
    assert (row["calls"], row["traced_calls"], row["refused"]) == (0, 1, {"TangentError: shape": 1})


# Limits ---------------------------------------------------------------------------------------------------------------
DIRECTIONS = {
    "linear_fn.many": lambda f: linjac.linearize_many(f, X)[1].many,
    "linear_fn.transpose_many": lambda f: lambda b: linjac.linearize_many(f, X)[1].transpose_many(jnp.ones((5, 4), F)),
    "linear_fn.matmat": lambda f: lambda b: linjac.linearize_many(f, X)[1].matmat(b.T),
    "jvp_many": lambda f: lambda b: linjac.jvp_many(f, (X,), (b,)),
    "vjp_many": lambda f: lambda b: linjac.vjp_many(f, (X,), jnp.ones((5, 4), F)),
    "jacobian": lambda f: lambda b: linjac.jacobian(lambda x: f(x[:3]), mode="fwd")(jnp.ones(5, F)),
    "value_and_jacobian": lambda f: lambda b: linjac.value_and_jacobian(lambda x: f(x[:3]), mode="fwd")(jnp.ones(5, F)),
    "linear_fn.jacobian": lambda f: (
        lambda b: linjac.linearize_many(lambda x: f(x[:3]), jnp.ones(5, F))[1].jacobian(mode="fwd")
    ),
}


@pytest.mark.parametrize("entry", DIRECTIONS)
def test_too_many_directions_are_refused_before_any_compile(entry):
    call = DIRECTIONS[entry](fresh())
    with (
        linjac.Monitor(max_directions=4) as monitor,
        compiled() as programs,
        pytest.raises(linjac.LimitError) as refusal,
    ):
        call(BATCH)
    assert str(refusal.value) == (
        f"linjac.{entry}: the call is beyond a limit of an active linjac.Monitor: max_directions\n"
        "  allowed 4, wanted 5\n"
        "give fewer directions in a call, or raise the limit"
    )
    assert not {"jit(run)", "jit(work)"} & set(programs)
    assert rows(monitor)[entry, next(f for e, f in rows(monitor) if e == entry)]["refused"] == {"LimitError": 1}
    with linjac.Monitor(max_directions=5), compiled() as programs:
        call(BATCH)
    assert {"jit(run)", "jit(work)"} & set(programs)


BYTES = {
    "linearize_many": (lambda f: linjac.linearize_many(f, X, strategy="recompute"), 4),
    "linear_fn": (lambda f: linjac.linearize_many(f, X, strategy="recompute")[1](V), 4),
    "linear_fn.transpose": (lambda f: linjac.linearize_many(f, X)[1].transpose(jnp.ones(4, F)), 3),
    "linear_fn.rmatvec": (lambda f: linjac.linearize_many(f, X)[1].rmatvec(jnp.ones(4, F)), 3),
    "linear_fn.many": (lambda f: linjac.linearize_many(f, X)[1].many(BATCH), 20),
    "jvp_many": (lambda f: linjac.jvp_many(f, (X,), (BATCH,)), 20),
    "vjp_many": (lambda f: linjac.vjp_many(f, (X,), jnp.ones((5, 4), F)), 15),
    "jacobian": (lambda f: linjac.jacobian(f)(X), 12),
    "linear_fn.jacobian": (lambda f: linjac.linearize_many(f, X)[1].jacobian(), 12),
}


@pytest.mark.parametrize("entry", BYTES)
def test_a_result_beyond_the_limit_is_refused(entry):
    call, numbers = BYTES[entry]
    wanted = numbers * FLOAT
    limits = linjac.Monitor(max_result_bytes=wanted), linjac.Monitor(max_result_bytes=wanted - 1)
    if entry in ("linear_fn.transpose", "linear_fn.rmatvec"):  # the linearization itself is larger
        linear = linjac.linearize_many(tall, X)[1]
        method = getattr(linear, entry.removeprefix("linear_fn."))
        call = lambda _: method(jnp.ones(4, F))
    with limits[0]:
        call(tall)
    with limits[1], pytest.raises(linjac.LimitError) as refusal:
        call(tall)
    who = str(refusal.value).splitlines()[0].split(":")[0].removeprefix("linjac.")
    assert who == ("linearize_many" if entry == "linear_fn" else entry)
    assert str(refusal.value) == (
        f"linjac.{who}: the call is beyond a limit of an active linjac.Monitor: max_result_bytes\n"
        f"  allowed {wanted - 1:,}, wanted {wanted:,}\n"
        "ask for less in a call (fewer directions, products instead of a Jacobian), or raise the limit"
    )


def test_a_stored_linearization_counts_its_residuals():
    kept = linjac.residual_bytes(tall, X)
    assert kept > 0
    with linjac.Monitor(max_result_bytes=4 * FLOAT + kept):
        linjac.linearize_many(tall, X)
    with linjac.Monitor(max_result_bytes=4 * FLOAT + kept - 1):
        with pytest.raises(linjac.LimitError):
            linjac.linearize_many(tall, X)
        linjac.linearize_many(tall, X, strategy="recompute")


def test_nothing_is_measured_beyond_a_limit(monkeypatch):
    from linjac import _decide

    monkeypatch.setattr(_decide, "fastest", lambda *_: pytest.fail("measured"))
    with linjac.Monitor(max_result_bytes=1), pytest.raises(linjac.LimitError):
        linjac.jacobian(fresh(), mode="measure")(X)


def test_a_limit_holds_for_a_call_inside_another():
    def outer(x):
        return linjac.jvp_many(tall, (x,), (jnp.ones((9, 3), F),))[0]

    with linjac.Monitor(max_directions=8) as monitor, pytest.raises(linjac.LimitError, match="jvp_many"):
        linjac.jacobian(outer)(X)
    assert only_row(monitor)["refused"] == {"LimitError": 1}


def count_traces(fun):
    def counted(x):
        counted.traces += 1
        return fun(x)

    counted.traces = 0
    return counted


def test_a_new_signature_beyond_the_limit_is_refused_before_its_trace():
    fun = count_traces(jnp.sin)
    linjac.jacobian(fun)(jnp.ones(1, F))
    with linjac.Monitor(max_signatures=2) as monitor:
        linjac.jacobian(fun)(jnp.ones(2, F))
        traces = fun.traces
        with pytest.raises(linjac.LimitError) as refusal:
            linjac.jacobian(fun)(jnp.ones(3, F))
        with pytest.raises(linjac.LimitError):
            linjac.linearize_many(fun, [jnp.ones(3, F)])
        for size in (1, 2):
            linjac.jacobian(fun)(jnp.ones(size, F))
    assert fun.traces == traces
    assert str(refusal.value) == (
        "linjac.jacobian: the call is beyond a limit of an active linjac.Monitor: max_signatures of "
        "count_traces.<locals>.counted\n"
        "  allowed 2, wanted 3\n"
        "bring inputs to a few shapes (pad them), pass what changes as an array, define functions once, or raise the "
        "limit"
    )
    assert rows(monitor)["jacobian", "count_traces.<locals>.counted"]["refused"] == {"LimitError": 1}


def test_an_endless_stream_of_functions_made_anew_is_stopped():
    with linjac.Monitor(max_signatures=3) as monitor:
        for _ in range(3):
            call_anew()
        with pytest.raises(linjac.LimitError, match="allowed 3, wanted 4"):
            call_anew()
        monitor.reset()
        with pytest.warns(linjac.PerformanceWarning, match="traced 4 times"):
            call_anew()


def call_anew():
    return linjac.jacobian(lambda x: x * 5)(X)


def test_refused_signatures_do_not_push_out_those_that_are_served():
    fun = count_traces(lambda x: x["a"] * 2)
    linjac.jacobian(fun)({"a": X})
    traces = fun.traces
    with linjac.Monitor(max_signatures=1):
        for number in range(80):
            with pytest.raises(linjac.LimitError):
                linjac.jacobian(fun)({"a": X, f"b{number}": X})
        linjac.jacobian(fun)({"a": X})
    assert fun.traces == traces


def test_a_signature_that_replaces_a_stale_one_is_not_one_more():
    scale = 2.0

    def fun(x):
        return x * scale

    linjac.jacobian(fun)(X)
    scale = 3.0
    with linjac.Monitor(max_signatures=1) as monitor:
        np.testing.assert_array_equal(linjac.jacobian(fun)(X), 3 * jnp.eye(3, dtype=F))
        scale = 4.0
        with pytest.raises(linjac.LimitError):
            linjac.jacobian(fun)(X)
    assert monitor.snapshot()["totals"]["traces"] == 1


# Threads --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def _switching_often():
    """Threads take turns after a microsecond, so that what is not atomic shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switching_often")
def test_eight_threads_lose_no_count(linear_fn):
    threads, each = 8, 10_000
    linear_fn(V)
    monitor = linjac.Monitor()
    start = threading.Barrier(threads + 1)

    def work():
        start.wait()
        for _ in range(each):
            linear_fn(V)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    with monitor:
        for worker in workers:
            worker.start()
        start.wait()
        seen = 0
        while any(worker.is_alive() for worker in workers):
            for row in monitor.snapshot()["entries"]:  # each call whole or not at all, never fewer than before
                assert row["calls"] == returned(row) == row["directions"] >= seen
                seen = row["calls"]
            workers[-1].join(0.02)
        for worker in workers:
            worker.join()
    row = only_row(monitor)
    assert row["calls"] == returned(row) == row["directions"] == row["sweeps"] == row["chunks"] == threads * each


def test_threads_keep_their_calls_apart(linear_fn):
    fun, errors = fresh(), []

    def work(number):
        try:
            if number % 2:
                linjac.jacobian(fun, mode="fwd")(X)
            else:
                with pytest.raises(linjac.TangentError):
                    linear_fn(jnp.ones(4, F))
        except Exception as err:
            errors.append(err)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with linjac.Monitor() as monitor:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert errors == []
    found = {entry: row for (entry, _), row in rows(monitor).items()}
    assert (found["jacobian"]["calls"], found["jacobian"]["directions"], found["jacobian"]["refused"]) == (4, 12, {})
    assert found["linear_fn"]["refused"] == {"TangentError: shape": 4}
    assert monitor.snapshot()["totals"]["traces"] == 1


# turned off while calls run -------------------------------------------------------------------------------------------
def test_turned_off_before_the_function_looks_the_next_call_is_counted(monkeypatch):
    """As another thread may, between the look at `active` and the call."""
    monitor, jac = linjac.Monitor(), linjac.jacobian(fresh())

    class Stopping(_watch.Call):
        def __init__(self, *args):
            super().__init__(*args)
            monitor.stop()

    with monkeypatch.context() as patch:
        patch.setattr(_watch, "Call", Stopping)
        monitor.start()
        jac(X)
    with monitor:
        jac(X)
        jac(X)
    assert only_row(monitor)["calls"] == 3


def test_a_call_in_which_it_is_turned_off_is_counted_whole_and_limited():
    monitor = linjac.Monitor(max_directions=8)

    def fun(x):
        if monitor._depth:
            monitor.stop()
        return tall(x)

    monitor.start()
    linjac.jacobian(fun)(X)
    snapshot = monitor.snapshot()
    assert (only_row(monitor)["calls"], only_row(monitor)["directions"]) == (1, 3)
    assert sum(function["traces"] for function in snapshot["functions"].values()) == 1

    def long(x):
        if monitor._depth:
            monitor.stop()
        return jnp.outer(x, x)[:, :2]

    monitor.start()
    with pytest.raises(linjac.LimitError, match="max_directions"):
        linjac.jacobian(long)(array(real(9, seed=4)))


WITH_AUX = {
    "jacobian": (lambda fun: linjac.jacobian(fun, has_aux=True), 12 + 100),
    "value_and_jacobian": (lambda fun: linjac.value_and_jacobian(fun, has_aux=True), 12 + 4 + 100),
    "op by op": (lambda fun: linjac.value_and_jacobian(fun, has_aux=True, jit=False), 12 + 4 + 100),
    "linearize_many": (lambda fun: functools.partial(linjac.linearize_many, fun, has_aux=True), 4 + 100),
}


@pytest.mark.parametrize("name", WITH_AUX)
def test_value_and_aux_count_in_the_result(name):
    transform, numbers = WITH_AUX[name]

    def fun(x):
        return 2 * tall(x) - tall(x), jnp.broadcast_to(x[0], (100,))

    want = numbers * FLOAT + (linjac.residual_bytes(fun, X, has_aux=True) if name == "linearize_many" else 0)
    with linjac.Monitor(max_result_bytes=want):
        transform(fun)(X)
    with linjac.Monitor(max_result_bytes=want - 1), pytest.raises(linjac.LimitError, match=f"wanted {want:,}"):
        transform(fun)(X)


def test_a_failing_call_inside_a_trace_counts_as_traced():
    monitor = linjac.Monitor()

    def outer(y):
        with contextlib.suppress(linjac.TangentError):
            linjac.linearize_many(fresh(), X)[1](V[:2])
        return y

    with monitor:
        jax.jit(outer)(X)
    assert {(row["calls"], row["traced_calls"]) for row in monitor.snapshot()["entries"]} == {(0, 1)}


# what was got round ---------------------------------------------------------------------------------------------------
def test_threads_that_trace_at_once_share_one_limit():
    begun = threading.Barrier(6)

    def fun(x):
        return jnp.sin(x)

    def work(size):
        begun.wait()
        with contextlib.suppress(linjac.LimitError):
            linjac.jacobian(fun)(jnp.ones(size, F))

    with linjac.Monitor(max_signatures=1) as monitor:
        threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    totals = monitor.snapshot()["totals"]
    assert (totals["traces"], totals["refused"]) == (1, 5)


def test_another_context_and_a_function_by_value_are_signatures_too():
    def smooth(x):
        return jnp.cos(x)

    def branches(x):
        return jnp.sin(x) if x.sum() > -9 else x

    with linjac.Monitor(max_signatures=1):
        linjac.jacobian(smooth)(X)
        with jax.default_matmul_precision("highest"), pytest.raises(linjac.LimitError, match="max_signatures"):
            linjac.jacobian(smooth)(X)
        with pytest.warns(linjac.PerformanceWarning):
            linjac.jacobian(branches)(X)
        linjac.jacobian(branches)(X + 1)
        with pytest.raises(linjac.LimitError, match="max_signatures"):
            linjac.jacobian(branches)(X[:2])


@pytest.mark.parametrize("name", ["jvp_many", "vjp_many"])
def test_aux_of_a_batch_counts_in_the_result(name):
    def fun(x):
        return tall(x), jnp.broadcast_to(x[0], (100,))

    run = {
        "jvp_many": lambda: linjac.jvp_many(fun, (X,), (BATCH,), has_aux=True),
        "vjp_many": lambda: linjac.vjp_many(fun, (X,), jnp.ones((2, 4), F), has_aux=True),
    }[name]
    want = (100 + {"jvp_many": 5 * 4, "vjp_many": 2 * 3}[name]) * FLOAT
    with linjac.Monitor(max_result_bytes=want):
        run()
    with linjac.Monitor(max_result_bytes=want - 1), pytest.raises(linjac.LimitError, match=f"wanted {want:,}"):
        run()


def test_a_candidate_beyond_a_limit_is_not_measured():
    def fun(x):
        return jnp.tanh(jnp.stack([x[0], x[1], x[0] * x[1], x.sum()]))

    with linjac.Monitor(max_directions=2):
        assert "rev is beyond a limit" in str(linjac.plan_jacobian(fun, mode="measure")(X[:2]))
        linjac.jacobian(fun, mode="measure")(X[:2])
    assert "measured: fwd" in str(linjac.plan_jacobian(fun, mode="measure")(X[:2]))


def test_a_held_or_concrete_first_leaf_hides_no_trace():
    def step(state):
        return jnp.tanh(state["x"]) * state["count"].astype(F)

    constant = jnp.ones(3, F)
    monitor = linjac.Monitor(non_finite=True)
    with monitor:
        jax.jit(lambda s: linjac.jacobian(step)(s)["x"])({"x": X, "count": jnp.array(3)})
        jax.jit(lambda x: linjac.linearize_many(lambda _: constant, x, jit=False)[0] + x)(X)
    totals = monitor.snapshot()["totals"]
    assert (totals["calls"], totals["traced_calls"], totals["failed"]) == (0, 2, 0)


def test_odd_names_odd_arguments_and_odd_errors():
    class Odd:
        def __call__(self, x):
            return 2.0 * x

    class Theirs(ValueError):
        kind = "patient 4711"

    def bad(x):
        raise Theirs("linjac.jacobian said no")

    odd = Odd()
    odd.__qualname__ = 5
    with linjac.Monitor() as monitor:
        linjac.linearize_many(odd, X)
        with pytest.raises(Theirs):
            linjac.jacobian(bad)(X)
        with pytest.raises(ValueError, match="key"):
            linjac.jacobian(lambda d: d[1])({1: X, "a": X})
    text = json.dumps(monitor.snapshot())
    assert "4711" not in text
    assert any(name.endswith("Odd") for _, name in rows(monitor))
    assert monitor.snapshot()["totals"]["failed"] + monitor.snapshot()["totals"]["refused"] == 2
    assert [row["failed"] for (_, name), row in rows(monitor).items() if name.endswith("bad")] == [{"Theirs": 1}]

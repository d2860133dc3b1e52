"""measure_jacobian: what a report holds, who wins, what is refused. The clock is a fake wherever a figure is tested."""

import importlib.util
import json
import random
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linjac
from dense import Counted, settings_of
from linjac import _decide, _modes, _timing
from scenarios import BY_NAME, FULL, SHORT, C, F, array, cplx, real

X3, X6 = array(real(3, seed=81, low=0.3)), array(real(6, seed=82))
W = array(real(3, 6, seed=83))
EPS = float(jnp.finfo(F).eps)
ROOT = f"{EPS**0.5:.2g}"


def square(x):
    return x * jnp.sin(x)


def wide(x):
    return jnp.sin(W @ x)


def masked(x):
    """At 0 forward mode is right, and reverse mode multiplies 0 by infinity."""
    return jnp.where(x > 0, jnp.sqrt(x), jnp.zeros_like(x))


def halt(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: 0.5 * x, x)


def branches(x):
    return x * 2.0 if x[0] > 0 else x * jnp.sin(x)


def double(_, x):
    return 2.0 * x


def triple(_, c):
    return 3.0 * c


def mistransposed(x):
    """Linear, with a transpose that is off by a factor of 1.5. JAX cannot map it, hence the chunks of 1."""
    return jax.custom_derivatives.linear_call(double, triple, (), x)


class Clock:
    """A clock that stands still but for the candidates, each of which takes what it is told, round by round."""

    def __init__(self, monkeypatch, *durations):
        self.now = 0.0
        self.orders = []
        monkeypatch.setattr(_timing, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(_modes, "in_turns", self._in_turns(durations))
        monkeypatch.setattr(_modes, "warm_seconds", lambda run: 1.0)  # so that a sample is one call

    def _in_turns(self, durations):
        def in_turns(runs, calls, **options):
            ticking = [self._tick(i, run, list(row)) for i, (run, row) in enumerate(zip(runs, durations, strict=True))]
            return _timing.in_turns(ticking, calls, **options)

        return in_turns

    def _tick(self, number, run, durations):
        def ticking():
            self.orders.append(number)
            self.now += durations.pop(0)
            return run()

        return ticking


def measured(monkeypatch, *durations, fun=square, x=X3, **options):
    """A report whose samples are these."""
    Clock(monkeypatch, *durations)
    return linjac.measure_jacobian(fun, rounds=len(durations[0]), **options)(x)


# What a report holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["blocks", "matrix"])
def test_every_possible_mode_is_measured(layout):
    report = linjac.measure_jacobian(wide, rounds=7, layout=layout)(X6)
    assert [timing.label for timing in report.candidates] == ["rev", "fwd"]  # the rule of sizes first
    assert (report.m, report.n, report.ruled_out, report.yardsticks, report.compiled) == (3, 6, (), (), True)
    assert report.title == f"wide({SHORT}[6])"
    for timing in report.candidates:
        assert timing.plan == linjac.plan_jacobian(wide, mode=timing.label, layout=layout)(X6)
        assert timing.scratch_bytes == timing.plan.compile()
        assert timing.result_bytes == timing.plan.result_bytes == 18 * jnp.dtype(F).itemsize
        assert len(timing.seconds) == 7
        assert min(timing.seconds) > 0
        assert timing.compile_seconds > 0
        assert timing.calls >= 1
        assert not timing.from_cache
    assert report["fwd"] is report.candidates[1]
    with pytest.raises(KeyError):
        report["sideways"]
    assert report.environment.backend == jax.default_backend()
    assert report.environment.jax == jax.__version__


def test_agreement_is_reported_block_by_block():
    def fun(tree, y):
        return {"a": tree["u"] * y, "b": jnp.sum(tree["u"]) + tree["v"]}

    tree = {"u": X3, "v": array(0.5), "none": None, "count": jnp.arange(2)}
    report = linjac.measure_jacobian(fun, (0, 1), rounds=1, yardsticks=False)(tree, array(2.0))
    assert {entry.label for entry in report.agreement} == {report.candidates[1].label}
    assert [(entry.output, entry.input) for entry in report.agreement] == [
        (f"output['{out}']", into) for out in "ab" for into in ("args[0]['u']", "args[0]['v']", "args[1]")
    ]
    assert all(entry.agrees and entry.same_nonfinite for entry in report.agreement)
    assert report.agreement[0].allowed == EPS**0.5
    assert report.tolerances == "from the dtype"


def test_the_dictionary_survives_json():
    report = linjac.measure_jacobian(wide, rounds=2, yardsticks=True)(X6)
    found = report.to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [entry["label"] for entry in found["candidates"]] == ["rev", "fwd"]
    assert [entry["label"] for entry in found["yardsticks"]] == ["jax.jacfwd", "jax.jacrev"]
    assert found["candidates"][0]["seconds"] == list(report.candidates[0].seconds)
    assert found["candidates"][0]["plan"] == str(report.candidates[0].plan)
    assert found["candidates"][0]["n"] == 2
    assert found["environment"] == report.environment.to_dict()


def test_quantiles(monkeypatch):
    report = measured(monkeypatch, [float(i) for i in range(1, 22)], [50.0] * 21, seconds=1e6)
    timing = report.candidates[0]
    found = [timing.to_dict()[name] for name in ("min", "q1", "median", "q3", "p95")]
    assert found == [1.0, 6.0, 11.0, 16.0, 20.0]
    assert timing.median == 11.0


def test_printed(monkeypatch):
    report = measured(monkeypatch, [0.001] * 6, [2.0] * 6)
    lines = str(report).splitlines()
    assert lines[0] == f"linjac.measure_jacobian: square({SHORT}[3]), 3 outputs, 3 inputs"
    assert lines[1] == "fwd is the fastest: rev takes 2e+03 [2e+03, 2e+03] times as long as fwd"
    assert lines[2].split() == ["compile", "min", "q1", "median", "q3", "p95", "samples", "scratch", "result"]
    assert lines[3].split()[0] == "fwd"
    assert lines[3].split()[3:14] == ["1", "ms", "1", "ms", "1", "ms", "1", "ms", "1", "ms", "6x1"]
    assert lines[4].split()[3:14] == ["2", "s", "2", "s", "2", "s", "2", "s", "2", "s", "6x1"]
    scratch = report["rev"].scratch_bytes
    assert lines[4].split()[14:] == [str(scratch), "B", str(9 * jnp.dtype(F).itemsize), "B"]
    assert lines[5].startswith("  rev agrees with fwd to ")
    assert lines[5].endswith(f" of the largest element of a block (allowed {ROOT}, from the dtype)")
    assert (
        lines[6] == "  ratios: median over rounds of pairs in the same round [95 % interval]; samples: rounds x calls"
    )
    assert [line[2:] for line in lines[7:]] == str(report.environment).splitlines()


def test_yardsticks_stand_beside_the_plan(monkeypatch):
    report = measured(monkeypatch, [1.0] * 6, [2.0] * 6, [3.0] * 6, [0.5] * 6, yardsticks=True)
    assert report.winner == "fwd"  # a yardstick does not win
    assert [timing.label for timing in report.yardsticks] == ["jax.jacfwd", "jax.jacrev"]
    assert [timing.plan for timing in report.yardsticks] == [None, None]
    assert report.ratio("jax.jacrev", "fwd") == (0.5, 0.5, 0.5)
    lines = str(report).splitlines()
    assert "  jax.jacfwd takes 3 [3, 3] times as long as fwd" in lines
    assert "  jax.jacrev takes 0.5 [0.5, 0.5] times as long as fwd" in lines
    assert {entry.label for entry in report.agreement} == {"rev", "jax.jacfwd", "jax.jacrev"}
    figures = jax.jit(jax.jacfwd(square)).lower(X3).compile().memory_analysis()
    assert report["jax.jacfwd"].scratch_bytes == figures.temp_size_in_bytes


@pytest.mark.parametrize(
    "name", ["custom_node", "aux", "static_arguments", "argnums_pair", "holomorphic", "empty_output"]
)
@pytest.mark.parametrize("layout", ["blocks", "matrix"])
def test_yardsticks_agree(name, layout):
    scenario = BY_NAME[name]
    options = settings_of(scenario)
    report = linjac.measure_jacobian(scenario.fun, **options, rounds=1, layout=layout, yardsticks=True)(
        *scenario.primals
    )
    assert report.disagreements == ()
    assert {timing.label for timing in report.yardsticks} == {"jax.jacfwd", "jax.jacrev"}
    assert report.ruled_out == ()


def test_a_yardstick_that_cannot_do_it_is_ruled_out():
    report = linjac.measure_jacobian(lambda x: jnp.exp(x.astype(C)), rounds=1, yardsticks=True)(X3)
    assert [timing.label for timing in report.yardsticks] == ["jax.jacfwd"]
    (ruled,) = report.ruled_out
    assert ruled[0] == "jax.jacrev"
    assert ruled[1].startswith("TypeError: jacrev requires real-valued outputs")
    assert f"  jax.jacrev ruled out: {ruled[1]}" in str(report).splitlines()


# Who wins -------------------------------------------------------------------------------------------------------------


def test_the_interval_is_made_of_order_statistics():
    ones = [1.0] * 30
    assert _timing.paired_ratio([float(i) for i in range(1, 31)], ones) == (15.5, 10.0, 21.0)
    assert _timing.paired_ratio([3.0, 1.0, 2.0, 6.0, 5.0, 4.0], ones[:6]) == (3.5, 1.0, 6.0)
    assert _timing.paired_ratio([1.0, 2.0, 3.0, 4.0, 5.0], ones[:5]) == (3.0, 0.0, float("inf"))
    assert _timing.paired_ratio([2.0, 6.0], [1.0, 2.0]) == (2.5, 0.0, float("inf"))  # pairs, not medians


@pytest.mark.parametrize("n", [6, 9, 30, 101])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    """Of 2,000 experiments with a known median."""
    draw = np.random.default_rng(n)
    held = 0
    for _ in range(2000):
        _, low, high = _timing.paired_ratio(draw.lognormal(0.0, 1.0, n).tolist(), [1.0] * n)
        held += low <= 1.0 <= high
    assert 0.94 < held / 2000 < 0.985


def test_a_clear_winner(monkeypatch):
    report = measured(monkeypatch, [2.0, 2.2, 2.0, 9.0, 2.0, 2.0], [1.0, 1.1, 1.9, 1.0, 1.0, 1.0])
    assert report.winner == "rev"
    assert report.plan is report["rev"].plan
    assert report.verdict == "rev is the fastest: fwd takes 2 [1.05, 9] times as long as rev"
    assert report.to_dict()["winner"] == "rev"
    J = linjac.jacobian(square, mode=report.plan)(X3)
    assert linjac.plan_jacobian(square, mode=report.plan)(X3).mode == "rev"
    np.testing.assert_allclose(J, jax.jacrev(square)(X3), rtol=1e-5)


def test_no_clear_winner(monkeypatch):
    """The medians differ by a factor of two, but not in every pair."""
    report = measured(monkeypatch, [2.0, 2.0, 2.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 2.0])
    assert report.winner is None
    assert report.plan is report["fwd"].plan  # the rule of sizes
    said = "no clear winner: fwd takes 2 [0.5, 2] times as long as rev; by the rule of sizes fwd"
    assert report.verdict == said
    assert str(report).splitlines()[1] == said
    assert report.to_dict()["winner"] is None


def test_a_machine_that_slows_down_for_all_does_not_blur_the_pairs(monkeypatch):
    busy = [1.0, 1.0, 10.0, 10.0, 1.0, 10.0, 1.0]
    report = measured(monkeypatch, busy, [1.1 * one for one in busy])
    assert report.winner == "fwd"
    assert report["rev"].quantile(0.0) < report["fwd"].quantile(1.0)  # the distributions do overlap


def test_too_few_rounds_have_no_winner(monkeypatch):
    report = measured(monkeypatch, [1.0] * 5, [2.0] * 5)
    assert report.winner is None
    words = "no clear winner: rev takes 2 (too few rounds for an interval) times as long as fwd"
    assert report.verdict == f"{words}; by the rule of sizes fwd"


def test_the_winner_beats_every_other(monkeypatch):
    options = {"fun": wide, "x": X6, "chunk_size": [None, 2], "modes": "fwd"}
    report = measured(monkeypatch, [1.0] * 6, [1.5] * 6, **options)
    assert [timing.label for timing in report.candidates] == ["fwd, chunk 6", "fwd, chunk 2"]
    assert report.winner == "fwd, chunk 6"
    options["modes"] = ["fwd", "rev"]
    near = [1.0, 1.0, 1.1, 1.1, 0.9, 0.9]
    report = measured(monkeypatch, near, [1.5] * 6, [1.0] * 6, [3.0] * 6, **options)
    assert [timing.label for timing in report.candidates][2:] == ["rev, chunk 3", "rev, chunk 2"]
    assert report.winner is None
    assert report.verdict == (
        "no clear winner: rev, chunk 3 takes 1 [0.909, 1.11] times as long as fwd, chunk 6; "
        "by the rule of sizes rev, chunk 3"
    )
    assert report.plan.chunk_size == 3


def test_the_only_candidate(monkeypatch):
    report = measured(monkeypatch, [1.0], modes="rev")
    assert (report.winner, report.verdict, report.agreement) == ("rev", "rev is the only candidate", ())


def test_candidates_that_disagree_have_no_winner(monkeypatch):
    report = measured(monkeypatch, [1.0] * 6, [2.0] * 6, fun=masked, x=array([0.0, 4.0]))
    assert report.winner is None
    assert report.verdict == "no winner: the candidates disagree; linjac.testing.check_jacobian says where"
    (entry,) = report.disagreements
    assert (entry.label, entry.output, entry.input) == ("rev", "output", "args[0]")
    assert not entry.same_nonfinite
    assert entry.difference == 0.0  # where both are finite
    said = f"rev: output with respect to args[0]: 0 of the largest element, allowed {ROOT}"
    assert f"  DIFFERS from fwd: {said}, and NaN or infinities are in other places" in str(report).splitlines()


def test_a_wrong_transpose_is_found():
    report = linjac.measure_jacobian(mistransposed, rounds=1, chunk_size=1)(X3)
    (entry,) = report.disagreements
    assert entry.difference == pytest.approx(1 / 3)
    assert entry.same_nonfinite
    assert report.winner is None
    lenient = linjac.measure_jacobian(mistransposed, rounds=6, rtol=0.5, chunk_size=1)(X3)
    assert lenient.disagreements == ()
    assert lenient.tolerances == "given"


@pytest.mark.skipif(not FULL, reason="needs float64 to tell float32 from")
def test_equal_nan_agrees_and_size_is_relative():
    report = linjac.measure_jacobian(lambda x: jnp.nan * x, rounds=1)(array(0.5))
    (entry,) = report.agreement
    assert entry.agrees
    big = array([1e12, 1.0])
    assert _modes._difference(np.asarray(big), np.asarray(big + 1.0)) == (pytest.approx(1e-12), True)
    nan = np.array([np.nan, np.inf, 1.0])
    assert _modes._difference(nan, nan) == (0.0, True)
    assert _modes._difference(nan, np.array([np.nan, -np.inf, 1.0])) == (0.0, False)
    assert _modes._difference(np.zeros(2), np.zeros(2)) == (0.0, True)
    assert _modes._difference(np.zeros(2), np.ones(2)) == (1.0, True)
    assert _modes._difference(np.zeros((0, 2)), np.zeros((0, 2))) == (0.0, True)


# How it is measured ---------------------------------------------------------------------------------------------------


def test_candidates_take_turns_in_an_order_shuffled_anew(monkeypatch):
    clock = Clock(monkeypatch, [1.0] * 8, [1.0] * 8)
    linjac.measure_jacobian(square, rounds=8, seconds=1e6)(X3)
    rounds = [tuple(clock.orders[i : i + 2]) for i in range(0, 16, 2)]
    assert set(rounds) == {(0, 1), (1, 0)}
    again = Clock(monkeypatch, [1.0] * 8, [1.0] * 8)
    linjac.measure_jacobian(square, rounds=8, seconds=1e6)(X3)
    assert again.orders == clock.orders
    order, shuffle = [0, 1], random.Random(0).shuffle
    shuffle(order)
    assert rounds[0] == tuple(order)


def test_time_is_up_after_six_rounds_at_least(monkeypatch):
    report = measured(monkeypatch, [10.0] * 30, [10.0] * 30, seconds=1.0)
    assert [len(timing.seconds) for timing in report.candidates] == [6, 6]
    report = measured(monkeypatch, [10.0] * 30, [10.0] * 30, seconds=155.0)
    assert [len(timing.seconds) for timing in report.candidates] == [8, 8]
    report = measured(monkeypatch, [10.0] * 2, [10.0] * 2, seconds=1.0)
    assert [len(timing.seconds) for timing in report.candidates] == [2, 2]


def test_a_sample_is_the_mean_of_calls_that_are_waited_for(monkeypatch):
    waited = []
    now = iter([0.0, 10.0, 14.0, 20.0])
    monkeypatch.setattr(_timing, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    assert _timing.in_turns([lambda: "out"], [4], rounds=1, seconds=1.0, least=6) == [[1.0]]
    assert waited == ["out"] * 4
    assert [_timing.calls_in_sample(seconds) for seconds in (1.0, 0.001, 1e-6, 0.0)] == [1, 2, 100, 100]


def test_the_function_is_traced_once_and_called_no_more():
    counted = Counted(square)
    linjac.measure_jacobian(counted.fun, rounds=3)(X3)
    assert counted.calls == 1


def test_the_answer_that_measure_caches_is_neither_used_nor_changed(monkeypatch):
    asked = []

    def fastest(*args):
        asked.append(args[-1][0].mode)
        return args[-1][0]

    monkeypatch.setattr(_decide, "fastest", fastest)
    fun = Counted(square).fun
    linjac.measure_jacobian(fun, rounds=1)(X3)
    assert asked == []
    first = linjac.plan_jacobian(fun, mode="measure")(X3)
    assert asked == ["fwd"]
    linjac.measure_jacobian(fun, rounds=1)(X3)
    assert linjac.plan_jacobian(fun, mode="measure")(X3) == first
    assert asked == ["fwd"]


def test_a_program_from_the_compilation_cache_is_marked(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: getattr(jax.config, name) for name in names}
    from jax.experimental.compilation_cache import compilation_cache

    try:
        for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        first = linjac.measure_jacobian(square, rounds=1)(X3)
        again = linjac.measure_jacobian(square, rounds=1)(X3)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert [timing.from_cache for timing in first.candidates] == [False, False]
    assert [timing.from_cache for timing in again.candidates] == [True, True]
    assert "* read from the compilation cache, not compiled" in str(again)
    assert "ms*" in str(again)


def test_chunks_are_candidates_and_equal_ones_count_once():
    report = linjac.measure_jacobian(wide, rounds=1, chunk_size=(None, 1, 2, 100))(X6)
    assert [timing.label for timing in report.candidates] == [
        *("rev, chunk 3", "rev, chunk 1", "rev, chunk 2"),
        *("fwd, chunk 6", "fwd, chunk 1", "fwd, chunk 2"),
    ]
    assert report.disagreements == ()
    assert [timing.plan.chunks for timing in report.candidates] == [1, 3, 2, 1, 6, 3]
    one = linjac.measure_jacobian(wide, rounds=1, chunk_size=np.int64(2))(X6)
    assert [(timing.label, timing.plan.chunk_size) for timing in one.candidates] == [("rev", 2), ("fwd", 2)]


def test_memory_budget_bounds_the_chunks():
    report = linjac.measure_jacobian(wide, rounds=1, memory_budget=1, modes="fwd")(X6)
    assert report["fwd"].plan.chunk_size == 1


def test_keyword_arguments_and_bound_arguments():
    def fun(x, *, power, name):
        assert name == "n"
        return x**power

    report = linjac.measure_jacobian(fun, rounds=1, yardsticks=True)(X3, power=array(2.0), name="n")
    assert report.title == f"fun({SHORT}[3], {SHORT}[])"
    assert report.disagreements == ()
    assert len(report.yardsticks) == 2


def test_allow_int():
    report = linjac.measure_jacobian(lambda x, k: x * k.astype(F), (0, 1), rounds=1, allow_int=True, yardsticks=True)(
        X3, jnp.arange(3)
    )
    assert [timing.label for timing in report.yardsticks] == ["jax.jacrev"]  # jax.jacfwd has no allow_int
    assert report.disagreements == ()


# One mode only, and none ----------------------------------------------------------------------------------------------


def test_a_mode_that_cannot_work_is_ruled_out():
    report = linjac.measure_jacobian(halt, rounds=2)(X3)
    assert [timing.label for timing in report.candidates] == ["fwd"]
    assert report.winner == "fwd"
    ((mode, reason),) = report.ruled_out
    assert mode == "rev"
    assert reason.startswith("a while_loop with a trip count known at run time only at ")
    assert f"  rev ruled out: {reason}" in str(report).splitlines()


def test_only_modes_that_cannot_work():
    with pytest.raises(linjac.ModeError) as caught:
        linjac.measure_jacobian(halt, modes=["rev"])(X3)
    lines = str(caught.value).splitlines()
    assert lines[0] == "linjac.measure_jacobian: mode='rev' cannot work here"
    assert lines[-1] == "use mode='fwd'"


def test_a_candidate_that_runs_out_of_memory_is_ruled_out(monkeypatch):
    compile_ = _modes._compile

    def failing(function, *args):
        runnable = compile_(function, *args)
        if function.args[1].direction != "reverse":
            return runnable

        def run():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

        return runnable._replace(run=run)

    monkeypatch.setattr(_modes, "_compile", failing)
    report = linjac.measure_jacobian(square, rounds=1)(X3)
    assert report.ruled_out == (("rev", "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"),)
    assert report.winner == "fwd"
    with pytest.raises(jax.errors.JaxRuntimeError):
        linjac.measure_jacobian(square, modes="rev", rounds=1)(X3)


def test_a_result_that_cannot_fit_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(_modes, "_compile", None)
    with pytest.raises(linjac.MemoryBudgetError) as caught:
        linjac.measure_jacobian(jnp.sin)(array(np.zeros(10_000_000)))
    assert str(caught.value).startswith("linjac.measure_jacobian: the Jacobian is 10000000 x 10000000, ")


def test_a_function_that_branches_on_values_is_measured_op_by_op():
    with pytest.warns(linjac.PerformanceWarning, match="needs the value of an array in Python"):
        report = linjac.measure_jacobian(branches, rounds=2)(X3)
    assert not report.compiled
    assert {timing.label for timing in report.candidates} == {"fwd", "rev"}
    assert report.disagreements == ()
    assert [timing.compile_seconds for timing in report.candidates] == [None, None]
    assert [timing.scratch_bytes for timing in report.candidates] == [None, None]
    assert all(len(timing.seconds) == 2 for timing in report.candidates)
    lines = str(report).splitlines()
    assert "  op by op: the function branches in Python on values, so nothing is compiled" in lines
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, jax.jacfwd], ids=["jit", "vmap", "jacfwd"])
def test_inside_a_trace(wrap):
    with pytest.raises(TypeError) as caught:
        wrap(lambda x: linjac.measure_jacobian(square)(x).m)(jnp.stack([X3, X3]))
    assert str(caught.value) == (
        "linjac.measure_jacobian: nothing can be measured inside a trace, where nothing runs\n"
        "call it outside jax.jit, jax.vmap and jax.grad, and inside pass report.plan as mode to linjac.jacobian"
    )


def test_inside_a_trace_with_values_from_outside():
    def traced(x):
        linjac.measure_jacobian(square)(np.ones(3, F))
        return x

    with pytest.raises(TypeError, match="inside a trace"):
        jax.jit(traced)(X3)


def test_types_have_no_values():
    with pytest.raises(TypeError) as caught:
        linjac.measure_jacobian(square)(jax.ShapeDtypeStruct((3,), F))
    assert str(caught.value).startswith("linjac.measure_jacobian: these arguments are types without values\n")


def test_a_deleted_argument():
    x = array(real(3, seed=84))
    x.delete()
    with pytest.raises(linjac.PointError, match=r"linjac\.measure_jacobian: an array has been deleted"):
        linjac.measure_jacobian(square)(x)


def test_what_jacobian_refuses():
    with pytest.raises(TypeError, match=r"linjac\.measure_jacobian: these arguments have no derivative"):
        linjac.measure_jacobian(lambda x: 2 * x)(jnp.arange(3))
    with pytest.raises(TypeError, match=r"linjac\.measure_jacobian: a function from complex to complex"):
        linjac.measure_jacobian(jnp.conj)(array(cplx(3)))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"modes": "forward"}, ValueError, "modes must be one of 'fwd', 'rev', got 'forward'"),
        ({"modes": ["fwd", "auto"]}, ValueError, "modes must be one of 'fwd', 'rev', got 'auto'"),
        ({"modes": 3}, TypeError, "modes must be one of 'fwd', 'rev', got int"),
        ({"modes": []}, ValueError, "modes names no mode\nleave it out to measure all that are possible"),
        ({"chunk_size": []}, ValueError, "chunk_size names no candidate\nleave it out for the default"),
        (
            {"chunk_size": [8, 0]},
            ValueError,
            "chunk_size must be a positive int or None (chosen from memory_budget), got 0",
        ),
        (
            {"chunk_size": "8"},
            TypeError,
            "chunk_size must be a positive int or None (chosen from memory_budget), got str",
        ),
        ({"memory_budget": 0}, ValueError, "memory_budget must be a positive int or None (16 MiB), got 0"),
        ({"layout": "dense"}, ValueError, "layout must be one of 'blocks', 'matrix', got 'dense'"),
        ({"rounds": 0}, ValueError, "rounds must be a positive int or None (30), got 0"),
        ({"rounds": True}, TypeError, "rounds must be a positive int or None (30), got True"),
        ({"seconds": 0}, ValueError, "seconds must be a positive finite number, got 0"),
        ({"seconds": float("nan")}, ValueError, "seconds must be a positive finite number, got nan"),
        ({"seconds": "1"}, TypeError, "seconds must be a positive finite number, got str"),
        ({"seconds": True}, TypeError, "seconds must be a positive finite number, got bool"),
        ({"rtol": -1.0}, ValueError, "rtol must be a non-negative finite number, got -1.0"),
        ({"rtol": "tight"}, TypeError, "rtol must be a non-negative finite number, got str"),
        ({"yardsticks": 1}, TypeError, "yardsticks must be True or False, got int"),
        ({"has_aux": 0}, TypeError, "has_aux must be True or False, got int"),
        ({"argnums": None}, TypeError, "argnums must be an int or a sequence of ints, got None"),
    ],
)
def test_options_are_refused_when_it_is_called(options, kind, text):
    with pytest.raises(kind) as caught:
        linjac.measure_jacobian(square, **options)
    assert str(caught.value) == f"linjac.measure_jacobian: {text}"


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError) as caught:
        linjac.measure_jacobian(X3)
    assert str(caught.value) == f"linjac.measure_jacobian: fun must be callable, got {SHORT}[3]"


def test_arguments_are_checked_when_its_function_is_called():
    found = linjac.measure_jacobian(square, 1)
    assert found.__name__ == "square"
    with pytest.raises(ValueError) as caught:
        found(X3)
    assert str(caught.value) == "linjac.measure_jacobian: argnums=1 is out of range for 1 positional argument"


# The example ----------------------------------------------------------------------------------------------------------


def test_the_example_draws_every_sample(tmp_path, capsys):
    path = Path(__file__).parents[1] / "docs" / "examples" / "plot_modes.py"
    spec = importlib.util.spec_from_file_location("plot_modes", path)
    plot_modes = importlib.util.module_from_spec(spec)
    drawn = []
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        spec.loader.exec_module(plot_modes)
        panel = plot_modes.draw_panel
        plot_modes.draw_panel = lambda axes, name, report: drawn.append((axes, panel(axes, name, report)))
        reports = plot_modes.main(tmp_path / "modes.png", rounds=2)
    assert [report.plan.m for report in reports] == [2048, 256, 8]
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
    for (axes, _), report in zip(drawn, reports, strict=True):
        timings = [*report.candidates, *report.yardsticks]
        assert [label.get_text() for label in axes.get_yticklabels()] == [timing.label for timing in timings]
        for line, timing in zip(axes.get_lines(), timings, strict=True):
            np.testing.assert_allclose(line.get_xdata(), 1e6 * np.asarray(timing.seconds))
    assert capsys.readouterr().out.count("linjac.measure_jacobian: ") == 3


@pytest.mark.parametrize("switch", [jax.debug_nans, jax.debug_infs, jax.disable_jit])
def test_switches_for_debugging_are_off_meanwhile(switch):
    def fun(x):
        return jnp.log(x - x) * x

    with switch(True):
        report = linjac.measure_jacobian(fun, rounds=1)(X3)
    assert report.compiled
    flags = dict(report.environment.flags)
    assert (flags["jax_debug_nans"], flags["jax_disable_jit"]) == ("False", "False")


@pytest.mark.parametrize("chunks", [[1, 2], (1, 2), range(1, 3), np.array([1, 2])])
def test_several_chunks_in_any_sequence(chunks):
    report = linjac.measure_jacobian(wide, modes="rev", chunk_size=chunks, rounds=1)(X6)
    assert [timing.plan.chunk_size for timing in report.candidates] == [1, 2]


@pytest.mark.parametrize("q", [2.0, -0.1, float("nan")])
def test_a_quantile_is_a_share(q):
    report = linjac.measure_jacobian(wide, rounds=1)(X6)
    with pytest.raises(ValueError, match="q must be a number from 0 to 1"):
        report.candidates[0].quantile(q)

"""The named problems: `linjac.jacobian` against jitted `jax.jacfwd` and `jax.jacrev`, scratch, compile time, overhead.

    python tests/benchmarks/bench_sweeps.py [--recipes] [problem ...]

`--recipes` prints every way to sweep beside the chosen one: look there before changing a rule in `linjac/_choice.py`.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from families import NAMED
from timing import footer, header, interleaved, row, scratch

import linjac
from linjac._choice import make_plan
from linjac._program import Data
from linjac._sweeps import work

# problem -> (mode, yardsticks, at least so many times faster)
SPEED = {
    "tall_8_2048": ("auto", ("jacfwd",), 5.0),
    "tall_16_1024": ("auto", ("jacfwd",), 3.0),
    "tall_32_512": ("auto", ("jacfwd",), 1.8),
    "elementwise_1000": ("rev", ("jacrev",), 6.0),
    "stencil_32": ("rev", ("jacrev",), 1.3),
    "mlp_256": ("auto", ("jacfwd", "jacrev"), 1.4),
}
JAX = {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev}


def speed(name: str, mode: str, yardsticks: tuple[str, ...], bar: float) -> None:
    """Times faster than the better yardstick."""
    fun, x = NAMED[name]()
    programs = {"linjac": jax.jit(linjac.jacobian(fun, mode=mode))}
    programs |= {yardstick: jax.jit(JAX[yardstick](fun)) for yardstick in yardsticks}
    times = interleaved({key: functools.partial(program, x) for key, program in programs.items()}, cap=4.0)
    best = min(yardsticks, key=times.median)
    ratio = times.ratio(best, "linjac")
    row(f"{name}, {mode}, against {best}", f"{ratio:.2f}x faster", f">= {bar}x", ratio >= bar)


def recipes(name: str) -> None:
    """Every way to sweep, relative to the better of jacfwd and jacrev."""
    fun, x = NAMED[name]()
    plan = linjac.plan_jacobian(fun)(x)
    program: Any = plan.program
    traced = linjac._tracing.trace("bench", linjac._arguments.take_apart("bench", "args", fun, (x,), {}, 0))
    calls: dict[str, Callable[[], Any]] = {
        key: functools.partial(jax.jit(function(fun)), x) for key, function in JAX.items()
    }
    for mode in ("fwd", "rev"):
        base = make_plan("bench", program, Data(traced.point, traced.constants, []), plan.options._replace(mode=mode))
        plain = base.recipe._replace(fused=False, pinned=False, laid_out=False, cut=False)
        options = {"": {}, " pinned": {"pinned": True}}
        if mode == "fwd":
            options |= {" fused": {"fused": True}, " laid out": {"laid_out": True}}
            options |= {" pinned laid out": {"pinned": True, "laid_out": True}}
        if base.recipe.cut:
            options |= {" cut": {"cut": True}, " cut laid out": {"cut": True, "laid_out": True}}
        for text, choice in options.items():
            function = functools.partial(work, program, plain._replace(**choice), "blocks", False)
            calls[mode + text] = functools.partial(jax.jit(function), traced.constants, traced.point)
    times = interleaved(calls, cap=6.0)
    best = min(JAX, key=times.median)
    for key in calls:
        row(f"  {name} {key}", f"{times.ratio(best, key):.2f}x faster")
    row(f"  {name} chosen", f"{plan.mode} {plan.recipe}")


def memory() -> None:
    """Scratch of two large Jacobians."""
    fun, x = NAMED["visibilities"]()
    ours = linjac.plan_jacobian(fun, mode="rev")(x).compile()
    row("visibilities in reverse, scratch", f"{ours / 1e6:.1f} MB", "<= 24 MB", ours <= 24e6)
    row("  jax.jacrev", f"{scratch(jax.jacrev(fun), x) / 1e6:.0f} MB")
    speed("visibilities", "rev", ("jacrev",), 2.0)
    fun, x = NAMED["dense_4096"]()
    plan = linjac.plan_jacobian(fun)(x)
    share = plan.compile() / plan.result_bytes
    row("dense 4096 x 4096, scratch / result", f"{share:.1%}", "<= 10 %", share <= 0.1)
    programs = {"linjac": jax.jit(linjac.jacobian(fun)), "jacfwd": jax.jit(jax.jacfwd(fun))}
    times = interleaved(
        {key: functools.partial(program, x) for key, program in programs.items()}, rounds=9, target=0.1, cap=60.0
    )
    ratio = times.ratio("linjac", "jacfwd")
    row("dense 4096 x 4096, time / jacfwd", f"{ratio:.2f}", "<= 1.1", ratio <= 1.1)


def compile_time() -> None:
    """Seconds to trace and compile, against jacfwd: medians over fresh functions."""
    for name in ("mlp_256", "tall_8_2048", "elementwise_1000"):
        seconds: dict[str, list[float]] = {"linjac": [], "jacfwd": []}
        for _ in range(7):
            for key, function in (("linjac", linjac.jacobian), ("jacfwd", jax.jacfwd)):
                fun, x = NAMED[name]()
                start = time.perf_counter()
                jax.jit(function(fun)).lower(x).compile()
                seconds[key].append(time.perf_counter() - start)
        ratio = sorted(a / b for a, b in zip(seconds["linjac"], seconds["jacfwd"], strict=True))[3]
        row(f"{name}: compile time / jacfwd", f"{ratio:.2f}", "<= 2", ratio <= 2)


def overhead(name: str) -> None:
    """What an eager call of a compiled Jacobian costs beside the raw executable.

    Where XLA uses threads, these fall asleep while Python works, and waking them costs more than the work: so the raw
    executable is called after as long in Python too.
    """
    fun, x = NAMED[name]()
    eager = linjac.jacobian(fun)
    plan = linjac.plan_jacobian(fun)(x)
    traced = linjac._tracing.trace("bench", linjac._arguments.take_apart("bench", "args", fun, (x,), {}, 0))
    raw = jax.jit(functools.partial(work, plan.program, plan.recipe, "blocks", False))
    run = functools.partial(raw, traced.constants, traced.point)

    def rested() -> Any:
        until = time.perf_counter() + 30e-6
        while time.perf_counter() < until:
            pass
        return run()

    times = interleaved({"eager": functools.partial(eager, x), "raw": run, "rested": rested}, rounds=61)
    micro = _extra(times.samples["eager"], times.samples["raw"])
    row(
        f"eager call of a compiled Jacobian, {name}, over the raw executable",
        f"{micro:.0f} us",
        "<= 40 us",
        micro <= 40,
    )
    micro = _extra(times.samples["rested"], times.samples["raw"])
    row("  the raw executable after 30 us in Python, over itself", f"{micro:.0f} us")


def _extra(above: Sequence[float], below: Sequence[float]) -> float:
    """The median difference in microseconds, pair by pair."""
    return statistics.median(a - b for a, b in zip(above, below, strict=True)) * 1e6


def main(argv: list[str]) -> None:
    """Print the table."""
    header("Jacobians of the named problems")
    names = [arg for arg in argv if not arg.startswith("-")]
    for name, (mode, yardsticks, bar) in SPEED.items():
        if not names or name in names:
            speed(name, mode, yardsticks, bar)
            if "--recipes" in argv:
                recipes(name)
    if "--recipes" in argv and (not names or "rk4_256" in names):
        recipes("rk4_256")  # a tie through a scan, where the ways are close
    if not names:
        speed("stencil_32", "auto", ("jacfwd", "jacrev"), 1.0)
        speed("mlp_deep_256", "auto", ("jacfwd", "jacrev"), 1.0)
        memory()
        compile_time()
        overhead("elementwise_8")
        overhead("tall_8_2048")
    footer()


if __name__ == "__main__":
    main(sys.argv[1:])

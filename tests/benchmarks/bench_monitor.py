"""What `linjac.Monitor` costs: off, on, with each option, and with eight threads.

    python tests/benchmarks/bench_monitor.py [calls] [options] [threads]

A candidate is a short loop of calls in which the monitor is on or off throughout. The candidates take turns, and the
figure is the least that one took minus the least that the other took, per call: what a monitor adds is a few
microseconds of Python, which the work of others on the machine would bury in any other statistic.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from timing import header, per_call, row

import linjac
from linjac import _watch

LOOP = 64  # calls in one loop
ROUNDS = 300
X = jnp.ones(8)
BATCH = jnp.ones((5, 8))
TREE = {f"layer{i}": jnp.ones(3) for i in range(100)}


def fun(x: jax.Array) -> jax.Array:
    """Small, so that what is not work shows."""
    return jnp.tanh(x) * x


def calls() -> Mapping[str, Callable[[], Any]]:
    """Public calls of small functions, warm."""
    linear_fn = linjac.linearize_many(fun, X)[1]
    wide = linjac.linearize_many(lambda tree: jax.tree.map(jnp.sin, tree), TREE)[1]
    jacobian = linjac.jacobian(fun)
    return {
        "linear_fn(v)": lambda: linear_fn(X),
        "linear_fn(v), 100 leaves": lambda: wide(TREE),
        "linear_fn.many": lambda: linear_fn.many(BATCH),
        "jacobian": lambda: jacobian(X),
        "linearize_many": lambda: linjac.linearize_many(fun, X),
    }


def loop(call: Callable[[], Any], monitor: linjac.Monitor | None = None) -> Callable[[], Any]:
    """Many calls, with a monitor on or with none."""

    def run() -> Any:
        if monitor is not None:
            monitor.start()
        out = None
        for _ in range(LOOP):
            out = call()
        if monitor is not None:
            monitor.stop()
        return out

    return run


def added(candidates: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """Microseconds per call of each candidate beyond `off`, and by itself."""
    order, shuffle = list(candidates), random.Random(0).shuffle
    least = dict.fromkeys(order, float("inf"))
    for call in candidates.values():
        jax.block_until_ready(call())
    for _ in range(ROUNDS):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            out = candidates[name]()
            least[name] = min(least[name], (time.perf_counter() - start) / LOOP * 1e6)
            jax.block_until_ready(out)
    return {name: (least[name] - least["off"], least[name]) for name in candidates}


def each_call() -> None:
    """What a monitor adds to each public call, off and on."""
    header("Monitor: what it adds to a call (microseconds)")

    def asks() -> Any:
        return _watch.active and None

    look = (per_call(asks) - per_call(lambda: None)) * 1e6
    row("off: the look at the tuple", f"{look:.3f}", "< 0.1", look < 0.1)
    for name, call in calls().items():
        found = added({"off": loop(call), "on": loop(call, linjac.Monitor())})
        more = found["on"][0]
        row(f"on: {name}", f"{more:.1f} (the call {found['off'][1]:.0f})", "<= 5", more <= 5)


def options() -> None:
    """What each option adds to one product."""
    header("Monitor: linear_fn(v), what an option adds (microseconds)")
    call = calls()["linear_fn(v)"]
    monitors = {
        "on": linjac.Monitor(),
        "limits": linjac.Monitor(max_directions=100, max_result_bytes=1 << 30, max_signatures=100),
        "shapes": linjac.Monitor(shapes=True),
        "non_finite": linjac.Monitor(non_finite=True),
        "completion": linjac.Monitor(completion=True),
    }
    candidates = {"off": loop(call), **{name: loop(call, monitor) for name, monitor in monitors.items()}}
    found = added(candidates)
    for name in monitors:
        row(name, f"{found[name][0]:.1f}")


def threads() -> None:
    """The same with eight threads at once."""
    header("Monitor: 8 threads at once, linear_fn(v) (microseconds per call of all)")
    call = calls()["linear_fn(v)"]

    def together(monitor: linjac.Monitor | None) -> Callable[[], Any]:
        def work() -> None:
            for _ in range(LOOP // 8):
                call()

        def run() -> Any:
            workers = [threading.Thread(target=work) for _ in range(8)]
            if monitor is not None:
                monitor.start()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if monitor is not None:
                monitor.stop()
            return call()

        return run

    found = added({"off": together(None), "on": together(linjac.Monitor())})
    more = found["on"][0]
    row("on", f"{more:.1f} (the call {found['off'][1]:.0f})", "<= 5", more <= 5)


TABLES = {"calls": each_call, "options": options, "threads": threads}

if __name__ == "__main__":
    for wanted in sys.argv[1:] or TABLES:
        TABLES[wanted]()

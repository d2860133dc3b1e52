"""Large batches of directions: `.many` and `jvp_many` against one jitted `jax.vmap` of `jax.jvp`.

    python tests/benchmarks/bench_many.py [sweep] [chunks] [budget]

Three tables: scratch and time with 10,000 directions; chunk sizes; a scan whose residuals do not fit the budget.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import footer, header, interleaved, noise, row, scratch

import linjac
from linjac._directions import balanced

FEW, MANY = 1_000, 10_000


class Problem(NamedTuple):
    """A function of weights and point, and the number of directions for the comparison of chunk sizes."""

    fun: Callable[[Any, jax.Array], jax.Array]
    weights: Any
    x: jax.Array
    count: int

    def closed(self) -> Callable[[jax.Array], jax.Array]:
        """The function of the point alone."""
        return lambda x: self.fun(self.weights, x)

    def directions(self, count: int) -> jax.Array:
        """A batch of directions."""
        return normal(count, *self.x.shape, seed=5)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Float32 standard normals, made outside JAX."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def net(*widths: int, count: int = MANY) -> Problem:
    """A tanh MLP."""
    layers = itertools.pairwise(widths)
    weights = [normal(m, n, seed=i) / np.float32(np.sqrt(n)) for i, (n, m) in enumerate(layers)]

    def fun(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for matrix in weights:
            x = jnp.tanh(matrix @ x)
        return x

    return Problem(fun, weights, normal(widths[0], seed=9), count)


def elementwise() -> Problem:
    """Four elementwise steps on 256 numbers."""

    def fun(scale: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp(-(jnp.sin(x) ** 2)) * jnp.tanh(scale * x)

    return Problem(fun, normal(256), normal(256, seed=1), MANY)


def recurrent(length: int = 32, width: int = 32) -> Problem:
    """A scan of tanh steps."""

    def fun(matrix: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda state, _: (jnp.tanh(matrix @ state), None), x, length=length)[0]

    return Problem(fun, normal(width, width) / np.float32(np.sqrt(width)), normal(width, seed=1), MANY)


PROBLEMS = {
    "MLP 128-256-128": net(128, 256, 128),
    "elementwise 256": elementwise(),
    "scan of 32 steps, 32 wide": recurrent(),
}
CHUNKED = {**PROBLEMS, "MLP 1024-1024-1024": net(1024, 1024, 1024, count=2_048)}


def yardstick(problem: Problem) -> Callable[..., Any]:
    """One vmap of jax.jvp, everything an argument."""

    def all_at_once(weights: Any, x: jax.Array, directions: jax.Array) -> jax.Array:
        return jax.vmap(lambda v: jax.jvp(lambda x: problem.fun(weights, x), (x,), (v,))[1])(directions)

    return all_at_once


def _worst(got: jax.Array, wanted: jax.Array) -> float:
    return float(jnp.max(jnp.abs(got - wanted)) / jnp.max(jnp.abs(wanted)))


# 10,000 directions ----------------------------------------------------------------------------------------------------
def sweep() -> None:
    """Scratch and time with 10,000 directions."""
    header("K = 10,000 directions: scratch at K = 1,000 and 10,000; time / jitted vmap(jvp)")
    for name, problem in PROBLEMS.items():
        fun, at_once = problem.closed(), yardstick(problem)
        few, many = problem.directions(FEW), problem.directions(MANY)
        _, linear_fn = linjac.linearize_many(fun, problem.x)
        jitted = jax.jit(at_once)
        ours = {
            ".many": (lambda f, x, V: f.many(V), linear_fn),
            "jvp_many": (lambda W, x, V: linjac.jvp_many(lambda x: problem.fun(W, x), (x,), (V,)), problem.weights),
        }
        theirs = [scratch(at_once, problem.weights, problem.x, V) for V in (few, many)]
        row(f"{name}: vmap(jvp), scratch", _sizes(theirs))
        for route, (call, held) in ours.items():
            sizes = [scratch(call, held, problem.x, V) for V in (few, many)]
            row(f"{name}: {route}, scratch", _sizes(sizes), "the same", sizes[1] <= 1.05 * sizes[0] + 4096)
        calls = {
            ".many": lambda f=linear_fn, V=many: f.many(V),
            "jvp_many": lambda f=fun, p=problem, V=many: linjac.jvp_many(f, (p.x,), (V,)),
            "vmap(jvp)": lambda f=jitted, p=problem, V=many: f(p.weights, p.x, V),
        }
        times = interleaved(calls, rounds=21, cap=5)
        error = max(_worst(calls[route](), calls["vmap(jvp)"]()) for route in ours)
        for route in ours:
            ratio = times.ratio(route, "vmap(jvp)")
            low, high = times.spread(route, "vmap(jvp)")
            row(f"{name}: {route}, time", f"{ratio:.2f} ({low:.2f} .. {high:.2f})", "<= 1.1", ratio <= 1.1)
        low, high = noise(calls["vmap(jvp)"], rounds=9, cap=2)
        row(f"{name}: noise; largest error", f"{low:.2f} .. {high:.2f}; {error:.0e}")


def _sizes(sizes: list[int]) -> str:
    return " -> ".join(f"{size / 1e6:.2f}" for size in sizes) + " MB"


# chunk sizes ----------------------------------------------------------------------------------------------------------
def chunks() -> None:
    """Time by chunk size, relative to one jitted vmap(jvp)."""
    sizes = (16, 64, 128, 256, 512, 1024)
    header("Time of .many by chunk size / jitted vmap(jvp)")
    print(f"  {'':34s}" + "".join(f"{size:>8d}" for size in sizes) + f"{'default':>9s}{'jvp_many':>10s}")
    for name, problem in CHUNKED.items():
        _, linear_fn = linjac.linearize_many(problem.closed(), problem.x)
        V, jitted, fun = problem.directions(problem.count), jax.jit(yardstick(problem)), problem.closed()
        calls: dict[Any, Any] = {c: lambda c=c, f=linear_fn, V=V: f.many(V, chunk_size=c) for c in sizes}
        calls["default"] = lambda f=linear_fn, V=V: f.many(V)
        calls["jvp_many"] = lambda f=fun, p=problem, V=V: linjac.jvp_many(f, (p.x,), (V,))
        calls["vmap(jvp)"] = lambda f=jitted, p=problem, V=V: f(p.weights, p.x, V)
        times = interleaved(calls, rounds=15, cap=6)
        cells = [f"{times.ratio(key, 'vmap(jvp)'):.2f}" for key in (*sizes, "default", "jvp_many")]
        body = "".join(f"{cell:>8s}" for cell in cells[:-2]) + f"{cells[-2]:>9s}{cells[-1]:>10s}"
        print(f"  {name + f', K = {problem.count}':34s}{body}", flush=True)
        kilobytes = [scratch(lambda f, V, c=c: f.many(V, chunk_size=c), linear_fn, V) / 1e3 for c in sizes]
        print(f"  {'  scratch, kB':34s}" + "".join(f"{size:>8.0f}" for size in kilobytes), flush=True)
        print(f"  {'  directions in a chunk':34s}" + "".join(f"{balanced(problem.count, c)[1]:>8d}" for c in sizes))


# residuals beyond the budget ------------------------------------------------------------------------------------------
def budget() -> None:
    """A scan of 1,000 steps whose residuals exceed `residual_budget`."""
    header("A scan of 1,000 steps, 256 wide, whose residuals exceed residual_budget = 100 kB")
    problem, count = recurrent(1_000, 256), 64
    fun, V = problem.closed(), problem.directions(count)
    needed = linjac.residual_bytes(fun, problem.x)
    _, linear_fn = linjac.linearize_many(fun, problem.x, residual_budget=100_000)
    row("strategy; residuals if they were stored", f"{linear_fn.strategy}; {needed / 1e3:.0f} kB", "recompute")
    for size in (16, None):
        used = scratch(lambda f, V, size=size: f.many(V, chunk_size=size), linear_fn, V)
        row(f".many of {count}, chunk_size={size}: scratch", f"{used / 1e3:.0f} kB", "< residuals", used < needed)
    used = scratch(lambda f, v: f(v), linear_fn, V[0])
    row("a single product: scratch", f"{used / 1e3:.0f} kB", "< residuals", used < needed)
    got, wanted = linear_fn.many(V), jax.jit(yardstick(problem))(problem.weights, problem.x, V)
    worst = max(_worst(a, b) for a, b in zip(got, wanted, strict=True))
    row("largest relative error over the directions", f"{worst:.0e}", "< 1e-4", worst < 1e-4)


def main(which: list[str] | None = None) -> None:
    """Run the tables named, or all."""
    tables = {"sweep": sweep, "chunks": chunks, "budget": budget}
    for name in which or tables:
        tables[name]()
    footer()


if __name__ == "__main__":
    main(sys.argv[1:])

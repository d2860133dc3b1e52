"""One point, many directions: `linjac.linearize_many` against `jax.linearize`.

    python tests/benchmarks/bench_linearize.py [relinearize] [weights] [apply] [static]

Four tables: a new point with 8 directions; 100 MB of closed-over weights; one checked product against a raw one; what a
call costs before any work is done.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import compiles, footer, header, interleaved, live_bytes, noise, per_call, row

import linjac
from linjac._guard import Guard

DIRECTIONS = 8
FORMS = ("direct", "nested jit", "scan")


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Float32 standard normals, made outside JAX so that nothing is compiled."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def net() -> Callable[[jax.Array], jax.Array]:
    """256 -> 512 -> 256, tanh, weights closed over."""
    first, second = normal(512, 256) / 16, normal(256, 512, seed=1) / 22
    return lambda x: jnp.tanh(second @ jnp.tanh(first @ x))


def points(*shape: int) -> Iterator[jax.Array]:
    """Ever new points, made before they are asked for."""
    stock = [normal(*shape, seed=seed) for seed in range(64)]
    while True:
        yield from stock


# 1: a new point, 8 directions -----------------------------------------------------------------------------------------
def relinearize() -> None:
    """Re-linearize at a new point and push 8 directions."""
    header("A new point and 8 directions, 256 -> 512 -> 256 tanh MLP (times faster than each yardstick)")
    fun, fresh = net(), points(256)
    directions = [normal(256, seed=100 + i) for i in range(DIRECTIONS)]
    batch = jnp.stack(directions)

    def ours() -> Any:
        value, linear_fn = linjac.linearize_many(fun, next(fresh))
        return value, [linear_fn(v) for v in directions]

    def ours_batched() -> Any:
        value, linear_fn = linjac.linearize_many(fun, next(fresh))
        return value, linear_fn.many(batch)

    def eager() -> Any:
        value, linear_fn = jax.linearize(fun, next(fresh))
        return value, [linear_fn(v) for v in directions]

    def eager_batched() -> Any:
        value, linear_fn = jax.linearize(fun, next(fresh))
        return value, jax.vmap(linear_fn)(batch)

    def jitted() -> Any:
        value, linear_fn = jax.linearize(fun, next(fresh))
        compiled = jax.jit(linear_fn)
        return value, [compiled(v) for v in directions]

    fast = {"ours": ours, "eager": eager, "ours batched": ours_batched, "eager batched": eager_batched}
    times = interleaved(fast, rounds=41)
    low, high = noise(ours)
    slow = interleaved({"ours": ours, "jit": jitted}, rounds=9)
    gain = times.ratio("eager", "ours")
    row("8 single products / eager jax.linearize", f"{gain:.1f}x faster", ">= 8x", gain >= 8)
    gain = times.ratio("eager batched", "ours batched")
    row(".many / jax.vmap of eager jax.linearize", f"{gain:.1f}x faster")
    gain = times.ratio("eager", "ours batched")
    row(".many / eager jax.linearize, one by one", f"{gain:.1f}x faster")
    gain = slow.ratio("jit", "ours")
    row("8 single products / jax.jit(linear_fn) at each point", f"{gain:.0f}x faster", ">= 100x", gain >= 100)
    row("noise: ours / ours, quartiles", f"{low:.2f} .. {high:.2f}")
    row(
        "for orientation: ours, eager, ours with .many",
        " ".join(f"{times.median(k) * 1e6:.0f}" for k in list(fast)[:3]) + " us",
    )
    count_compiles(fun)


def count_compiles(fun: Callable[[jax.Array], jax.Array]) -> None:
    """Compiles over 100 new points, and over 100 new batches in a position that is not differentiated."""
    weights = {"first": normal(512, 256) / 16, "second": normal(256, 512, seed=1) / 22}

    def outputs(params: Any, data: jax.Array) -> jax.Array:
        return jnp.tanh(data @ params["first"].T) @ params["second"].T

    new_points = [normal(256, seed=seed) for seed in range(101)]
    new_batches = [normal(16, 256, seed=seed) for seed in range(101)]
    along_x, many_x, along_y = normal(256, seed=7), normal(20, 256, seed=8), normal(256, seed=9)
    along_outputs = normal(16, 256, seed=10)

    def at_point(x: jax.Array) -> None:
        _, linear_fn = linjac.linearize_many(fun, x)
        jax.block_until_ready((linear_fn(along_x), linear_fn.many(many_x), linear_fn.transpose(along_y)))

    def at_batch(data: jax.Array) -> None:
        _, linear_fn = linjac.linearize_many(outputs, weights, data, argnums=0)
        jax.block_until_ready((linear_fn(weights), linear_fn.transpose(along_outputs)))

    for what, work, stock in (("points", at_point, new_points), ("batches", at_batch, new_batches)):
        with compiles() as first:
            work(stock[0])
        with compiles() as seen:
            for item in stock[1:]:
                work(item)
        row(
            f"compiles over 100 new {what} (first one: {first.programs})",
            f"{seen.programs} ({seen.traces} traces)",
            "0",
            seen.programs == 0,
        )


# 2: weights that must not be copied -----------------------------------------------------------------------------------
def closing_over(weights: jax.Array, form: str) -> Callable[[jax.Array], jax.Array]:
    """tanh(W x), W closed over in one of three ways."""
    if form == "direct":
        return lambda x: jnp.tanh(weights @ x)
    if form == "nested jit":
        inner = jax.jit(lambda x: jnp.tanh(weights @ x))
        return lambda x: 2.0 * inner(x)
    return lambda x: lax.scan(lambda state, _: (jnp.tanh(weights @ state), None), x, length=2)[0]


def picking(weights: jax.Array, form: str) -> Callable[[jax.Array], jax.Array]:
    """tanh(W[i] x) for one small matrix of a large stack: the work does not depend on the size of the stack."""

    def layer(x: jax.Array) -> jax.Array:
        number = jnp.int32(jnp.abs(x[0]) * 1000) % weights.shape[0]
        return jnp.tanh(lax.dynamic_index_in_dim(weights, number, keepdims=False) @ x)

    if form == "direct":
        return layer
    if form == "nested jit":
        inner = jax.jit(layer)
        return lambda x: 2.0 * inner(x)
    return lambda x: lax.scan(lambda state, _: (layer(state), None), x, length=2)[0]


def weights() -> None:
    """100 MB of closed-over weights: time, live bytes, constants in the compiled programs."""
    header("100 MB of closed-over weights")
    stacks = {"1 MB": normal(61, 64, 64), "100 MB": normal(6104, 64, 64)}
    for form in FORMS:
        x = normal(64)
        calls = {size: _linearizing(picking(stack, form), x) for size, stack in stacks.items()}
        ratio = interleaved(calls).ratio("100 MB", "1 MB")
        row(f"re-linearize, same work, {form}: time 100 MB / 1 MB", f"{ratio:.2f}", "~ 1", ratio < 1.25)
    del stacks
    matrix = normal(5000, 5000) / 70
    x = normal(5000)
    for form in FORMS:
        fun = closing_over(matrix, form)
        value = jax.jit(lambda W, x, form=form: closing_over(W, form)(x))
        calls = {"ours": _linearizing(fun, x), "value": lambda value=value: value(matrix, x)}
        ratio = interleaved(calls, rounds=15).ratio("ours", "value")
        row(f"re-linearize W x, {form}: time / the value alone, jitted", f"{ratio:.2f}", "~ 1", ratio < 1.25)
    for form in FORMS:
        fun = closing_over(matrix, form)
        before = live_bytes()
        kept = [linjac.linearize_many(fun, x + i) for i in range(5)]
        outs = [(f(x), f.many(jnp.stack([x, x])), f.transpose(x)) for _, f in kept]
        grown = (live_bytes() - before) / 1e6
        row(f"live bytes added by 5 linearizations and products, {form}", f"{grown:.2f} MB", "< 1 MB", grown < 1)
        del kept, outs, fun
    constants()


def _linearizing(fun: Callable[..., Any], x: jax.Array) -> Callable[[], Any]:
    def call() -> Any:
        value, linear_fn = linjac.linearize_many(fun, x)
        return value, jax.tree.leaves(linear_fn)

    return call


def constants() -> None:
    """The largest constant in what XLA was given, in a fresh process that dumps every program."""
    for form in FORMS:
        largest, programs = largest_constant("--dumped", form)
        row(f"largest constant in {programs} programs, {form}", f"{largest} B", "<= 1 kB", largest <= 1024)
    largest, _ = largest_constant("--dumped", "control")
    row("control: jax.jit(linear_fn) of jax.linearize, 1 MB of W", f"{largest} B", "> 1 kB: it is seen")


def largest_constant(*args: str) -> tuple[int, int]:
    """Bytes of the largest constant and number of programs of this script run with `args`, by XLA's own dump."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        subprocess.run([sys.executable, __file__, *args], check=True, env={**os.environ, "XLA_FLAGS": flags})
        dumps = [*Path(folder).glob("*before_optimizations.txt"), *Path(folder).glob("*after_optimizations.txt")]
        sizes = [size for dump in dumps for size in _constant_sizes(dump.read_text())]
        return max(sizes, default=0), len({dump.name.split(".")[0] for dump in dumps})


_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


def _constant_sizes(hlo: str) -> Iterator[int]:
    for kind, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* constant\(", hlo):
        yield _BYTES.get(kind, 16) * int(np.prod([int(d) for d in shape.split(",") if d], dtype=np.int64))


def dumped(form: str) -> None:
    """Every route through one function; run by `largest_constant` in its own process."""
    if form == "control":
        matrix, x = normal(500, 500), normal(500)
        _, linear = jax.linearize(closing_over(matrix, "direct"), x)
        jax.block_until_ready(jax.jit(linear)(x))
        return
    matrix, x = normal(5000, 5000), normal(5000)
    for strategy in ("stored", "recompute"):
        _, linear_fn = linjac.linearize_many(closing_over(matrix, form), x, strategy=strategy)
        batch = jnp.stack([x, x, x])
        linear_fn(x), linear_fn.many(batch), linear_fn.transpose(x), linear_fn.transpose_many(batch)
    jax.block_until_ready(linjac.jvp_many(closing_over(matrix, form), (x,), (batch,)))


# 3: one checked product -----------------------------------------------------------------------------------------------
def apply() -> None:
    """Eager `linear_fn(v)` with every check on, against a jitted function that applies jax.linearize's result."""
    header("linear_fn(v), every check on, against a jitted raw apply (time ratio)")
    leaves = {f"leaf{i:03d}": normal(8, seed=i) for i in range(100)}

    def tree_to_tree(tree: Any) -> Any:
        return jax.tree.map(jnp.tanh, tree)

    def tree_to_vector(tree: Any) -> Any:
        return sum(jnp.tanh(leaf) for leaf in tree.values())

    cases: dict[str, tuple[Callable[..., Any], Any, float]] = {
        "256 -> 512 -> 256 MLP": (net(), normal(256), 1.5),
        "tanh, 8 numbers": (jnp.tanh, normal(8), 1.5),
        "100 leaves -> 100 leaves": (tree_to_tree, leaves, 2.0),
        "100 leaves -> 1": (tree_to_vector, leaves, 2.0),
    }
    raw_apply = jax.jit(lambda linear, v: linear(v))
    for name, (fun, x, target) in cases.items():
        _, linear_fn = linjac.linearize_many(fun, x)
        _, linear = jax.linearize(fun, x)
        calls = {"ours": lambda f=linear_fn, x=x: f(x), "raw": lambda f=linear, x=x: raw_apply(f, x)}
        for how, block_each in (("waiting for each", True), ("running ahead", False)):
            times = interleaved(calls, rounds=61, block_each=block_each)
            ratio = times.ratio("ours", "raw")
            shown = f"{ratio:.2f} ({times.median('ours') * 1e6:.0f}/{times.median('raw') * 1e6:.0f} us)"
            row(f"{name}, {how}", shown, f"<= {target}", ratio <= target)
    low, high = noise(calls["raw"], rounds=61)
    row("noise: raw / raw, 100 leaves -> 1, quartiles", f"{low:.2f} .. {high:.2f}")


# 4: what a call costs before any work ---------------------------------------------------------------------------------
SCALE = 2.0


def _helper(x: jax.Array) -> jax.Array:
    return SCALE * jnp.tanh(x)


def _module_level(x: jax.Array) -> jax.Array:
    return _helper(x) + SCALE * _helper(2.0 * x)


class _Model:
    def __init__(self) -> None:
        self.first, self.second, self.bias, self.slope = normal(8, 8), normal(8, 8), normal(8), 0.1

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.apply(x)

    def apply(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.second @ jnp.tanh(self.first @ x + self.bias)) + self.slope * x


def _many_cells() -> Callable[[jax.Array], jax.Array]:
    a, b, c, d, e, f, g, h, i, j = (normal(8, seed=seed) for seed in range(10))
    return lambda x: a + b * (c + d * (e + f * (g + h * (i + j * x))))


def static() -> None:
    """The guard, and the whole of a call that has next to nothing to compute."""
    header("Static cost of a call")
    layers = [{"w": normal(8, 8, seed=i), "b": normal(8, seed=i)} for i in range(10)]
    model = _Model()
    guarded: dict[str, tuple[Any, Any]] = {
        "one closed-over array": (net(), None),
        "module-level function, helper, global": (_module_level, None),
        "10 closed-over arrays": (_many_cells(), None),
        "closed-over list of 10 layers (20 arrays)": (lambda x: sum(la["w"] @ x + la["b"] for la in layers), None),
        "bound method": (_Model.apply, model),
        "jax.jit of the module-level function": (jax.jit(_module_level), None),
    }
    for name, (fun, owner) in guarded.items():
        guard = Guard(fun, owner)
        cost = per_call(guard.holds) * 1e6
        row(f"guard, {name}", f"{cost:.2f} us", "<= 2 us", cost <= 2)
    x = normal(8)
    fun = lambda x: jnp.tanh(x)
    value = jax.jit(fun)
    calls = {
        "linearize": lambda: linjac.linearize_many(fun, x),
        "value": lambda: value(x),
    }
    times = interleaved(calls, rounds=61, block_each=False)
    shown = f"{times.ratio('linearize', 'value'):.1f} ({times.median('linearize') * 1e6:.0f} us)"
    row("linearize_many(tanh), 8 numbers / jitted tanh", shown)


def main(which: list[str] | None = None) -> None:
    """Run the tables named, or all."""
    tables = {"relinearize": relinearize, "weights": weights, "apply": apply, "static": static}
    for name in which or tables:
        tables[name]()
    footer()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--dumped"]:
        dumped(sys.argv[2])
    else:
        main(sys.argv[1:])

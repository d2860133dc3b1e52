"""Functions whose Jacobians are known in closed form, with everything a test needs to compare a route with them.

The Jacobians are written in NumPy, independently of any derivative that JAX computes. Rows are the inexact entries of
the output, columns the inexact ("moving") entries of the positions in ``argnums``, both in flattening order. A Jacobian
is a matrix A, or a pair (A, B) meaning v -> A v + B conj(v) where a complex function is not holomorphic. Entries that
are real in the output (or input) keep the real part of the product (or transposed product), as in JAX.

Nothing here knows about linjac.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

F = jnp.result_type(float)
C = jnp.result_type(complex)
FULL = np.finfo(F).bits == 64
TOLERANCE = 1e-10 if FULL else 2e-4
SHORT = "f64" if FULL else "f32"


def real(*shape, seed=0, low=-1.0, high=1.0):
    """Fixed pseudo-random reals as a NumPy array."""
    return np.random.default_rng(seed).uniform(low, high, shape)


def cplx(*shape, seed=0):
    """Fixed pseudo-random complex numbers as a NumPy array."""
    return real(*shape, seed=seed) + 1j * real(*shape, seed=seed + 1000)


def array(values, dtype=None):
    """A JAX array of the default float (or complex) type, or of `dtype`."""
    values = np.asarray(values)
    return jnp.asarray(values, dtype or (C if np.iscomplexobj(values) else F))


def is_moving(leaf) -> bool:
    """Whether a leaf has a tangent of its own: inexact arrays and Python floats or complex numbers."""
    if isinstance(leaf, float | complex):
        return True
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def as_numpy(leaf):
    """A leaf in double precision."""
    leaf = np.asarray(leaf)
    return leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)


def ravel(tree) -> np.ndarray:
    """The moving entries of a tree as one vector in double precision."""
    parts = [as_numpy(leaf).ravel() for leaf in jax.tree.leaves(tree) if is_moving(leaf)]
    return np.concatenate(parts) if parts else np.zeros(0)


def ravel_batch(tree, size: int) -> np.ndarray:
    """The moving entries of a batched tree as a (size, entries) matrix."""
    parts = [as_numpy(leaf).reshape(size, math.prod(leaf.shape[1:])) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((size, 0))


def is_real_entry(tree) -> np.ndarray:
    """For every moving entry whether it is real."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_moving(leaf)]
    return np.concatenate([np.zeros(0, bool), *[np.full(np.size(x), not np.iscomplexobj(x)) for x in leaves]])


def _fill(leaf, rng, batch):
    """Random entries of the type of a leaf, or None for a leaf that is held."""
    if not is_moving(leaf):
        return None
    dtype, shape = jnp.result_type(leaf), (*batch, *np.shape(leaf))
    values = rng.uniform(-1, 1, shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * rng.uniform(-1, 1, shape)
    return jnp.asarray(values, dtype)


def random_like(tree, seed: int, *batch: int):
    """A tangent (or a batch of them) for a tree: None at the leaves that are held."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: _fill(leaf, rng, batch), tree)


@dataclass(frozen=True, eq=False)
class Scenario:
    """A function, a point, and its Jacobian there.

    Attributes:
        name: Name in test ids.
        fun: The function.
        primals: The point.
        jacobian: From the primals (as NumPy, double precision) to A or (A, B).
        argnums: Positions that are differentiated, None for all.
        has_aux: Whether `fun` returns a pair.
        forward: Whether `jax.jvp` of `fun` exists.
        reverse: Whether `jax.vjp` of `fun` exists.
        smooth: Whether the Jacobian is the true derivative at the point (finite differences agree).
        batched_points: Whether `jax.vmap` over points works in plain JAX.
        tolerance: Absolute and relative tolerance.
    """

    name: str
    fun: Callable[..., Any]
    primals: tuple[Any, ...]
    jacobian: Callable[..., Any]
    argnums: int | tuple[int, ...] | None = None
    has_aux: bool = False
    forward: bool = True
    reverse: bool = True
    smooth: bool = True
    batched_points: bool = True
    tolerance: float = TOLERANCE

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that `linearize_many` needs for this scenario."""
        found = {} if self.argnums is None else {"argnums": self.argnums}
        return found | ({"has_aux": True} if self.has_aux else {})

    @property
    def positions(self) -> tuple[int, ...]:
        """The differentiated positions as non-negative integers, in the order of `argnums`."""
        if self.argnums is None:
            return tuple(range(len(self.primals)))
        nums = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        return tuple(i % len(self.primals) for i in nums)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The primals at the differentiated positions."""
        return tuple(self.primals[i] for i in self.positions)

    @functools.cached_property
    def value(self):
        """What `fun` returns at the point, without aux."""
        return self.split(self.fun(*self.primals))[0]

    @functools.cached_property
    def aux(self):
        """The aux at the point."""
        return self.split(self.fun(*self.primals))[1]

    @functools.cached_property
    def reduced(self) -> Callable[..., Any]:
        """`fun` of the differentiated positions only, without aux: one function object for the whole run."""
        return lambda *inputs: self.split(self.fun(*self.full(inputs)))[0]

    @functools.cached_property
    def of_moving(self) -> Callable[..., Any]:
        """`fun` of the moving leaves only, returning the list of inexact output leaves: for plain JAX."""
        return lambda *moving: [x for x in jax.tree.leaves(self.reduced(*self.rebuild(moving))) if is_moving(x)]

    def split(self, result):
        """The pair (value, aux)."""
        return result if self.has_aux else (result, None)

    def full(self, inputs):
        """All primals, with those at the differentiated positions replaced."""
        primals = list(self.primals)
        for i, x in zip(self.positions, inputs, strict=True):
            primals[i] = x
        return tuple(primals)

    @property
    def moving(self) -> tuple[Any, ...]:
        """The moving leaves of the inputs."""
        return tuple(x for x in jax.tree.leaves(self.inputs) if is_moving(x))

    def rebuild(self, moving):
        """The inputs with their moving leaves replaced."""
        fresh = iter(moving)
        return jax.tree.map(lambda leaf: next(fresh) if is_moving(leaf) else leaf, self.inputs)

    def points(self, count: int):
        """Moving leaves with a leading axis: `count` points near the scenario's own (which comes first)."""
        return tuple(jnp.stack([jnp.asarray(x) * (1 + 0.1 * i) for i in range(count)]) for x in self.moving)

    def matrices(self, moving=None):
        """A and B at the point, or with the given moving leaves."""
        primals = self.primals if moving is None else self.full(self.rebuild(moving))
        numpy = jax.tree.map(lambda x: as_numpy(x) if is_moving(x) else x, primals)
        found = self.jacobian(*numpy)
        a, b = found if isinstance(found, tuple) else (found, np.zeros_like(found))
        return np.asarray(a), np.asarray(b)

    def push(self, v, moving=None) -> np.ndarray:
        """J v, for a flat tangent or a (K, n) batch of them."""
        a, b = self.matrices(moving)
        return _keep_real(v @ a.T + np.conj(v) @ b.T, is_real_entry(self.value))

    def pull(self, c, moving=None) -> np.ndarray:
        """The transposed product for a flat cotangent or a (K, m) batch of them."""
        a, b = self.matrices(moving)
        return _keep_real(c @ a + np.conj(c @ b), is_real_entry(self.inputs))

    def tangents(self, seed: int = 1, *batch: int):
        """One tangent (or batch) per differentiated position."""
        return random_like(self.inputs, seed, *batch)

    def cotangents(self, seed: int = 2, *batch: int):
        """A cotangent (or batch) shaped like the value."""
        return random_like(self.value, seed, *batch)

    def close(self, got, want):
        """Assert that two arrays agree within the tolerance."""
        np.testing.assert_allclose(got, want, rtol=self.tolerance, atol=self.tolerance, err_msg=self.name)


def _keep_real(values, real_entries):
    values = np.asarray(values, np.complex128)
    return np.where(real_entries, values.real, values) if not real_entries.all() else values.real


def same_types(got, want, *batch: int):
    """Assert one tree structure, one shape and one dtype per leaf, with an optional leading batch shape."""
    want = jax.tree.map(lambda x: x if is_moving(x) else None, want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == ((*batch, *np.shape(w)), jnp.result_type(w))


# Functions and their Jacobians ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A namedtuple node."""

    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias"], meta_fields=["power"])
@dataclass
class Layer:
    """A registered dataclass node with a static field."""

    weight: Any
    bias: Any
    power: int


W52, W36, W23, W33 = real(5, 2, seed=1), real(3, 6, seed=2), real(2, 3, seed=3), real(3, 3, seed=4)
J52, J36, J23, J33 = array(W52), array(W36), array(W23), array(W33)
CW23 = cplx(2, 3, seed=5)
JCW23 = array(CW23)
SCALES = array([1.0, -2.0, 3.0])


def dense_tall(x):
    """2 -> 5."""
    return jnp.tanh(J52 @ x)


def dense_wide(x):
    """6 -> 3."""
    return jnp.sin(J36 @ x)


def scalar_to_vector(t):
    """Scalar -> 3."""
    return SCALES * t**2


def tree_function(tree):
    """Nested containers with None on both sides: 6 -> 5."""
    a, (b, nothing), pair = tree["a"], tree["list"], tree["pair"]
    assert nothing is None
    return {"out": [a * b, None], "pair": Pair(pair.left * jnp.sum(a), (jnp.sum(b) + pair.right["deep"],))}


def tree_jacobian(tree):
    """Columns a (2), b (2), left, deep; rows a*b (2), left*sum(a), sum(b) + deep."""
    a, b, left = tree["a"], tree["list"][0], tree["pair"].left
    rows = [[b[0], 0, a[0], 0, 0, 0], [0, b[1], 0, a[1], 0, 0], [left, left, 0, 0, a.sum(), 0], [0, 0, 1, 1, 0, 1]]
    return np.array(rows)


def layer_function(layer, x):
    """A registered dataclass and a vector: 2*3 + 2 + 3 -> 2."""
    return (layer.weight @ x) ** layer.power + layer.bias


def layer_jacobian(layer, x):
    """Columns: weight by rows, bias, x."""
    slope = layer.power * (layer.weight @ x) ** (layer.power - 1)
    blocks = [np.kron(np.diag(slope), x[None, :]), np.eye(2), slope[:, None] * layer.weight]
    return np.concatenate(blocks, axis=1)


def integer_function(tree):
    """Integer and boolean leaves beside a float one: 3 -> 4."""
    picked = tree["w"][tree["index"]] ** 2
    return jnp.where(tree["flag"], picked, 3.0 * picked)


def integer_jacobian(tree):
    """One entry per row, where the index points."""
    w, index, flag = tree["w"], np.asarray(tree["index"]), np.asarray(tree["flag"])
    out = np.zeros((4, 3))
    out[np.arange(4), index] = 2 * w[index] * np.where(flag, 1.0, 3.0)
    return out


def key_function(tree):
    """A PRNG key beside a float leaf: 1 -> 3."""
    return tree["x"] * jax.random.normal(tree["key"], (3,), F)


def complex_to_real(z):
    """|z|^2 mixed: C^3 -> R^2."""
    return J23 @ (z.real**2 + z.imag**2)


def not_holomorphic(z):
    """conj(z) times the first entry: C^3 -> C^2."""
    return jnp.conj(z[1:]) * z[0]


def not_holomorphic_jacobian(z):
    """The pair (d/dz, d/dconj(z))."""
    a = np.stack([[np.conj(z[1]), 0, 0], [np.conj(z[2]), 0, 0]])
    return a, np.array([[0, z[0], 0], [0, 0, z[0]]])


def mixed_floats(a, b):
    """A float32 and a bfloat16 vector to a float32 one: 5 -> 4."""
    wide = b.astype(jnp.float32)
    return jnp.concatenate([a[:2] * wide, wide * wide])


def mixed_jacobian(a, b):
    """Columns a (3), b (2)."""
    top = np.array([[b[0], 0, 0, a[0], 0], [0, b[1], 0, 0, a[1]]])
    return np.concatenate([top, np.array([[0, 0, 0, 2 * b[0], 0], [0, 0, 0, 0, 2 * b[1]]])])


def with_aux(x):
    """The aux has its own structure: 3 -> 2."""
    return J23 @ x**2, {"norm": jnp.sum(x * x), "nothing": None, "count": jnp.asarray(3, jnp.int32)}


def scanned(h, xs):
    """h <- sin(h) x_t with closed-over weights; final state and all states: 2 + 3*2 -> 2 + 3*2."""

    def step(h, x):
        h = jnp.sin(W22 @ h) * x
        return h, h

    return jax.lax.scan(step, h, xs)


NW22 = real(2, 2, seed=6)
W22 = array(NW22)


def scanned_jacobian(h, xs):
    """Chain rule over three steps."""
    state, rows = np.concatenate([np.eye(2), np.zeros((2, 6))], axis=1), []
    for t, x in enumerate(xs):
        pre = NW22 @ h
        state = (x * np.cos(pre))[:, None] * (NW22 @ state)
        h = np.sin(pre)
        state[:, 2 + 2 * t : 4 + 2 * t] += np.diag(h)
        h = h * x
        rows.append(state)
    return np.concatenate([rows[-1], *rows])


def branched(x):
    """A cond whose branches close over different weights: 3 -> 3."""
    return jax.lax.cond(jnp.sum(x) > 0, lambda y: jnp.sin(J33 @ y), lambda y: jnp.flip(y) ** 2, x)


def branched_jacobian(x):
    """The branch that is taken."""
    return np.cos(W33 @ x)[:, None] * W33 if x.sum() > 0 else np.diag(2 * x[::-1])[:, ::-1]


def looped(x, steps):
    """A while loop whose trip count is data: forward only, 2 -> 1."""
    _, y = jax.lax.while_loop(lambda c: c[0] < steps, lambda c: (c[0] + 1, c[1] * c[1]), (jnp.zeros_like(steps), x))
    return y[:1] + y[1:]


@jax.custom_jvp
def clipped(x):
    """Clipping with a custom forward rule that scales the tangent by 3 outside."""
    return jnp.clip(x, -0.5, 0.5)


@clipped.defjvp
def _clipped_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return clipped(x), jnp.where(jnp.abs(x) < 0.5, 1.0, 3.0).astype(F) * t


@jax.custom_vjp
def straight_through(x):
    """Rounding whose backward rule scales by exp(x)."""
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), x), lambda x, c: (jnp.exp(x) * c,))


@jax.custom_batching.custom_vmap
def only_jvp(x):
    """A function with a batching rule of its own: `jax.linearize` refuses it."""
    return jnp.sin(x)


@only_jvp.def_vmap
def _only_jvp_batched(axis_size, in_batched, x):
    del axis_size
    return jnp.sin(x), in_batched[0]


@jax.jit
def inner_jit(x):
    """A jit that closes over weights."""
    return jnp.tanh(J23 @ x)


def two_arguments(x, y):
    """Outer product: 2 + 3 -> 2*3."""
    return x[:, None] * y[None, :]


def two_jacobian(x, y):
    """Columns x, y."""
    return np.concatenate([np.kron(np.eye(2), y[:, None]), np.kron(x[:, None], np.eye(3))], axis=1)


def three_arguments(x, batch, w):
    """The batch in the middle is held: 2, (4, 3), (3, 2) -> 4."""
    return jnp.sin(batch @ w @ x)


def three_jacobian(x, batch, w):
    """Columns w by rows, then x: the order of argnums (2, 0)."""
    slope = np.cos(batch @ w @ x)[:, None]
    return np.concatenate([slope * np.kron(batch, x[None, :]), slope * (batch @ w)], axis=1)


def named(x, name, power):
    """Static arguments beside a vector: 3 -> 2."""
    return (J23 @ {"sin": jnp.sin, "cos": jnp.cos}[name](x)) ** power


def callable_leaf(model, x):
    """A model tree that holds its activation function: 2*3 + 3 -> 2."""
    return model["activation"](model["w"] @ x)


def callable_jacobian(model, x):
    """Columns w by rows, then x."""
    slope = 1 - np.tanh(model["w"] @ x) ** 2
    return np.concatenate([np.kron(np.diag(slope), x[None, :]), slope[:, None] * model["w"]], axis=1)


def partly_constant(x):
    """One output that does not depend on x, one that is x, twice: 2 -> 3 + 2 + 2."""
    return SCALES, x, x


def solved(a, b):
    """A linear solve: 3*3 + 3 -> 3."""
    return jnp.linalg.solve(a, b)


def solved_jacobian(a, b):
    """-A^-1 dA y + A^-1 db."""
    inverse = np.linalg.inv(a)
    return np.concatenate([-np.kron(inverse, (inverse @ b)[None, :]), inverse], axis=1)


def mapped(xs):
    """A vmap inside: (3, 2) -> 3."""
    return jax.vmap(lambda x: x[0] * jnp.exp(x[1]))(xs)


def mapped_jacobian(xs):
    """One block per row."""
    out = np.zeros((3, 6))
    for i, (a, b) in enumerate(xs):
        out[i, 2 * i : 2 * i + 2] = np.exp(b), a * np.exp(b)
    return out


X2, X3, X6 = array(real(2, seed=11, low=0.3)), array(real(3, seed=12, low=0.3)), array(real(6, seed=13))
Z3 = array(cplx(3, seed=14))
KEY = jax.random.key(7)
NOISE = np.asarray(jax.random.normal(KEY, (3,), F), np.float64)
TREE = {"a": X2, "list": [array([0.5, -0.7]), None], "pair": Pair(array(1.5), {"deep": array(0.2)})}
INTEGERS = {
    "w": X3,
    "index": jnp.asarray([2, 0, 0, 1], jnp.int32),
    "flag": jnp.asarray([True, False, True, False]),
}
BATCH = array(real(4, 3, seed=15))

SCENARIOS = [
    Scenario("dense_tall", dense_tall, (X2,), lambda x: (1 - np.tanh(W52 @ x) ** 2)[:, None] * W52),
    Scenario("dense_wide", dense_wide, (X6,), lambda x: np.cos(W36 @ x)[:, None] * W36),
    Scenario("scalar", lambda x: x**3, (array(0.7),), lambda x: np.reshape(3 * x**2, (1, 1))),
    Scenario("python_float", lambda x: jnp.sin(x) * SCALES, (0.7,), lambda x: np.cos(x) * np.array([[1], [-2], [3]])),
    Scenario(
        "numpy_point",
        lambda x: jnp.sum(x**2, 0),
        (np.asarray(real(2, 3), F),),
        lambda x: np.concatenate([2 * np.diag(x[0]), 2 * np.diag(x[1])], axis=1),
    ),
    Scenario("scalar_to_vector", scalar_to_vector, (array(0.7),), lambda t: 2 * t * np.array([[1], [-2], [3]])),
    Scenario("vector_to_scalar", lambda x: jnp.sum(x * x), (X6,), lambda x: 2 * x[None, :]),
    Scenario("size_one", lambda x: x[None] ** 2, (array([0.3]),), lambda x: 2 * x[None]),
    Scenario("empty_input", lambda x: SCALES + jnp.sum(x), (array(np.zeros(0)),), lambda x: np.zeros((3, 0))),
    Scenario("empty_output", lambda x: x[:0] ** 2, (X3,), lambda x: np.zeros((0, 3))),
    Scenario("elementwise", jnp.exp, (array(real(2, 3)),), lambda x: np.diag(np.exp(x).ravel())),
    Scenario("nested_tree", tree_function, (TREE,), tree_jacobian),
    Scenario("custom_node", layer_function, (Layer(J23, X2, 3), X3), layer_jacobian),
    Scenario("integer_leaves", integer_function, (INTEGERS,), integer_jacobian),
    Scenario("prng_key", key_function, ({"key": KEY, "x": array(0.4)},), lambda _: NOISE[:, None]),
    Scenario("holomorphic", lambda z: jnp.exp(JCW23 @ z), (Z3,), lambda z: np.exp(CW23 @ z)[:, None] * CW23),
    Scenario(
        "real_to_complex",
        lambda x: jnp.exp(1j * (J23 @ x).astype(C)),
        (X3,),
        lambda x: 1j * np.exp(1j * (W23 @ x))[:, None] * W23,
    ),
    Scenario("complex_to_real", complex_to_real, (Z3,), lambda z: 2 * W23 * np.conj(z)[None, :]),
    Scenario("not_holomorphic", not_holomorphic, (Z3,), not_holomorphic_jacobian),
    Scenario(
        "mixed_floats",
        mixed_floats,
        (array([0.5, -1.25, 2.0], jnp.float32), array([0.5, -1.5], jnp.bfloat16)),
        mixed_jacobian,
        tolerance=2e-2,
    ),
    Scenario("aux", with_aux, (X3,), lambda x: 2 * W23 * x[None, :], has_aux=True),
    Scenario("scan", scanned, (X2, array(real(3, 2, seed=16, low=0.2))), scanned_jacobian),
    Scenario("cond_true", branched, (X3,), branched_jacobian),
    Scenario("cond_false", branched, (array([-0.5, 0.2, -0.9]),), branched_jacobian),
    Scenario("while_loop", looped, (X2, jnp.asarray(2, jnp.int32)), lambda x, _: 4 * x[None, :] ** 3, reverse=False),
    Scenario(
        "custom_jvp",
        clipped,
        (array([0.2, 0.9, -0.8]),),
        lambda x: np.diag(np.where(abs(x) < 0.5, 1.0, 3.0)),
        smooth=False,
    ),
    Scenario(
        "custom_vjp",
        lambda x: J23 @ straight_through(x),
        (array([0.2, 0.9, -0.8]),),
        lambda x: W23 * np.exp(x)[None, :],
        forward=False,
        smooth=False,
    ),
    Scenario("custom_vmap", lambda x: J23 @ only_jvp(x), (X3,), lambda x: W23 * np.cos(x)[None, :], reverse=False),
    Scenario("nested_jit", inner_jit, (X3,), lambda x: (1 - np.tanh(W23 @ x) ** 2)[:, None] * W23),
    Scenario("two_arguments", two_arguments, (X2, X3), two_jacobian),
    Scenario("argnums_pair", three_arguments, (X2, BATCH, array(real(3, 2, seed=17))), three_jacobian, argnums=(2, 0)),
    Scenario("argnums_negative", two_arguments, (X2, X3), lambda x, y: two_jacobian(x, y)[:, 2:], argnums=-1),
    Scenario(
        "argnums_integer",
        three_arguments,
        (X2, BATCH, array(real(3, 2, seed=17))),
        lambda *p: three_jacobian(*p)[:, 6:],
        argnums=0,
    ),
    Scenario(
        "static_arguments",
        named,
        (X3, "sin", 2),
        lambda x, *_: 2 * (W23 @ np.sin(x))[:, None] * W23 * np.cos(x)[None, :],
        argnums=(0,),
    ),
    Scenario(
        "callable_leaf", callable_leaf, ({"activation": jnp.tanh, "name": "net", "w": J23}, X3), callable_jacobian
    ),
    Scenario(
        "partly_constant", partly_constant, (X2,), lambda _: np.concatenate([np.zeros((3, 2)), np.eye(2), np.eye(2)])
    ),
    Scenario("linear_solve", solved, (array(W33 + 3 * np.eye(3)), X3), solved_jacobian),
    Scenario("inner_vmap", mapped, (array(real(3, 2, seed=18)),), mapped_jacobian),
]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

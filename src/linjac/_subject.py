"""A function at a point as plain JAX sees it: moving leaves in, inexact output leaves out.

What a check compares linjac with. So this module must not know linjac's programs: it calls the function, `jax.jvp` and
`jax.vjp`, op by op.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac._errors import compose
from linjac._finite import in_double
from linjac._options import check_argnums, check_callable, check_flag
from linjac._tree import in_trace, is_inexact, is_none, key_paths, short, size_of, type_of

type Flat = list[Any]  # one array for each moving leaf, or for each inexact output leaf


class Leaves(NamedTuple):
    """The leaves on one side that move, in flattening order."""

    names: tuple[str, ...]
    types: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(map(size_of, self.types))


class Subject:
    """A function, its arguments, and which of them move.

    `args` are the arguments; `point` the leaves that move. `value` is what the function returned when called, without
    aux.
    """

    def __init__(self, who: str, root: str, fun: Callable[..., Any], args: tuple[Any, ...], argnums: Any, has_aux: Any):
        check_callable(who, fun)
        self.who, self.root, self.fun = who, root, fun
        self.has_aux = check_flag(who, "has_aux", has_aux)
        self.positions = check_argnums(who, argnums, len(args))
        self._set(args)
        everything = jax.tree_util.tree_leaves(args)
        if in_trace(everything):
            what = "a check compares values, which are not known inside a trace"
            raise TypeError(compose(who, what, remedy="call it outside jax.jit, jax.vmap and jax.grad"))
        self.value = self._value(args)
        self.outputs = self._outputs(self.value)

    def _set(self, args: tuple[Any, ...]) -> None:
        self.args = args
        chosen = tuple(args[i] for i in self.positions)
        leaves, self._tree = jax.tree_util.tree_flatten(chosen)
        self._leaves = [jnp.asarray(leaf) if isinstance(leaf, float | complex) else leaf for leaf in leaves]
        names = [name for i in self.positions for name in _plain_paths(args[i], f"{self.root}[{i}]")]
        types = [type_of(leaf) for leaf in self._leaves]
        self._moving = [i for i, aval in enumerate(types) if aval is not None and is_inexact(aval)]
        self.inputs = Leaves(tuple(names[i] for i in self._moving), tuple(types[i] for i in self._moving))
        self.point: Flat = [jnp.asarray(self._leaves[i]) for i in self._moving]

    def _outputs(self, value: Any) -> Leaves:
        leaves = jax.tree_util.tree_leaves(value, is_leaf=is_none)
        rows = [(name, type_of(leaf)) for name, leaf in zip(key_paths(value, "output"), leaves, strict=True)]
        rows = [(name, aval) for name, aval in rows if aval is not None and is_inexact(aval)]
        return Leaves(tuple(name for name, _ in rows), tuple(aval for _, aval in rows))

    def _value(self, args: tuple[Any, ...]) -> Any:
        result = self.fun(*args)
        if not self.has_aux:
            return result
        if not (isinstance(result, tuple | list) and len(result) == 2):
            what = f"has_aux=True needs fun to return a pair (value, aux), got {short(result)}"
            raise TypeError(compose(self.who, what))
        return result[0]

    # the function -----------------------------------------------------------------------------------------------------
    def arguments(self, moving: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments, with the moving leaves replaced."""
        leaves = list(self._leaves)
        for i, leaf in zip(self._moving, moving, strict=True):
            leaves[i] = leaf
        args = list(self.args)
        for i, arg in zip(self.positions, jax.tree_util.tree_unflatten(self._tree, leaves), strict=True):
            args[i] = arg
        return tuple(args)

    def call(self, *moving: Any) -> Flat:
        """The inexact output leaves."""
        leaves = jax.tree_util.tree_leaves(self._value(self.arguments(moving)))
        return [jnp.asarray(leaf) for leaf in leaves if is_inexact(jax.typeof(leaf))]

    def trees(self, vector: Sequence[Any]) -> tuple[Any, ...]:
        """A tangent for each differentiated argument, None at leaves that are held."""
        leaves: list[Any] = [None] * len(self._leaves)
        for i, leaf in zip(self._moving, vector, strict=True):
            leaves[i] = leaf
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    def cotangent(self, vector: Sequence[Any]) -> Any:
        """A tree like the value, None at outputs that are held."""
        entries = iter(vector)
        leaves, treedef = jax.tree_util.tree_flatten(self.value)
        return jax.tree_util.tree_unflatten(
            treedef, [next(entries) if is_inexact(jax.typeof(leaf)) else None for leaf in leaves]
        )

    def in_double(self) -> "Subject":
        """The same function with its floating and complex arguments in double precision; inside `_finite.double`."""
        args = jax.tree_util.tree_map(in_double, self.args)
        return Subject(self.who, self.root, self.fun, args, self.positions, self.has_aux)

    # its derivative ---------------------------------------------------------------------------------------------------
    @functools.cached_property
    def no_forward(self) -> Exception | None:
        """Why `jax.jvp` cannot be had."""
        return _obstacle(lambda: self._jvp(self.point, [jnp.zeros_like(x) for x in self.point]))

    @functools.cached_property
    def no_reverse(self) -> Exception | None:
        """Why `jax.vjp` cannot be had."""
        return _obstacle(lambda: self.vjp([jnp.zeros(aval.shape, aval.dtype) for aval in self.outputs.types]))

    def jvp(self, vector: Sequence[Any], point: Sequence[Any] | None = None) -> Flat:
        """J v by `jax.jvp`; where that is impossible (a `custom_vjp`), by the transpose of `jax.vjp`'s pullback."""
        point = self.point if point is None else list(point)
        if not point:
            return [jnp.zeros(aval.shape, aval.dtype) for aval in self.outputs.types]
        if self.no_forward is None:
            return self._jvp(point, vector)
        outs, pullback = jax.vjp(self.call, *point)
        return list(jax.linear_transpose(pullback, outs)(tuple(vector))[0])

    def _jvp(self, point: Sequence[Any], vector: Sequence[Any]) -> Flat:
        return jax.jvp(self.call, tuple(point), tuple(vector))[1] if point else []

    def vjp(self, vector: Sequence[Any], point: Sequence[Any] | None = None) -> Flat:
        """Jᵀ c by `jax.vjp`."""
        point = self.point if point is None else list(point)
        return list(jax.vjp(self.call, *point)[1](list(vector))) if point else []

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The jaxpr of the moving leaves, or the exception with which tracing ended."""
        try:
            return jax.make_jaxpr(self.call)(*self.point)
        except Exception as err:
            return err


def _obstacle(run: Callable[[], Any]) -> Exception | None:
    try:
        run()
    except Exception as err:
        err.__traceback__ = err.__context__ = err.__cause__ = None
        return err
    return None


def _plain_paths(tree: Any, root: str) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [root + jax.tree_util.keystr(path) for path, _ in paths]


# directions -----------------------------------------------------------------------------------------------------------
def check_key(who: str, key: Any) -> None:
    """A PRNG key, typed or raw; it is read, not split, so a subkey of the caller's is used once."""
    aval = type_of(key)
    typed = aval is not None and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) and aval.shape == ()
    raw = aval is not None and aval.dtype == np.uint32 and len(aval.shape) == 1
    if not (typed or raw):
        raise TypeError(compose(who, f"key must be a PRNG key, got {short(key)}", remedy="pass jax.random.key(0)"))
    if in_trace([key]):
        raise TypeError(compose(who, "key must be known: it is traced", remedy="call it outside jax.jit"))


def generator(key: Any) -> np.random.Generator:
    """The source of all random directions of a check."""
    typed = jax.dtypes.issubdtype(jax.typeof(key).dtype, jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(key) if typed else key)
    return np.random.default_rng([int(word) for word in data.ravel()])


def normal(rng: np.random.Generator, types: Sequence[Any]) -> list[Any]:
    """A random vector in double precision, about one in every element; complex where the leaf is."""
    return [_normal(rng, aval) for aval in types]


def _normal(rng: np.random.Generator, aval: Any) -> Any:
    values = rng.standard_normal(aval.shape)
    return values + 1j * rng.standard_normal(aval.shape) if np.issubdtype(aval.dtype, np.complexfloating) else values


def cast(vector: Sequence[Any], types: Sequence[Any]) -> Flat:
    """A vector in the dtypes of the leaves."""
    return [jnp.asarray(np.asarray(leaf), aval.dtype) for leaf, aval in zip(vector, types, strict=True)]


def basis(types: Sequence[Any], index: int) -> tuple[Flat, int, tuple[int, ...]]:
    """The unit vector of a flat index, the leaf it is in, and its index there."""
    vector = [np.zeros(aval.shape) for aval in types]
    for k, leaf in enumerate(vector):
        if index < leaf.size:
            place = tuple(int(i) for i in np.unravel_index(index, leaf.shape))
            leaf[place] = 1.0
            return cast(vector, types), k, place
        index -= leaf.size
    raise IndexError(index)


def spread(size: int, count: int) -> list[int]:
    """First, last and evenly between, at most `count` of them."""
    return sorted({int(i) for i in np.linspace(0, size - 1, min(size, count)).round()}) if size else []

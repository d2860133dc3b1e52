"""From a call to its parts: which function, which leaves are traced, which are static, which positions move.

`functools.partial` objects, bound methods and callable pytrees (equinox modules, say) are taken apart here, so that
their arrays become arguments. Array leaves and Python floats are traced; everything else (str, bool, int, callable,
...) is static and part of the key under which a program is kept. This module must not trace anything.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from linjac._errors import compose
from linjac._options import check_argnums
from linjac._tree import PyTreeDef, is_none, key_paths, short


class _Traced:
    """The mark, in a list of static leaves, of a leaf that is traced."""

    def __repr__(self) -> str:
        return "traced"


TRACED = _Traced()
_ARRAYS = (np.ndarray, np.generic, float, complex)


class Target(NamedTuple):
    """A function without its bound data. `owner` is the instance of a plain bound method, else None."""

    anchor: Any  # what the cache entry lives as long as: the function, or the class of a callable pytree
    owner: Any = None
    is_tree: bool = False  # the callable itself is the first argument
    kind: type | None = None  # the class of a pytree whose method this is

    def watched(self) -> list[Any]:
        """What a guard has to look at."""
        if self.owner is not None:
            return [types.MethodType(self.anchor, self.owner)]
        return [self.anchor] if self.kind is None else [self.kind, self.anchor]

    def bind(self) -> Callable[..., Any]:
        """The function to call with the unpacked arguments."""
        if self.is_tree:
            return _call
        return self.anchor if self.owner is None else functools.partial(self.anchor, self.owner)


def _call(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fun(*args, **kwargs)


def _is_tree(value: object) -> bool:
    return not isinstance(value, type) and not jax.tree_util.all_leaves([value])


class Bound(NamedTuple):
    """A function with the arguments that it already holds, in front of the caller's."""

    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def unwrap(fun: Callable[..., Any]) -> Bound:
    """Take partials, bound methods and callable pytrees apart."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    while isinstance(fun, functools.partial):
        args, kwargs = fun.args + args, {**fun.keywords, **kwargs}
        fun = fun.func
    if isinstance(fun, types.FunctionType):
        return Bound(Target(fun), args, kwargs)
    method, owner = getattr(fun, "__func__", None), getattr(fun, "__self__", None)
    if method is not None and _is_tree(owner):  # also equinox's own bound methods
        return Bound(Target(method, kind=type(owner)), (owner, *args), kwargs)
    if isinstance(fun, types.MethodType):
        return Bound(Target(method, owner), args, kwargs)
    if _is_tree(fun):
        return Bound(Target(type(fun), is_tree=True), (fun, *args), kwargs)
    return Bound(Target(fun), args, kwargs)


class Layout(NamedTuple):
    """How the arguments of one call are laid out: static, without data of the traced leaves."""

    tree: PyTreeDef  # of (args, kwargs), bound ones included
    argnums: tuple[int, ...]  # positions that move, bound ones counted
    shift: int  # number of bound positional arguments
    statics: tuple[Any, ...]  # one entry a leaf: its value, or TRACED

    def unflatten(self, traced: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with the traced leaves filled in."""
        leaves = iter(traced)
        return jax.tree_util.tree_unflatten(
            self.tree, [next(leaves) if static is TRACED else static for static in self.statics]
        )


def _leaf_paths(tree: Any, root: str) -> list[str]:
    return [root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


class Call(NamedTuple):
    """One call, taken apart."""

    target: Target
    layout: Layout
    traced: list[Any]  # the array leaves, as jax.Array or tracer
    key: Any  # hashable: equal for calls that may share one program
    args: tuple[Any, ...]  # bound ones included
    kwargs: dict[str, Any]

    def names(self, root: str) -> list[str]:
        """The name of every leaf, `root` being the caller's word for positional arguments."""
        shift = self.layout.shift
        names: list[str] = []
        for i, arg in enumerate(self.args):
            names += _leaf_paths(arg, f"{root}[{i - shift}]" if i >= shift else f"fun.args[{i}]")
        return names + [name for key in sorted(self.kwargs) for name in _leaf_paths(self.kwargs[key], key)]

    def types_given(self, root: str) -> list[str]:
        """One line for each leaf that is a type without a value."""
        marks = self.layout.statics
        names = [name for name, mark in zip(self.names(root), marks, strict=True) if mark is TRACED]
        return [f"{name}: {short(leaf)}" for name, leaf in zip(names, self.traced, strict=True) if _is_type(leaf)]

    def selected(self, root: str) -> tuple[PyTreeDef, PyTreeDef, list[tuple[str, int | None, bool]]]:
        """The positions that move, as one tree with None kept as a leaf.

        Returns its treedef, the plain one, and for every leaf its name, its place among the traced leaves (None for a
        leaf that is no array), and whether it is one (and not a None).
        """
        layout = self.layout
        places = iter(range(len(self.traced)))
        marks = [next(places) if static is TRACED else None for static in layout.statics]
        counts = [jax.tree_util.tree_structure(arg).num_leaves for arg in self.args]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        chosen = tuple(self.args[i] for i in layout.argnums)
        inner = iter([starts[i] + k for i in layout.argnums for k in range(counts[i])])
        leaves, treedef = jax.tree_util.tree_flatten(chosen, is_leaf=is_none)
        rows = [
            (name, None if leaf is None else marks[next(inner)], leaf is not None)
            for name, leaf in zip(key_paths(chosen, root), leaves, strict=True)
        ]
        return treedef, jax.tree_util.tree_structure(chosen), rows


def _is_traced(leaf: Any) -> bool:
    if _is_type(leaf):
        return True
    if isinstance(leaf, _ARRAYS):
        return not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "OSUMm"
    return hasattr(leaf, "__jax_array__")


def take_apart(
    who: str,
    root: str,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: Any,
    *,
    abstract: bool = False,
) -> Call:
    """Resolve a call of `fun`: `argnums` are the positions that move, None for all; `abstract` allows types."""
    bound = unwrap(fun)
    shift = len(bound.args)
    positions = tuple(i + shift for i in check_argnums(who, argnums, len(args)))
    args, kwargs = bound.args + args, {**bound.kwargs, **kwargs} if kwargs else bound.kwargs
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    traced: list[Any] = []
    statics: list[Any] = []
    fixed: list[Any] = []
    given_types = 0
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            traced.append(leaf)
            statics.append(TRACED)
        elif _is_traced(leaf):
            given_types += _is_type(leaf)
            traced.append(leaf if _is_type(leaf) else _as_array(leaf))
            statics.append(TRACED)
        else:
            statics.append(leaf)
            fixed.append((len(statics), type(leaf), leaf))
    layout = Layout(tree, positions, shift, tuple(statics))
    call = Call(bound.target, layout, traced, (tree, positions, tuple(fixed)), args, kwargs)
    if fixed:
        _check_hashable(who, root, call)
    if given_types and not abstract:
        what = "these arguments are types without values"
        raise TypeError(compose(who, what, call.types_given(root), "pass arrays"))
    return call


def _as_array(leaf: Any) -> Any:
    """A number or NumPy array as an array with a value, inside `jax.jit` too."""
    with jax.ensure_compile_time_eval():
        return jax.numpy.asarray(leaf)


def _is_type(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _check_hashable(who: str, root: str, call: Call) -> None:
    bad: list[str] = []
    for i, leaf in enumerate(call.layout.statics):
        try:
            hash(leaf)
        except TypeError:
            bad.append(f"{call.names(root)[i]}: {type(leaf).__name__}")
    if bad:
        what = "these arguments are no arrays, so they are static, but they cannot be hashed"
        raise TypeError(compose(who, what, bad, "pass arrays, or something hashable"))


def refuse_strings(who: str, primals: Sequence[Any], argnums: Any) -> None:
    """A string as a whole primal is a mistake (inside a tree it is a held leaf)."""
    positions = check_argnums(who, argnums, len(primals))
    bad = [f"primals[{i}]: {short(primals[i])}" for i in positions if isinstance(primals[i], str | bytes)]
    if bad:
        raise TypeError(compose(who, "a string has no derivative", bad, "leave it out of argnums"))

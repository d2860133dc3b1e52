"""Trees and leaves as plain text and plain arrays: described, hashed, stored, and made again.

A description names kinds of containers and key paths; it is JSON. Containers of Python and leaves of JAX can be made
again from it. A class of the user's cannot: that would mean to import a name that a file gives. This module must not
know functions or derivatives.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from linjac._tree import is_key, short, type_of

DEPTH = 24  # nesting of a tree that is described: three levels of JSON each
BITS = 1 << 12  # of an int at most
STATIC = ("float", "complex", "int", "bool", "str", "callable")
LEAF = {
    "name": str,
    "kind": ("array", "key", *STATIC),
    "dtype": str,
    "shape": [int],
    "sha256": str,
    "text": (str, None),
    "data": (str, None),
}
_DTYPE = re.compile(r"bool|(u?int|float|bfloat|complex)[1-9]\w{0,20}")


class Item(NamedTuple):
    """One leaf: its key path, its kind, and its value as JAX takes it; `trouble` says why it cannot be recorded."""

    name: str
    kind: str
    value: Any
    trouble: str = ""


class Described(NamedTuple):
    """A tree taken apart: JSON (kinds of containers, keys, numbers of leaves), its leaves, its foreign containers."""

    tree: Any
    leaves: list[Item]
    foreign: list[str]


# taking apart ---------------------------------------------------------------------------------------------------------
def describe(tree: Any, root: str) -> Described:
    """Take a tree apart; nothing is refused here, trouble is noted at the leaf."""
    found = Described([], [], [])
    return found._replace(tree=_describe(tree, root, found, 0))


def _describe(node: Any, name: str, found: Described, depth: int) -> Any:
    if node is None:
        return ["none"]
    children = _children(node)
    if depth > DEPTH or (len(children) == 1 and children[0][0] == () and children[0][1] is node):
        trouble = f"nested deeper than {DEPTH} levels" if depth > DEPTH else ""
        found.leaves.append(Item(name, "object", node, trouble) if trouble else _item(name, node))
        return ["leaf", len(found.leaves) - 1]
    parts = [(path, _describe(child, name + jax.tree_util.keystr(path), found, depth + 1)) for path, child in children]
    if type(node) in (list, tuple):
        return [type(node).__name__, [part for _, part in parts]]
    keys = [path[0].key for path, _ in parts] if type(node) is dict else []
    if type(node) is dict and all(type(key) in (str, int) and not _is_huge(key) for key in keys):
        return ["dict", [[key, part] for key, (_, part) in zip(keys, parts, strict=True)]]
    kind = f"{type(node).__module__}.{type(node).__qualname__}"
    found.foreign.append(f"{name}: {type(node).__name__}")
    return ["node", kind, [[jax.tree_util.keystr(path), part] for path, part in parts]]


def _children(node: Any) -> list[tuple[Any, Any]]:
    """One level of a tree; a leaf is its own child at the empty path."""
    return jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]


def _item(name: str, leaf: Any) -> Item:
    for kind in (bool, int, float, complex, str):
        if type(leaf) is kind:
            return Item(name, kind.__name__, leaf, "an int of too many digits" if _is_huge(leaf) else "")
    if isinstance(leaf, int | float | complex | str) and not isinstance(leaf, np.generic):
        return Item(name, "object", leaf, "a class of its own, which is not described by its value")
    if isinstance(leaf, jax.core.Tracer):
        return Item(name, "object", leaf, "a value inside a trace, which is not known")
    aval = None if isinstance(leaf, jax.ShapeDtypeStruct | jax.Ref) else type_of(leaf)
    if aval is None:
        if callable(leaf) and hasattr(leaf, "__qualname__"):
            return Item(name, "callable", leaf)
        return Item(name, "object", leaf, "only arrays, numbers, texts and named functions can be recorded")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return Item(name, "object", leaf, "it has been deleted (donated to another computation)")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return Item(name, "object", leaf, "parts of it are on devices of another process")
    if is_key(aval):
        known = isinstance(jax.random.key_impl(cast(Any, leaf)), str)
        return Item(name, "key", leaf, "" if known else "a key of an implementation without a name")
    if not _DTYPE.fullmatch(str(aval.dtype)):
        return Item(name, "object", leaf, "this dtype cannot be recorded")
    # A weakly typed array is taken as one of its dtype: a file does not keep weak types.
    return Item(name, "array", np.asarray(jnp.asarray(leaf)))


def _is_huge(value: Any) -> bool:
    """Whether a value is an int that Python would not write in digits."""
    return type(value) is int and value.bit_length() > BITS


def trouble(found: Described) -> list[str]:
    """One line for each leaf that cannot be recorded."""
    return [f"{item.name}: {short(item.value)}, {item.trouble}" for item in found.leaves if item.trouble]


# hashes ---------------------------------------------------------------------------------------------------------------
def digest(item: Item) -> str:
    """SHA-256 over kind, dtype, shape and bytes of a leaf."""
    raw = bytes_of(item)
    head = f"{item.kind} {type_name(item)} {list(shape_of(item))}\n"
    state = hashlib.sha256(head.encode())
    state.update(raw if isinstance(raw, bytes) else raw.tobytes())
    return state.hexdigest()


def digest_of(found: Described) -> str:
    """SHA-256 over the description of a tree and its leaves."""
    return join_digests(found.tree, [digest(item) for item in found.leaves])


def join_digests(tree: Any, leaves: Sequence[str]) -> str:
    """The hash of a tree from those of its leaves."""
    return hashlib.sha256(json.dumps([tree, list(leaves)]).encode()).hexdigest()


def bytes_of(item: Item) -> Any:
    """The contents of a leaf: an array of a plain dtype, or the bytes of a text."""
    if item.kind == "array":
        return plain(item.value)
    if item.kind == "key":
        return np.asarray(jax.random.key_data(item.value))
    return text_of(item).encode("utf-8", "surrogatepass")


def plain(array: np.ndarray) -> np.ndarray:
    """An array of a dtype that every reader of `.npy` knows: bfloat16 and its like become unsigned integers."""
    dtype = array.dtype
    try:
        known = np.dtype(dtype.str) == dtype and dtype.kind in "biufc"
    except TypeError:
        known = False
    return array if known else np.ascontiguousarray(array).reshape(array.shape).view(_bits(dtype))


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"<u{dtype.itemsize}")


def text_of(item: Item) -> str:
    """A leaf that is no array, in words that give it back exactly."""
    value = item.value
    if item.kind == "float":
        return value.hex()
    if item.kind == "complex":
        return f"{value.real.hex()} {value.imag.hex()}"
    return f"{value.__module__}.{value.__qualname__}" if item.kind == "callable" else str(value)


def type_name(item: Item) -> str:
    """The dtype in full; for a key its implementation."""
    if item.kind == "array":
        return str(item.value.dtype)
    return str(jax.random.key_impl(item.value)) if item.kind == "key" else ""


def shape_of(item: Item) -> tuple[int, ...]:
    """The shape; () for a leaf that is no array."""
    return tuple(item.value.shape) if item.kind in ("array", "key") else ()


# storing --------------------------------------------------------------------------------------------------------------
def store(item: Item, keep: Callable[[np.ndarray], str] | None) -> dict[str, Any]:
    """A leaf as JSON; its contents go to `keep`, which gives the name of an entry, or are left out."""
    array = item.kind in ("array", "key")
    return {
        "name": item.name,
        "kind": item.kind,
        "dtype": type_name(item),
        "shape": list(shape_of(item)),
        "sha256": digest(item),
        "text": None if array or keep is None else text_of(item),
        "data": keep(bytes_of(item)) if array and keep is not None else None,
    }


class UnreadableError(Exception):
    """A description that contradicts itself or its arrays; the text says where."""


def restore(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> Item:
    """A leaf from its JSON and the arrays of a file, compared with its own hash."""
    item = Item(entry["name"], entry["kind"], _value(entry, arrays))
    if list(shape_of(item)) != entry["shape"] or type_name(item) != entry["dtype"] or digest(item) != entry["sha256"]:
        raise UnreadableError(f"{entry['name'][:80]!r} is not what its hash says")
    return item


def _value(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    kind, name, text = entry["kind"], entry["name"][:80], entry["text"]
    try:
        if kind == "array":
            return typed(arrays[entry["data"]], entry["dtype"])
        if kind == "key":
            return jax.random.wrap_key_data(jnp.asarray(arrays[entry["data"]]), impl=entry["dtype"])
        if kind == "complex":
            return complex(*map(float.fromhex, text.split(" ")))
        makers: dict[str, Callable[[str], Any]] = {
            "float": float.fromhex,
            "int": int,
            "bool": lambda word: {"True": True, "False": False}[word],
            "str": str,
        }
        return makers[kind](text)
    except UnreadableError:
        raise
    except Exception:  # whatever a text or an entry of a strange kind leads to
        raise UnreadableError(f"{name!r} cannot be made from the file") from None


def check_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a name that a file gives."""
    try:
        if _DTYPE.fullmatch(name):
            return np.dtype(name)
    except TypeError:
        pass
    raise UnreadableError(f"{name[:80]!r} is no dtype")


def typed(array: np.ndarray, name: str) -> np.ndarray:
    """The array of the named dtype whose contents these are."""
    dtype = check_dtype(name)
    if array.dtype == dtype:
        return array
    if array.dtype != _bits(dtype):
        raise UnreadableError(f"an array of {array.dtype} cannot hold {name}")
    return array.view(dtype)


def check_tree(node: Any, leaves: int) -> None:
    """Refuse a description that is malformed, or does not number its leaves in order."""
    numbers: list[int] = []
    _walk(node, numbers, 0)
    if numbers != list(range(leaves)):
        raise UnreadableError("a tree does not fit its leaves")


def _walk(node: Any, numbers: list[int], depth: int) -> None:
    kind = cast(list[Any], node)[0] if isinstance(node, list) and node else None
    rest = cast(list[Any], node)[1:] if kind is not None else []
    if depth > DEPTH + 1 or not isinstance(kind, str):
        raise UnreadableError("a tree is malformed")
    if kind == "none" and not rest:
        return
    if kind == "leaf" and len(rest) == 1 and type(rest[0]) is int:
        numbers.append(rest[0])
    elif kind in ("list", "tuple") and len(rest) == 1 and isinstance(rest[0], list):
        for child in cast(list[Any], rest[0]):
            _walk(child, numbers, depth + 1)
    elif (kind == "dict" and len(rest) == 1) or (kind == "node" and len(rest) == 2 and isinstance(rest[0], str)):
        for pair in cast(list[Any], rest[-1]) if isinstance(rest[-1], list) else [None]:
            pair = cast(list[Any], pair) if isinstance(pair, list) else []
            if len(pair) != 2 or type(pair[0]) not in ((str, int) if kind == "dict" else (str,)):
                raise UnreadableError("a tree is malformed")
            _walk(pair[1], numbers, depth + 1)
    else:
        raise UnreadableError("a tree is malformed")


def assemble(node: Any, leaves: Sequence[Any]) -> Any:
    """The tree of a description that `check_tree` accepted; a class of the user's is refused."""
    kind = node[0]
    again = functools.partial(assemble, leaves=leaves)
    if kind == "none":
        return None
    if kind == "leaf":
        return leaves[node[1]]
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(again, node[1]))
    if kind == "dict":
        return {key: again(child) for key, child in node[1]}
    raise UnreadableError(f"a container of class {node[1][:80]!r} cannot be made from a file")

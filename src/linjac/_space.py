"""One side of a linear map: the tree of its vectors, which leaves move, and whether a given tree fits.

A `Space` describes the tangents (one tree for each differentiated argument) or the cotangent (the output tree) of one
traced function. Its vectors are handled flat, as the list of the leaves that move. A leaf that cannot move (integer,
bool, PRNG key, no array) is held: its entry is None. A space holds types and names, never data, and knows no program.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.dtypes import float0

from linjac._errors import TangentError, compose
from linjac._tree import PyTreeDef, is_complex, is_none, key_paths, rebuild, short, size_of, struct_of, type_of


class Leaf(NamedTuple):
    """One leaf of the tree: its name, its type (None where it is no array), its slot among those that move."""

    name: str
    aval: Any
    slot: int | None
    present: bool = True  # False for a None in the tree


class Words(NamedTuple):
    """What the messages of a space call things."""

    root: str  # "tangents" or "cotangent"
    other: str  # what it has to fit: "the point" or "the output"
    single: str  # the call for one vector
    batch: str  # the call for a batch


TANGENTS = Words("tangents", "the point", "linear_fn", "linear_fn.many")
COTANGENT = Words("cotangent", "the output", "linear_fn.transpose", "linear_fn.transpose_many")


class Space:
    """The trees that one side of a linear map takes."""

    def __init__(self, words: Words, treedef: PyTreeDef, leaves: Sequence[Leaf], plain: PyTreeDef) -> None:
        self.words = words
        self.treedef = treedef  # with None as a leaf
        self.leaves = tuple(leaves)
        moving = sorted((leaf for leaf in leaves if leaf.slot is not None), key=lambda leaf: leaf.slot or 0)
        self.avals = tuple(leaf.aval for leaf in moving)
        self.names = tuple(leaf.name for leaf in moving)
        self.size = sum(size_of(aval) for aval in self.avals)
        self.is_complex = any(is_complex(aval) for aval in self.avals)
        # what jax.tree.flatten gives for a vector whose held leaves are None: compared first, at every call
        whole = all(leaf.slot is not None or not leaf.present for leaf in self.leaves)
        self._flat_treedef, order = (plain, list(range(len(moving)))) if whole else _without_held(treedef, self.leaves)
        self._flat_types = tuple((aval.shape, aval.dtype) for aval in self.avals)
        self._whole = whole
        self._in_order = self._flat_treedef is not None and order == list(range(len(self.avals)))

    # one vector -----------------------------------------------------------------------------------------------------
    def flatten(self, who: str, tree: Any) -> list[Any]:
        """The moving leaves of a vector, checked: same structure, shapes and dtypes as the space, exactly."""
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        if self._in_order and treedef == self._flat_treedef:
            for leaf, (shape, dtype) in zip(leaves, self._flat_types, strict=False):
                if not isinstance(leaf, jax.Array) or leaf.shape != shape or leaf.dtype != dtype:
                    break
            else:
                return leaves
        return self._flatten_slowly(who, tree)

    def _flatten_slowly(self, who: str, tree: Any) -> list[Any]:
        given = self._aligned(who, tree, batch=False)
        flat: list[Any] = [None] * len(self.avals)
        bad: list[str] = []
        kinds: list[str] = []
        for leaf, value in zip(self.leaves, given, strict=True):
            if leaf.slot is None:
                bad += _refuse_held(leaf, value, ((leaf.aval.shape,) if leaf.aval is not None else ()))
            elif fits(value, leaf.aval):
                flat[leaf.slot] = jax.numpy.asarray(value, leaf.aval.dtype)
            else:
                bad.append(_mismatch(leaf, value))
            if len(bad) > len(kinds):
                kinds.append(_kind_of(leaf, value))
        if bad:
            remedy = self._remedy(given, tree)
            kind = "batch" if remedy.startswith("for a batch") else kinds[0]
            raise TangentError(compose(who, self._what(), bad, remedy), kind=kind)
        return flat

    # a batch of vectors ---------------------------------------------------------------------------------------------
    def flatten_batch(self, who: str, tree: Any) -> tuple[list[Any], int]:
        """The moving leaves of a batch of vectors, and how many there are: axis 0 of every leaf is the direction."""
        given = self._aligned(who, tree, batch=True)
        count = self._count(who, given)
        flat: list[Any] = [None] * len(self.avals)
        bad: list[str] = []
        for leaf, value in zip(self.leaves, given, strict=True):
            if leaf.slot is None:
                shape = None if leaf.aval is None else leaf.aval.shape
                bad += _refuse_held(leaf, value, () if shape is None else (shape, (count, *shape)))
            else:
                flat[leaf.slot] = jax.numpy.asarray(value, leaf.aval.dtype)
        if bad:
            raise TangentError(compose(who, self._what(), bad), kind="held leaf")
        return flat, count

    def _count(self, who: str, given: Sequence[Any]) -> int:
        bad: list[str] = []
        kinds: list[str] = []
        counts: dict[int, str] = {}
        for leaf, value in zip(self.leaves, given, strict=True):
            if leaf.slot is None:
                continue
            given_type = None if isinstance(value, jax.ShapeDtypeStruct) else type_of(value)
            shape = None if given_type is None else given_type.shape
            wanted = struct_of(leaf.aval)
            if shape is None or len(shape) == 0 or shape[1:] != wanted.shape:
                missing = " (the axis of directions is missing)" if shape == wanted.shape else ""
                bad.append(f"{leaf.name}: expected {short(wanted, 'K')}, got {short(value)}{missing}")
                kinds.append("no array" if shape is None else "batch" if missing else "shape")
            elif not fits(value, jax.ShapeDtypeStruct(shape, wanted.dtype)):
                bad.append(f"{leaf.name}: expected {short(wanted, 'K')}, got {short(value)}{_kind(value, wanted)}")
                kinds.append("dtype")
            else:
                counts.setdefault(shape[0], leaf.name)
        if bad:
            remedy = f"for a single one use {self.words.single}" if all("missing" in line for line in bad) else ""
            raise TangentError(compose(who, self._what("a batch of "), bad, remedy), kind=kinds[0])
        if len(counts) > 1:
            lines = [f"{name}: {count} directions" for count, name in counts.items()]
            raise TangentError(compose(who, "the leading axes disagree", lines), kind="batch")
        return next(iter(counts), 0)

    # back to trees --------------------------------------------------------------------------------------------------
    def unflatten(self, who: str, flat: Sequence[Any], held: Any = None) -> Any:
        """The tree of a flat vector (or batch, or anything with one entry for each moving leaf)."""
        if self._whole:
            return rebuild(who, self._flat_treedef, flat)
        return rebuild(who, self.treedef, [held if leaf.slot is None else flat[leaf.slot] for leaf in self.leaves])

    def unflatten_with_zeros(self, who: str, flat: Sequence[Any], batch: tuple[int, ...] = ()) -> Any:
        """As `unflatten`, with the float0 zeros that JAX gives where an integer output is held."""
        if self._whole:
            return rebuild(who, self._flat_treedef, flat)

        def entry(leaf: Leaf) -> Any:
            if leaf.slot is not None:
                return flat[leaf.slot]
            return None if leaf.aval is None else np.zeros((*batch, *leaf.aval.shape), float0)

        return rebuild(who, self.treedef, [entry(leaf) for leaf in self.leaves])

    # messages -------------------------------------------------------------------------------------------------------
    def _aligned(self, who: str, tree: Any, *, batch: bool) -> list[Any]:
        """The leaves of a tree that has this structure; a tree that has not is refused."""
        given, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_none)
        if treedef == self.treedef:
            return given
        wanted = {leaf.name for leaf in self.leaves}
        found = key_paths(tree, self.words.root)
        bad = [f"{leaf.name}: missing, expected {_wanted(leaf)}" for leaf in self.leaves if leaf.name not in set(found)]
        extra = zip(found, given, strict=True)
        bad += [f"{name}: not in {self.words.other}, got {short(leaf)}" for name, leaf in extra if name not in wanted]
        if not bad:
            bad = [f"{self.words.root}: expected {self.treedef}, got {treedef}"]
        what = f"{self.words.root} {'have' if self._plural else 'has'} another structure than {self.words.other}"
        expected = len(self.treedef.children())
        if self._plural and isinstance(tree, tuple) and len(tree) != expected:
            what = f"expected {expected} {self.words.root}, one for each differentiated argument, got {len(tree)}"
        raise TangentError(compose(who, what, bad, self._unwrapped(tree, batch=batch)), kind="structure")

    @property
    def _plural(self) -> bool:
        return self.words.root.endswith("s")

    def _what(self, batch: str = "") -> str:
        if batch:
            return f"a batch of {self.words.root.rstrip('s')}s does not fit {self.words.other}"
        return f"{self.words.root} {'do' if self._plural else 'does'} not fit {self.words.other}"

    def _unwrapped(self, tree: Any, *, batch: bool) -> str:
        """The hint for tangents wrapped in one more tuple, as jax.jvp takes them."""
        if self._plural and isinstance(tree, tuple) and len(tree) == 1 and isinstance(tree[0], tuple | list):
            inner = jax.tree_util.tree_structure(tuple(tree[0]), is_leaf=is_none)
            if inner == self.treedef:
                call = self.words.batch if batch else self.words.single
                return f"did you mean {call}(*{self.words.root})?"
        return ""

    def _remedy(self, given: Sequence[Any], tree: Any) -> str:
        moving = [(value, leaf) for value, leaf in zip(given, self.leaves, strict=True) if leaf.slot is not None]
        shapes = [(np.shape(value) if type_of(value) is not None else None, leaf.aval.shape) for value, leaf in moving]
        if shapes and all(got is not None and len(got) > 0 and got[1:] == want for got, want in shapes):
            return f"for a batch of directions use {self.words.batch}"
        return self._unwrapped(tree, batch=False)


def _without_held(treedef: PyTreeDef, leaves: Sequence[Leaf]) -> tuple[PyTreeDef, list[int]]:
    """The plain treedef of a vector whose held leaves are None, and the slots in the order of its leaves."""
    marks = [None if leaf.slot is None else leaf.slot for leaf in leaves]
    try:
        order, plain = jax.tree_util.tree_flatten(jax.tree_util.tree_unflatten(treedef, marks))
    except Exception:  # a container that accepts arrays only: such trees take the slower check
        return None, []
    return plain, order


def fits(value: Any, aval: Any) -> bool:
    """True where JAX would give this value exactly this shape and dtype.

    Python floats (and complex numbers, for complex leaves) are taken for scalars; ints and bools are not.
    """
    if isinstance(value, bool | int | jax.ShapeDtypeStruct):
        return False
    given = type_of(value)
    if given is None or given.shape != aval.shape:
        return False
    if given.dtype == aval.dtype:
        return True
    if isinstance(value, float) and not isinstance(value, np.generic):
        return True
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return is_complex(aval)
    return False


def _wanted(leaf: Leaf) -> str:
    return "None" if leaf.slot is None else short(leaf.aval)


def _kind(value: Any, aval: Any) -> str:
    if isinstance(value, jax.ShapeDtypeStruct):
        return " (a type, not an array)"
    given = type_of(value)
    if given is not None and is_complex(given) and not is_complex(aval):
        return " (complex for a real leaf)"
    if isinstance(value, int | bool):
        return " (a Python float is taken here, an int is not)"
    return ""


def _kind_of(leaf: Leaf, value: Any) -> str:
    """What is wrong with a value that does not fit a leaf, in a word."""
    if leaf.slot is None:
        return "held leaf"
    given = None if isinstance(value, jax.ShapeDtypeStruct) else type_of(value)
    if given is None:
        return "no array"
    return "dtype" if given.shape == leaf.aval.shape else "shape"


def _mismatch(leaf: Leaf, value: Any) -> str:
    return f"{leaf.name}: expected {short(leaf.aval)}, got {short(value)}{_kind(value, leaf.aval)}"


def _refuse_held(leaf: Leaf, value: Any, shapes: tuple[tuple[int, ...], ...]) -> list[str]:
    """A held leaf takes None, or the float0 zero of its shape; anything else is refused, not ignored."""
    if value is None or (getattr(value, "dtype", None) == float0 and np.shape(value) in shapes):
        return []
    what = "no array" if leaf.aval is None else short(leaf.aval)
    zero = "" if leaf.aval is None else f" or np.zeros({leaf.aval.shape}, jax.dtypes.float0)"
    return [f"{leaf.name}: this leaf cannot move ({what}), expected None{zero}, got {short(value)}"]

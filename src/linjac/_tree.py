"""Leaves and trees: their types in short, their key paths, and rebuilding.

Everything here looks at types only; it must not know linearizations, and it never reads the contents of an array.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.dtypes import extended, float0
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

type PyTreeDef = Any  # jax.tree_util.PyTreeDef, which JAX leaves untyped

_ABBREVIATIONS = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"))


def is_none(leaf: object) -> bool:
    """True for None: the `is_leaf` that keeps None visible in a flattened tree."""
    return leaf is None


def type_of(leaf: Any) -> Any:
    """The abstract value of a leaf, or None where JAX does not take it as an array."""
    try:
        return jax.typeof(leaf)
    except (TypeError, OverflowError, ValueError):  # the last two from Python ints beyond 64 bits, and beyond print
        return None


def is_inexact(aval: Any) -> bool:
    """True for floating and complex types, the only ones that can move."""
    return jax.dtypes.issubdtype(aval.dtype, np.inexact)


def is_complex(aval: Any) -> bool:
    """True for complex types."""
    return jax.dtypes.issubdtype(aval.dtype, np.complexfloating)


def is_key(aval: Any) -> bool:
    """True for PRNG keys and other extended types."""
    return jax.dtypes.issubdtype(aval.dtype, extended)


def size_of(aval: Any) -> int:
    """Number of elements."""
    return math.prod(aval.shape)


def bytes_of(aval: Any) -> int:
    """Bytes of one array of this type (keys count as their base data)."""
    if is_key(aval):
        return size_of(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))) * 4
    return size_of(aval) * np.dtype(aval.dtype).itemsize


def promoted(types: Sequence[Any]) -> np.dtype[Any]:
    """The standard promotion of the dtypes, also where the user has asked for strict promotion."""
    if not types:
        return np.dtype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        try:
            return np.dtype(jax.numpy.result_type(*[aval.dtype for aval in types]))
        except ValueError:  # 8-bit floats promote with nothing: the widest decides
            widest = max(types, key=lambda aval: np.dtype(aval.dtype).itemsize)
            return np.dtype(widest.dtype)


def short_dtype(dtype: Any) -> str:
    """`f32` for float32, `bf16` for bfloat16, `key<fry>` for a PRNG key."""
    name = "float0" if dtype == float0 else str(dtype)
    for long, brief in _ABBREVIATIONS:
        if name.startswith(long) and name != "float0":
            return brief + name[len(long) :]
    return name


def short(leaf: Any, batch: str = "") -> str:
    """`f32[3,4]` for an array or its type, the class name for anything else; never a value.

    `batch` is put in front of the axes: `short(x, "K")` is `f32[K,3,4]`.
    """
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.ShapedArray) else type_of(leaf)
    if aval is None:
        if not isinstance(leaf, np.ndarray):
            return "None" if leaf is None else type(leaf).__name__
        aval = leaf
    axes = ([batch] if batch else []) + [str(d) for d in aval.shape]
    return f"{short_dtype(aval.dtype)}[{','.join(axes)}]"


def key_paths(tree: Any, root: str) -> list[str]:
    """One name for each leaf (None included): `root` and its key path."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    return [root + jax.tree_util.keystr(path) for path, _ in paths]


def rebuild(who: str, treedef: PyTreeDef, leaves: Sequence[Any]) -> Any:
    """Unflatten; a container class that refuses the leaves is named in a TypeError."""
    try:
        return jax.tree_util.tree_unflatten(treedef, leaves)
    except Exception as err:
        err.add_note(
            f"linjac.{who}: a container class of {treedef} refuses the leaves {[short(leaf) for leaf in leaves[:5]]}; "
            "differentiate its arrays instead of the container, or let its unflatten accept any leaf"
        )
        raise


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype, weak type, and under a mesh the sharding and varying axes of an abstract value."""
    if is_key(aval) or not getattr(aval, "sharding", None):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type, manual_axis_type=aval.manual_axis_type
    )


def explicit_sharding(aval: Any, *, before: int = 0, after: int = 0) -> Any:
    """The sharding that is part of a type on a mesh with explicit axes, else None; with more axes, not sharded."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*[None] * before, *sharding.spec, *[None] * after))


def laid_like(leaf: Any, aval: Any) -> Any:
    """A batch of vectors (axis 0), on a mesh with explicit axes sharded as its type is."""
    sharding = explicit_sharding(aval, before=1)
    return leaf if sharding is None else jax.sharding.reshard(leaf, sharding)


def axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes of an enclosing `shard_map` over which a type differs between devices."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(manual, "varying", ()))


def varying_axes(leaf: Any) -> frozenset[str]:
    """The same of a value."""
    return axes_of(type_of(leaf))


def vary(leaf: Any, axes: frozenset[str]) -> Any:
    """The value, marked as varying over these axes too."""
    missing = () if leaf is None or not axes else tuple(sorted(axes - varying_axes(leaf)))
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def align(*groups: Sequence[Any]) -> list[list[Any]]:
    """Mark every array as varying over the union of the axes over which any of them varies."""
    axes: frozenset[str] = frozenset().union(*(varying_axes(leaf) for group in groups for leaf in group))
    return [[vary(leaf, axes) for leaf in group] for group in groups]


def manual_axes() -> frozenset[str]:
    """The axes of the enclosing `shard_map`s."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


with jax.ensure_compile_time_eval():  # also where this module is imported inside a trace
    _OUTSIDE = get_opaque_trace_state()


def inside_transformation() -> bool:
    """True where operations on plain arrays too are traced, as inside `jax.jit`; nothing is computed to find out."""
    return get_opaque_trace_state() != _OUTSIDE


def in_trace(*groups: Sequence[Any]) -> bool:
    """True where any leaf belongs to an enclosing JAX transformation."""
    return any(isinstance(leaf, jax.core.Tracer) for group in groups for leaf in group)

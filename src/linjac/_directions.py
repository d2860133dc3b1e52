"""Many directions through one product: in chunks that fit a memory budget, a chunk at a time under `vmap`.

Directions come as a batch (axis 0) or are made here from an index, as rows of the identity; a basis is never stored.
This module must not know what the product is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from beartype import beartype
from jax import lax
from jax.extend.core import Literal
from jaxtyping import Int, jaxtyped

from linjac._constants import Jaxpr, scan_counts, subjaxprs
from linjac._tree import align, bytes_of, explicit_sharding, is_key, size_of

BUDGET = 16 << 20  # bytes of scratch where the caller says nothing
FLOOR = 16  # directions in a chunk at least, where the caller says nothing
CEILING = 1024  # more directions a chunk gain no time; 256 keep two cores half busy (tests/benchmarks/bench_many.py)


# how many at a time ---------------------------------------------------------------------------------------------------
# Operations whose operands and results are buffers; what lies between two of them is fused by XLA.
_SOLID = frozenset(
    {"dot_general", "conv_general_dilated", "scan", "while", "cond", "jit", "custom_jvp_call", "custom_vjp_call"}
    | {"custom_lin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "fft", "scatter", "scatter-add"}
    | {"scatter_add", "triangular_solve", "cholesky", "lu", "qr", "eigh", "svd", "linear_solve", "custom_linear_solve"}
    | {"reduce_window_sum", "select_and_scatter_add", "select_and_gather_add", "pure_callback", "remat2", "checkpoint"}
    | {"shard_map", "all_gather", "psum", "dynamic_update_slice", "ragged_dot_general"}
)


def _inner_flags(eqn: Any, inner: Jaxpr, flags: Sequence[bool]) -> list[bool]:
    """Which arguments of a nested jaxpr depend on the direction, given which operands do."""
    if eqn.primitive.name == "scan":
        consts, carry = scan_counts(eqn)
        return [flag or consts <= i < consts + carry for i, flag in enumerate(flags)]
    if eqn.primitive.name == "cond":
        return list(flags[1:])
    return list(flags) if len(flags) == len(inner.invars) else [True] * len(inner.invars)


def bytes_per_direction(jaxpr: Jaxpr, flags: Sequence[bool]) -> int:
    """Estimate the scratch of one direction: the largest sum of values alive at once that depend on it.

    `flags` say which arguments depend on the direction. Values that only elementwise operations and reductions read are
    not counted: XLA fuses them away.
    """
    last: dict[Any, int] = {}
    stored = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    for i, eqn in enumerate(jaxpr.eqns):
        reads = [var for var in eqn.invars if not isinstance(var, Literal)]
        last.update((var, i) for var in reads)
        if eqn.primitive.name in _SOLID:
            stored.update((*reads, *eqn.outvars))
    last.update((var, len(jaxpr.eqns)) for var in jaxpr.outvars if not isinstance(var, Literal))
    alive = {var: _bytes(var) for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    dependent = set(alive)
    peak = now = sum(alive.values())
    for i, eqn in enumerate(jaxpr.eqns):
        reads = {var for var in eqn.invars if not isinstance(var, Literal)}
        if not reads & dependent:
            continue
        operands = [not isinstance(var, Literal) and var in dependent for var in eqn.invars]
        nested = (bytes_per_direction(sub, _inner_flags(eqn, sub, operands)) for sub in subjaxprs(eqn))
        inner = max(nested, default=0)
        for var in eqn.outvars:
            dependent.add(var)
            alive[var] = _bytes(var) if var in stored else 0
            now += alive[var]
        peak = max(peak, now + inner)
        for var in (*reads, *eqn.outvars):
            if last.get(var, -1) <= i and var in alive:
                now -= alive.pop(var)
    return peak


def _bytes(var: Any) -> int:
    aval = var.aval
    return bytes_of(aval) if hasattr(aval, "shape") and not is_key(aval) and aval.dtype.itemsize else 0


def chunk_limit(per_direction: int, chunk_size: int | None, memory_budget: int | None) -> int:
    """Directions in a chunk at most."""
    if chunk_size is not None:
        return chunk_size
    if memory_budget is not None:
        return max(1, min(CEILING, memory_budget // max(1, per_direction)))
    return max(FLOOR, min(CEILING, BUDGET // max(1, per_direction)))


def balanced(count: int, limit: int) -> tuple[int, int]:
    """Number of chunks and directions in each: equal, so that one compiled body serves all."""
    if count == 0:
        return 0, 0
    chunks = -(-count // min(limit, count))
    return chunks, -(-count // chunks)


# seeds ----------------------------------------------------------------------------------------------------------------
@jaxtyped(typechecker=beartype)
def basis(types: Sequence[Any], start: Int[jax.Array, ""] | int, count: int) -> list[jax.Array]:
    """Rows `start` to `start + count` of the identity over the concatenated leaves, each (count, *shape)."""
    rows = jnp.asarray(start, jnp.int32) + lax.iota(jnp.int32, count)
    seeds: list[jax.Array] = []
    offset = 0
    for aval in types:
        size = size_of(aval)
        columns = offset + lax.iota(jnp.int32, size)
        seeds.append((rows[:, None] == columns[None, :]).astype(aval.dtype).reshape((count, *aval.shape)))
        offset += size
    return seeds


# sweeps ---------------------------------------------------------------------------------------------------------------
type Product = Callable[[list[Any]], list[Any]]
type Take = Callable[[Any, int], list[Any]]  # (start, how many) -> that many directions, on axis 0


def from_batch(batch: Sequence[Any]) -> Take:
    """Directions out of a batch."""

    def take(start: Any, size: int) -> list[Any]:
        if isinstance(start, int) and all(leaf.shape[0] == size for leaf in batch):
            return list(batch)
        return [lax.dynamic_slice_in_dim(leaf, start, size, 0) for leaf in batch]

    return take


def product_of_rows(product: Product, rows: list[Any], size: int) -> list[Any]:
    """A chunk at once; a single direction without `vmap`, for what cannot be mapped (host callbacks)."""
    if size == 1:
        return [leaf[None] for leaf in product([leaf[0] for leaf in rows])]
    return jax.vmap(product)(rows)


def zeros_before(aval: Any, count: int) -> jax.Array:
    """Zeros of a type with one more leading axis, laid out over an explicit mesh as the type is."""
    return jnp.zeros((count, *aval.shape), aval.dtype, out_sharding=explicit_sharding(aval, before=1))


def sweep(product: Product, take: Take, types: Sequence[Any], count: int, limit: int, like: Sequence[Any]) -> list[Any]:
    """Apply a product to `count` directions, at most `limit` at a time; to be traced.

    The last chunk starts early enough to be full, so that any count works with one body. `like` are values that vary
    over the same axes of an enclosing shard_map as the result does.
    """
    chunks, size = balanced(count, limit)
    if chunks == 0:
        return [jnp.zeros((0, *aval.shape), aval.dtype) for aval in types]
    if chunks == 1:
        return product_of_rows(product, take(0, size), size)

    def step(outs: list[Any], chunk: Any) -> tuple[list[Any], None]:
        start = jnp.minimum(chunk * size, count - size)
        rows = product_of_rows(product, take(start, size), size)
        return [lax.dynamic_update_slice_in_dim(out, row, start, 0) for out, row in zip(outs, rows, strict=True)], None

    empty = [zeros_before(aval, count) for aval in types]
    return lax.scan(step, align(empty, like)[0], jnp.arange(chunks))[0]


def sweep_eagerly(
    product: Product, take: Take, types: Sequence[Any], count: int, limit: int, like: Sequence[Any]
) -> list[Any]:
    """As `sweep`, op by op: a Python loop over chunks."""
    del like
    _, size = balanced(count, limit)
    if size == 0:
        return [jnp.zeros((0, *aval.shape), aval.dtype) for aval in types]
    starts = [min(start, count - size) for start in range(0, count, size)]
    parts = [product_of_rows(product, take(start, size), size) for start in starts]
    overlap = starts[-2] + size - starts[-1] if len(starts) > 1 else 0
    parts[-1] = [leaf[overlap:] for leaf in parts[-1]]
    return [jnp.concatenate(leaves) for leaves in zip(*parts, strict=True)]

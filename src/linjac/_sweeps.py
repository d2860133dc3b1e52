"""Dense Jacobians by sweeps: forward over the inputs, reverse over the outputs, a chunk at a time.

A sweep yields one part for each leaf at its far end: forward parts are (size of output leaf, n), reverse parts are
(m, size of input leaf). On a mesh with explicit axes the far leaf keeps its axes, (*shape, n) and (m, *shape): JAX
refuses to merge sharded ones. How to sweep is given as a `Recipe`; why, is not known here. Seeds are made from an
index.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from linjac._blocks import as_blocks, as_matrix
from linjac._cut import Cut, find_cut, matrix_of, rows_of_cut
from linjac._directions import balanced, basis, product_of_rows
from linjac._program import Data, Program, TracedProgram
from linjac._space import Space
from linjac._tree import align, explicit_sharding, is_complex, laid_like, size_of, vary

type Rows = Callable[[Any, int], list[Any]]  # (start, how many) -> for each far leaf (how many, *its axes in a part)


class Recipe(NamedTuple):
    """How to sweep; static, so that it is part of the key of a compiled program."""

    direction: str  # "forward" or "reverse"
    chunk_size: int
    fused: bool = False  # forward: push through the function itself, primal and tangents together
    pinned: bool = False  # a barrier keeps XLA from computing residuals anew for every direction
    laid_out: bool = False  # forward: rows first, then a barrier, then the transpose
    cut: bool = False  # the identity is not multiplied into the first weight matrix
    paired: bool = False  # one real end, one complex: two real sweeps


def ends(program: Program, direction: str) -> tuple[Space, Space]:
    """The space that is seeded and the far one."""
    return (program.inputs, program.outputs) if direction == "forward" else (program.outputs, program.inputs)


def parts(program: Program, data: Data, recipe: Recipe) -> list[Any]:
    """The parts of the dense Jacobian. `data` is stored data, or, for a fused recipe, the point and all constants."""
    near, far = ends(program, recipe.direction)
    count = near.size
    forward = recipe.direction == "forward"
    if count == 0 or far.size == 0:
        return [_empty(aval, aval.dtype, count, forward) for aval in far.avals]
    if recipe.pinned:
        data = data._replace(residuals=_pin(data.residuals))
    if recipe.fused and recipe.chunk_size >= count and not recipe.paired:
        columns = jax.vmap(lambda seed: program.jvp(data, seed), out_axes=-1)(_seeds(program, near, 0, count))
        return [leaf.reshape(*_axes(aval), count) for leaf, aval in zip(columns, far.avals, strict=True)]
    return _collect(_rows(program, data, recipe), far, count, recipe, [*data.point, *data.constants, *data.residuals])


def _pin(leaves: list[Any]) -> list[Any]:
    """Residuals are computed once, not again for every direction (measured by tests/benchmarks/bench_sweeps.py)."""
    return list(lax.optimization_barrier(leaves)) if leaves else leaves


def _axes(aval: Any) -> tuple[int, ...]:
    """The axes of a far leaf in its part."""
    return (size_of(aval),) if explicit_sharding(aval) is None else aval.shape


def _empty(aval: Any, dtype: Any, count: int, forward: bool) -> Any:
    """A part of zeros, sharded on a mesh with explicit axes as its leaf is."""
    sharding = explicit_sharding(aval, after=1) if forward else explicit_sharding(aval, before=1)
    axes = _axes(aval)
    return jnp.zeros((*axes, count) if forward else (count, *axes), dtype, out_sharding=sharding)


# the rows of one chunk ------------------------------------------------------------------------------------------------
def _rows(program: Program, data: Data, recipe: Recipe) -> Rows:
    near, far = ends(program, recipe.direction)
    product = _product(program, data, recipe)
    cut = find_cut(program.kernel, recipe.direction) if recipe.cut and program.kernel is not None else None
    if cut is not None and not recipe.paired:
        return _cut_rows(program, data, cut, far)

    def rows(start: Any, size: int) -> list[Any]:
        seeds = _seeds(program, near, start, size)
        first = product_of_rows(product, seeds, size)
        if recipe.paired:
            turned = [_turn(seed, recipe.direction) for seed in seeds]
            sign = -1j if recipe.direction == "forward" else 1j
            first = [_combine(a, b, sign) for a, b in zip(first, product_of_rows(product, turned, size), strict=True)]
        return _as_rows(first, far, size)

    return rows


def _as_rows(leaves: list[Any], far: Space, size: int) -> list[Any]:
    pairs = zip(leaves, far.avals, strict=True)
    return [laid_like(leaf.reshape(size, *_axes(aval)), aval) for leaf, aval in pairs]


def _seeds(program: Program, near: Space, start: Any, size: int) -> list[Any]:
    """Rows of the identity, placed as the leaves are: over an explicit mesh, or the axes of an enclosing shard_map."""
    seeds = zip(basis(near.avals, start, size), near.avals, strict=True)
    return [vary(laid_like(seed, aval), program.axes) for seed, aval in seeds]


def _product(program: Program, data: Data, recipe: Recipe) -> Callable[[list[Any]], list[Any]]:
    if recipe.direction == "forward":
        return lambda seed: (program.jvp if recipe.fused else program.push)(data, seed)
    return lambda seed: program.pull(data, seed)


def _turn(seed: Any, direction: str) -> Any:
    """The second real sweep: along i for complex leaves, along nothing for real ones."""
    return seed * (1j if direction == "forward" else -1j) if is_complex(seed) else jnp.zeros_like(seed)


def _combine(first: Any, second: Any, sign: complex) -> Any:
    wide = _part_dtype(first.dtype, True)
    return first.astype(wide) + jnp.asarray(sign, wide) * second.astype(wide)


def _cut_rows(program: Program, data: Data, cut: Cut, far: Space) -> Rows:
    residuals = program.residuals(data)
    matrix = matrix_of(cut, residuals)

    def rows(start: Any, size: int) -> list[Any]:
        return _as_rows(rows_of_cut(cut, matrix, residuals, start, size), far, size)

    return rows


# all chunks -----------------------------------------------------------------------------------------------------------
def _collect(rows: Rows, far: Space, count: int, recipe: Recipe, like: Sequence[Any]) -> list[Any]:
    chunks, size = balanced(count, recipe.chunk_size)
    forward = recipe.direction == "forward"

    def oriented(start: Any) -> list[Any]:
        some = rows(start, size)
        if not forward:
            return some
        return [jnp.moveaxis(leaf, 0, -1) for leaf in (lax.optimization_barrier(some) if recipe.laid_out else some)]

    if chunks == 1:
        return oriented(0)
    axis = -1 if forward else 0

    def step(full: list[Any], chunk: Any) -> tuple[list[Any], None]:
        start = jnp.minimum(chunk * size, count - size)
        placed = zip(full, oriented(start), strict=True)
        return [lax.dynamic_update_slice_in_dim(whole, piece, start, axis) for whole, piece in placed], None

    empty = [_empty(aval, _part_dtype(aval.dtype, recipe.paired), count, forward) for aval in far.avals]
    return lax.scan(step, align(empty, like)[0], jnp.arange(chunks))[0]


def _part_dtype(dtype: Any, paired: bool) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        try:
            return jnp.result_type(dtype, jnp.complex64) if paired else dtype
        except ValueError:  # 8-bit floats promote with nothing
            return jnp.dtype(jnp.complex64)


def parts_eagerly(program: Program, data: Data, recipe: Recipe) -> list[Any]:
    """As `parts`, op by op: a Python loop over chunks."""
    near, far = ends(program, recipe.direction)
    if near.size == 0 or far.size == 0:
        return parts(program, data, recipe)
    recipe = recipe._replace(fused=recipe.fused and program.kernel is None)  # stored data does not hold the function
    rows = _rows(program, data, recipe)
    chunks = [
        rows(start, min(recipe.chunk_size, near.size - start)) for start in range(0, near.size, recipe.chunk_size)
    ]
    if len(chunks) > 1:
        whole = [jnp.concatenate(leaves) for leaves in zip(*chunks, strict=True)]
    else:  # new arrays: the rows of a linear function may be the very matrix that it holds
        whole = [jnp.array(leaf) for leaf in chunks[0]]
    return [jnp.moveaxis(leaf, 0, -1) for leaf in whole] if recipe.direction == "forward" else whole


# what is compiled -----------------------------------------------------------------------------------------------------
def work(
    program: TracedProgram, recipe: Recipe, layout: str, wanted: bool, constants: list[Any], point: list[Any]
) -> tuple[list[Any], list[list[Any]]]:
    """What is compiled: the outputs, where they are wanted, and the blocks or the matrix."""
    if recipe.fused:
        outs = program.value(constants, point) if wanted else []
        data = Data(point, constants, [])
    else:
        outs, fresh = program.stage(constants, point)
        data = Data(point, constants, fresh)
    return (outs if wanted else []), pieces(program, parts(program, data, recipe), recipe, layout)


def pieces(program: Program, found: list[Any], recipe: Recipe, layout: str) -> list[list[Any]]:
    """The matrix, or the rows of blocks."""
    if layout == "matrix":
        return [[as_matrix(program, found, recipe.direction)]]
    return as_blocks(program, found, recipe.direction)

"""The identity is never multiplied into the first weight matrix.

Where a linear program begins with a matrix product, its rows are read off the matrix. This module reads a jaxpr and
must not know which direction it is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import dot_general_p

from linjac._constants import Jaxpr, evaluate
from linjac._kernel import Kernel
from linjac._tree import explicit_sharding


class Cut(NamedTuple):
    """A linear program whose only vector enters a single matrix product and nothing else."""

    program: Jaxpr
    position: int  # of the product among the equations
    order: tuple[int, ...]  # axes of the matrix: those contracted with the vector, in its order, then the others
    side: int  # which operand the vector is


def find_cut(kernel: Kernel, direction: str) -> Cut | None:
    """Where the program of this direction can be cut, or None."""
    program = kernel.pushforward if direction == "forward" else kernel.pullback
    first = len(kernel.residual_types)
    if len(program.invars) != first + 1 or program.consts:
        return None
    vector = program.invars[-1]
    uses = [i for i, eqn in enumerate(program.eqns) if any(var is vector for var in eqn.invars)]
    if len(uses) != 1 or any(var is vector for var in program.outvars):
        return None
    eqn = program.eqns[uses[0]]
    if eqn.primitive is not dot_general_p or eqn.invars[0] is eqn.invars[1]:
        return None
    side = 0 if eqn.invars[0] is vector else 1
    contracting, batching = eqn.params["dimension_numbers"]
    mine, other = contracting[side], contracting[1 - side]
    if batching[0] or len(mine) != vector.aval.ndim or isinstance(eqn.invars[1 - side], Literal):
        return None
    if explicit_sharding(eqn.invars[1 - side].aval) is not None:  # JAX takes no single row along a sharded axis
        return None
    contracted = [axis for _, axis in sorted(zip(mine, other, strict=True))]
    free = [axis for axis in range(eqn.invars[1 - side].aval.ndim) if axis not in other]
    return Cut(program, uses[0], (*contracted, *free), side)


def matrix_of(cut: Cut, residuals: Sequence[Any]) -> Any:
    """The first weight matrix, as the program reads it."""
    program, eqn = cut.program, cut.program.eqns[cut.position]
    before = program.replace(eqns=program.eqns[: cut.position], outvars=[eqn.invars[1 - cut.side]])
    vector = program.invars[-1].aval
    return evaluate(before, [], *residuals, jnp.zeros(vector.shape, vector.dtype))[0]


def _rows(cut: Cut, matrix: Any, start: Any, size: int) -> Any:
    """The rows of the matrix that some rows of the identity select; a slice is taken before anything is moved."""
    ndim = cut.program.invars[-1].aval.ndim
    if ndim == 1:
        axis = cut.order[0]
        some = matrix if size == matrix.shape[axis] else lax.dynamic_slice_in_dim(matrix, start, size, axis)
        return some.transpose(cut.order)
    turned = matrix.transpose(cut.order)
    count = math.prod(turned.shape[:ndim])
    table = turned.reshape((count, *turned.shape[ndim:]))
    return table if size == count else lax.dynamic_slice_in_dim(table, start, size, 0)


def rows_of_cut(cut: Cut, matrix: Any, residuals: Sequence[Any], start: Any, size: int) -> list[Any]:
    """The outputs of the program for rows `start` to `start + size` of the identity, on axis 0."""
    program, eqn = cut.program, cut.program.eqns[cut.position]
    chunk = _rows(cut, matrix, start, size).astype(eqn.outvars[0].aval.dtype)
    rest = program.replace(
        eqns=[*program.eqns[: cut.position], *program.eqns[cut.position + 1 :]],
        invars=[*program.invars[:-1], eqn.outvars[0]],
    )

    def after(row: Any) -> list[Any]:
        return evaluate(rest, [], *residuals, row)

    if size == 1:
        return [leaf[None] for leaf in after(chunk[0])]
    return jax.vmap(after)(chunk)

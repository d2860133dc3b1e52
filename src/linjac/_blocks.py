"""From the parts of a sweep to the result: JAX's tree of blocks, or one dense matrix, and back.

Outputs are outside, then the differentiated arguments, then their leaves; a block has the shape out.shape + in.shape
and the standard promotion of both dtypes. This module must not know how parts come about.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from linjac._program import Program
from linjac._tree import explicit_sharding, is_complex, promoted, rebuild, size_of, type_of


def as_blocks(program: Program, parts: Sequence[Any], direction: str) -> list[list[Any]]:
    """One row of blocks for each output leaf, one block of shape out.shape + in.shape for each input leaf."""
    rows: list[list[Any]] = []
    above = 0
    for i, out in enumerate(program.outputs.avals):
        blocks: list[Any] = []
        before = 0
        for k, into in enumerate(program.inputs.avals):
            if direction == "forward":
                block = parts[i][..., before : before + size_of(into)]
            else:
                block = parts[k][above : above + size_of(out)]
            blocks.append(_cast(block.reshape(out.shape + into.shape), promoted([out, into])))
            before += size_of(into)
        rows.append(blocks)
        above += size_of(out)
    return rows


def _cast(block: Any, dtype: Any) -> Any:
    """Cast; two real sweeps for a complex end leave zeros in the imaginary part of a real block."""
    real = is_complex(block) and not jax.dtypes.issubdtype(dtype, np.complexfloating)
    return (block.real if real else block).astype(dtype)


def as_matrix(program: Program, parts: Sequence[Any], direction: str) -> Any:
    """The dense (m, n) matrix."""
    dtype = promoted([*program.outputs.avals, *program.inputs.avals])
    if not parts:
        return jnp.zeros((program.outputs.size, program.inputs.size), dtype)
    forward = direction == "forward"
    flat = [_flat(_cast(part, dtype), forward) for part in parts]
    return jnp.concatenate(flat, axis=0 if forward else 1)


def _flat(part: Any, forward: bool) -> Any:
    """A part as a matrix. On a mesh with explicit axes it is gathered first: JAX merges no sharded axes."""
    sharding = explicit_sharding(type_of(part))
    if sharding is not None:
        part = jax.sharding.reshard(part, NamedSharding(sharding.mesh, P(*[None] * part.ndim)))
    axes = part.shape[:-1] if forward else part.shape[1:]
    return part.reshape((math.prod(axes), part.shape[-1]) if forward else (part.shape[0], math.prod(axes)))


def block_tree(who: str, program: Program, blocks: list[list[Any]], *, single: bool, allow_int: bool) -> Any:
    """Outputs outside, then argnums, then inputs."""
    inner: list[Any] = []
    held = _zero_block if allow_int else None
    for row, leaf in zip(blocks, [leaf for leaf in program.outputs.leaves if leaf.slot is not None], strict=True):
        entries = [
            row[into.slot] if into.slot is not None else (held(leaf.aval, into.aval) if held and into.aval else None)
            for into in program.inputs.leaves
        ]
        tree = rebuild(who, program.inputs.treedef, entries)
        inner.append(tree[0] if single else tree)
    slots = iter(inner)
    return rebuild(
        who, program.outputs.treedef, [None if leaf.slot is None else next(slots) for leaf in program.outputs.leaves]
    )


def _zero_block(out: Any, into: Any) -> Any:
    return np.zeros(out.shape + into.shape, float0)


def unflatten_matrix(program: Program, matrix: Any, *, single: bool, allow_int: bool) -> Any:
    """The tree of blocks of a dense matrix."""
    array = jnp.asarray(matrix)
    rows: list[list[Any]] = []
    above = 0
    for out in program.outputs.avals:
        height = size_of(out)
        before = 0
        blocks: list[Any] = []
        for into in program.inputs.avals:
            width = size_of(into)
            block = array[above : above + height, before : before + width]
            blocks.append(block.reshape(out.shape + into.shape))
            before += width
        rows.append(blocks)
        above += height
    return block_tree("JacobianPlan.unflatten", program, rows, single=single, allow_int=allow_int)

"""A derivative in a few numbers: products along fixed directions, and norms and projections of every block.

The directions come from a formula on integers, so that every version of every library gives the same ones. A large
Jacobian is never made: its columns (or rows) are swept a chunk at a time, or only sampled. This module must not know
files.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from linjac._linearization import Linearization
from linjac._program import Program
from linjac._tree import is_complex, promoted, size_of

FIGURES = 3  # a norm and two projections
DIRECTIONS = 2
EXACT = 1 << 22  # entries of a Jacobian beyond which its blocks are sampled along directions instead of swept
_CHUNK = 64  # directions in one sweep
_BYTES = 16 << 20  # of seeds and results of one sweep
_WHO = "testing.record_baseline"

type Floats = np.ndarray  # float64


# directions -----------------------------------------------------------------------------------------------------------
def uniform(size: int, stream: int, start: int = 0) -> Floats:
    """Numbers in [-1, 1) from the index, by exact integer arithmetic."""
    # SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", doi:10.1145/2660193.2660195
    with np.errstate(over="ignore"):
        z = (np.arange(start + 1, start + size + 1, dtype=np.uint64) + np.uint64(stream << 40)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


def vector(avals: Sequence[Any], stream: int) -> list[np.ndarray]:
    """One fixed direction: an array for each leaf, rounded to its dtype."""
    start, leaves = 0, []
    for aval in avals:
        reals = uniform(_reals_of(aval), stream, start)
        start += reals.size
        leaves.append(_from_reals(reals, aval))
    return leaves


def _reals_of(aval: Any) -> int:
    """Real numbers in a leaf: two for each complex one."""
    return size_of(aval) * (2 if is_complex(aval) else 1)


def _from_reals(reals: Floats, aval: Any, batch: tuple[int, ...] = ()) -> np.ndarray:
    values: np.ndarray = reals.view(np.complex128) if is_complex(aval) else reals
    return values.reshape((*batch, *aval.shape)).astype(np.dtype(aval.dtype))


def to_reals(array: Any, batch: int | None = None) -> Floats:
    """The entries as float64, real and imaginary parts in turn; one row for each direction of a batch."""
    array = np.asarray(array)
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    rows = 1 if batch is None else batch
    flat = np.ascontiguousarray(wide.reshape(rows, math.prod(wide.shape[0 if batch is None else 1 :])))
    flat = flat.view(np.float64)
    return flat[0] if batch is None else flat


# one array ------------------------------------------------------------------------------------------------------------
def figures(array: Any) -> list[float]:
    """The Euclidean norm and two projections of the finite entries."""
    flat = to_reals(array)
    flat = np.where(np.isfinite(flat), flat, 0.0)
    return [_norm(flat), *(float(uniform(flat.size, stream) @ flat) for stream in range(FIGURES - 1))]


def _norm(flat: Floats) -> float:
    """Euclidean norm without overflow."""
    top = float(np.max(np.abs(flat), initial=0.0))
    return 0.0 if top == 0.0 else top * float(np.sqrt(np.sum(np.square(flat / top))))


def places(array: Any) -> np.ndarray | None:
    """For each entry 0 (finite), 1 (NaN), 2 or 3 (an infinity, by sign); None where all are finite."""
    flat = to_reals(array)
    if np.isfinite(flat).all():
        return None
    return np.select([np.isnan(flat), flat == np.inf, flat == -np.inf], [1, 2, 3], 0).astype(np.uint8)


# products -------------------------------------------------------------------------------------------------------------
def _program(linear_fn: Linearization) -> Program:
    return linear_fn._program  # pyright: ignore[reportPrivateUsage]


def _product(linear_fn: Linearization, direction: str, flat: Sequence[np.ndarray]) -> list[Any]:
    vector = [jnp.asarray(leaf) for leaf in flat]
    return linear_fn._product(direction, _WHO, vector)  # pyright: ignore[reportPrivateUsage]


def products(linear_fn: Linearization, direction: str) -> list[list[np.ndarray]]:
    """J v ("forward") or Jᵀ c ("reverse") along the fixed directions: for each, one array a moving leaf."""
    program = _program(linear_fn)
    source = program.inputs if direction == "forward" else program.outputs
    vectors = [vector(source.avals, stream) for stream in range(DIRECTIONS)]
    return [[np.asarray(leaf) for leaf in _product(linear_fn, direction, flat)] for flat in vectors]


def primal_of(linear_fn: Linearization) -> Any:
    """The jaxpr of the function, None where it runs op by op."""
    return getattr(_program(linear_fn), "primal", None)


def can_reverse(linear_fn: Linearization) -> bool:
    """Whether there is a reverse direction."""
    data, _ = linear_fn._ready([])  # pyright: ignore[reportPrivateUsage]
    return _program(linear_fn).can("reverse", data)


def names(linear_fn: Linearization, side: str) -> list[str]:
    """Key paths of the moving leaves, of the "inputs" or the "outputs"."""
    program = _program(linear_fn)
    if side == "inputs":
        return [program.argument_name(name, "args") for name in program.inputs.names]
    return [name.replace("cotangent", "output", 1) for name in program.outputs.names]


# the Jacobian ---------------------------------------------------------------------------------------------------------
def fingerprint(linear_fn: Linearization, how: str | None = None) -> dict[str, Any]:
    """Shape, and for each block its dtype, figures and numbers of NaN, +inf, -inf."""
    # "fwd" or "rev": every column or row is swept, min(m, n) products. "sampled": products along a direction on each
    # input leaf alone. None chooses.
    inputs, outputs = _program(linear_fn).inputs, _program(linear_fn).outputs
    m, n = (sum(map(_reals_of, space.avals)) for space in (outputs, inputs))
    if how is None:
        how = "sampled" if m * n > EXACT else "rev" if m < n and can_reverse(linear_fn) else "fwd"
    if how == "sampled":
        table, odd = _sampled(linear_fn)
    else:
        table, odd = _swept(linear_fn, "forward" if how == "fwd" else "reverse")
    if how == "rev":
        table, odd = table.swapaxes(0, 1), odd.swapaxes(0, 1)
    blocks = [
        {
            "output": output,
            "input": name,
            "dtype": str(promoted([outputs.avals[o], inputs.avals[i]])),
            "figures": table[i, o].tolist(),
            "odd": odd[i, o].tolist(),
        }
        for o, output in enumerate(names(linear_fn, "outputs"))
        for i, name in enumerate(names(linear_fn, "inputs"))
    ]
    return {"shape": [outputs.size, inputs.size], "how": how, "blocks": blocks}


def _tables(here: Sequence[Any], there: Sequence[Any]) -> tuple[Floats, np.ndarray]:
    return np.zeros((len(here), len(there), FIGURES)), np.zeros((len(here), len(there), 3), np.int64)


def _swept(linear_fn: Linearization, direction: str) -> tuple[Floats, np.ndarray]:
    """Figures of all blocks by all columns or rows; the first axis is the side that is swept."""
    spaces = _program(linear_fn).inputs, _program(linear_fn).outputs
    here, there = (space.avals for space in (spaces if direction == "forward" else spaces[::-1]))
    table, odd = _tables(here, there)
    starts = np.cumsum([0, *map(_reals_of, here)])
    total, width = int(starts[-1]), sum(map(_reals_of, there))
    if not total or not width:
        return table, odd
    count = max(1, min(_CHUNK, total, _BYTES // (8 * (total + width))))
    for first in range(0, total, count):
        batch = [jnp.asarray(seeds) for seeds in _basis(here, starts, first, count)]
        outs = linear_fn._products(direction, _WHO, batch, count)  # pyright: ignore[reportPrivateUsage]
        real = np.arange(first, min(first + count, total))
        owner = np.searchsorted(starts, real, side="right") - 1
        for t, out in enumerate(outs):
            rows = to_reals(out, count)[: real.size]
            for h in np.unique(owner):
                mine = owner == h
                _add(table[h, t], odd[h, t], rows[mine], int(real[mine][0]))
    return table, odd


def _add(table: Floats, odd: np.ndarray, rows: Floats, first: int) -> None:
    """Add neighboring columns (or rows) of one block to its figures; `first` is the number of the first."""
    finite = np.where(np.isfinite(rows), rows, 0.0)
    table[0] = math.hypot(table[0], _norm(finite.ravel()))
    for k in range(FIGURES - 1):
        weights = uniform(rows.shape[0], FIGURES + k, first)
        table[1 + k] += weights @ (finite @ uniform(rows.shape[1], k))
    odd += _odd(rows)


def _odd(rows: Floats) -> np.ndarray:
    return np.array([np.isnan(rows).sum(), (rows == np.inf).sum(), (rows == -np.inf).sum()])


def _basis(avals: Sequence[Any], starts: np.ndarray, first: int, count: int) -> Iterator[np.ndarray]:
    """Unit vectors `first` and the following, with zeros beyond the last."""
    rows = np.arange(count)
    for aval, start in zip(avals, starts, strict=False):
        columns = first + rows - int(start)
        inside = (columns >= 0) & (columns < _reals_of(aval))
        seeds = np.zeros((count, _reals_of(aval)))
        seeds[rows[inside], columns[inside]] = 1.0
        yield _from_reals(seeds, aval, (count,))


def _sampled(linear_fn: Linearization) -> tuple[Floats, np.ndarray]:
    """Figures of the products along directions on one input leaf at a time."""
    inputs, outputs = _program(linear_fn).inputs.avals, _program(linear_fn).outputs.avals
    table, odd = _tables(inputs, outputs)
    zeros = [np.zeros(aval.shape, np.dtype(aval.dtype)) for aval in inputs]
    for i, aval in enumerate(inputs):
        seed = [*zeros[:i], *vector([aval], FIGURES), *zeros[i + 1 :]]
        for o, out in enumerate(_product(linear_fn, "forward", seed)):
            table[i, o], odd[i, o] = figures(out), _odd(to_reals(out))
    return table, odd

"""Derivatives along a direction by finite differences in float64, with an error estimate and a Taylor test.

Everything is a flat list of NumPy arrays in double precision. This module must not know linearizations, nor how a
function came to be run in float64, beyond the settings of JAX that it takes (`double`).
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from linjac._tree import is_complex, is_inexact, type_of

EPS = float(np.finfo(np.float64).eps)
FIRST, RATIO, STEPS = 1e-2, 1.0 / 3.0, 13  # steps from 1e-2 down to 2e-8 of the direction
COLUMNS = 4  # of the extrapolation: errors of order h², h⁴, h⁶, h⁸ are removed
CONVERGED = 1e-8  # relative error below which smaller steps gain nothing
SLACK = 64.0  # roundings of a value that one difference may hold
SMALL = (1e-7, 4e-8, 2e-8)  # steps that may lie between two jumps of a function

type Vector = Sequence[Any]  # arrays, one a leaf
type Function = Callable[[list[Any]], Sequence[Any]]


@contextlib.contextmanager
def double() -> Generator[None]:
    """JAX with 64-bit numbers and the standard promotion: where a function of float32 can be run in float64."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def in_double(leaf: Any) -> Any:
    """A floating or complex array in double precision, as NumPy's; anything else as it is."""
    aval = type_of(leaf)
    if aval is None or not is_inexact(aval):
        return leaf
    return np.asarray(leaf).astype(np.complex128 if is_complex(aval) else np.float64)


def moved(point: Vector, direction: Vector, step: float) -> list[Any]:
    """The point, `step` along the direction."""
    return [np.asarray(x) + step * np.asarray(v) for x, v in zip(point, direction, strict=True)]


def central_difference(fun: Function, point: Vector, direction: Vector, step: float) -> list[Any]:
    """(f(x + hv) - f(x - hv)) / 2h, one array for each output leaf; two calls of `fun`."""
    ahead, behind = (fun(moved(point, direction, sign * step)) for sign in (1.0, -1.0))
    return [(np.asarray(a) - np.asarray(b)) / (2 * step) for a, b in zip(ahead, behind, strict=True)]


class Slope(NamedTuple):
    """The derivative along one direction as finite differences see it; one array for each output leaf."""

    estimate: list[Any]
    error: list[Any]  # an estimate of its error; infinite where no difference is finite
    kink: list[Any]  # True where the slopes ahead and behind disagree however small the step
    steps: list[float]
    value: list[Any]  # f(x)
    ahead: list[list[Any]]  # f(x + hv) for each step

    @property
    def calls(self) -> int:
        """Calls of the function that it took."""
        return 1 + 2 * len(self.steps)


def slope(fun: Function, point: Vector, direction: Vector) -> Slope:
    """The derivative of `fun` along a direction, by Ridders' extrapolation of central differences.

    The step shrinks by 3 until the estimate has converged and the slopes ahead and behind approach each other, at most
    `STEPS` times. An element with a kink, whose two slopes never agree, is marked. At most 27 calls of `fun`.

    Returns:
        The estimate with its error, and what was evaluated.

    Reference: C. J. F. Ridders, Advances in Engineering Software 4 (1982), doi:10.1016/S0141-1195(82)80057-0.
    """
    value = [np.asarray(leaf) for leaf in fun(moved(point, direction, 0.0))]
    center, table, gaps = _ravel(value), _Table(), []
    steps: list[float] = []
    ahead: list[list[Any]] = []
    kink = np.zeros(center.shape, bool)
    with np.errstate(all="ignore"):
        for k in range(STEPS):
            step = FIRST * RATIO**k
            steps.append(step)
            ahead.append([np.asarray(leaf) for leaf in fun(moved(point, direction, step))])
            front, back = _ravel(ahead[-1]), _ravel([np.asarray(x) for x in fun(moved(point, direction, -step))])
            table.add((front - back) / (2 * step))
            gaps.append(np.abs(front - 2 * center + back) / step)
            if k == 0:
                continue
            size = _by_leaf(np.abs(table.best), value)
            floor = 1e-6 * size + SLACK * EPS * _by_leaf(np.abs(center), value) / step
            apart = ~(gaps[-1] <= np.maximum(0.6 * gaps[-2], floor))  # where smooth, the gap falls to a third
            table.forget(apart)
            kink = apart if k == 1 else ~(gaps[-1] <= np.maximum(0.5 * gaps[-3], floor))
            if k > 2 and not (kink | apart).any() and (table.error <= CONVERGED * size).all():
                break
    best, error, kinks = (_split(flat, value) for flat in (table.best, table.error, kink))
    return Slope(best, error, kinks, steps, value, ahead)


class _Table:
    """Ridders' tableau for all elements at once: the best estimate so far, and its error."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.best: Any = None
        self.error: Any = None

    def add(self, difference: Any) -> None:
        """One more row, of the next smaller step."""
        row = [difference]
        if self.best is None:
            self.best, self.error = difference, np.full(difference.shape, np.inf)
        factor = 1.0
        for j in range(1, min(len(self.rows), COLUMNS) + 1):
            factor /= RATIO**2
            above = self.rows[-1][j - 1]
            row.append((factor * row[j - 1] - above) / (factor - 1))
            error = np.maximum(np.abs(row[j] - row[j - 1]), np.abs(row[j] - above))
            better = error < self.error  # false for NaN
            self.best, self.error = np.where(better, row[j], self.best), np.where(better, error, self.error)
        self.rows = [row]

    def forget(self, where: Any) -> None:
        """Drop the estimates of elements whose steps still reach across a kink."""
        self.best, self.error = np.where(where, self.rows[-1][0], self.best), np.where(where, np.inf, self.error)


def between_jumps(fun: Function, point: Vector, direction: Vector, seen: Slope, product: Vector) -> list[Any]:
    """True where two of three small steps have the slope `product`, and clearly not the one that was seen.

    So it is for a function that rounds: wide steps see its stairs as a slope. A smooth function has one slope at all
    steps, so a wrong product finds no excuse here. Six calls of `fun`, and none where both slopes agree.

    Returns:
        One boolean array for each output leaf.
    """
    value, votes = _ravel(seen.value), np.zeros(_ravel(seen.value).shape, int)
    mine, theirs = _ravel(product), _ravel(seen.estimate)
    with np.errstate(all="ignore"):
        size = _by_leaf(np.maximum(np.abs(mine), np.abs(theirs)), seen.value)
        agree = not (np.abs(mine - theirs) > 2e-6 * size).any()
        for step in () if agree else SMALL:
            close = 1e-6 * size + SLACK * EPS * _by_leaf(np.abs(value), seen.value) / step
            found = _ravel(central_difference(fun, point, direction, step))
            votes += (np.abs(mine - found) <= close) & (np.abs(theirs - found) > 3 * close)
    return _split(votes >= 2, seen.value)


def order(found: Slope, product: Vector) -> float | None:
    """How fast |f(x + hv) - f(x) - h p| falls with h: 2 where p is the derivative, 1 where it is not.

    Elements with a kink are left out.

    Returns:
        The order, or None where the remainder is nothing but roundoff, as for a linear function.
    """
    return _order(_ravel(found.value), found.ahead, found.steps, _ravel(product), ~_ravel(found.kink))


def taylor_test(fun: Function, value: Vector, product: Vector, point: Vector, direction: Vector) -> float | None:
    """The order of the remainder f(x + hv) - f(x) - h p in h, from five steps: 2 where p is the derivative.

    Args:
        fun: From a list of float64 arrays to a list of them.
        value: What `fun` gives at the point.
        product: The tangent p that is to be tried.
        point: The point x.
        direction: The direction v, about as large as the point.

    Returns:
        The order, or None where the remainder is nothing but roundoff (a linear function). Five calls of `fun`.
    """
    steps = [FIRST * RATIO**k for k in range(5)]
    ahead = [list(fun(moved(point, direction, step))) for step in steps]
    center = _ravel(value)
    return _order(center, ahead, steps, _ravel(product), np.ones(center.shape, bool))


def _order(center: Any, ahead: Sequence[Vector], steps: Sequence[float], product: Any, use: Any) -> float | None:
    floor = 100 * SLACK * EPS * float(np.linalg.norm(np.abs(center[use])))
    with np.errstate(all="ignore"):
        rests = [
            float(np.linalg.norm(np.abs(_ravel(there) - center - step * product)[use]))
            for there, step in zip(ahead, steps, strict=True)
        ]
    pairs = zip(rests, rests[1:], steps, steps[1:], strict=False)
    orders = [
        math.log(first / second) / math.log(wide / narrow)
        for first, second, wide, narrow in pairs
        if math.isfinite(first) and second > floor
    ]
    return float(np.median(orders[-2:])) if orders else None


def _ravel(leaves: Vector) -> Any:
    flat = [np.asarray(leaf).ravel() for leaf in leaves]
    return np.concatenate(flat) if flat else np.zeros(0)


def _split(flat: Any, like: Vector) -> list[Any]:
    ends = np.cumsum([np.size(leaf) for leaf in like])
    parts = np.split(flat, ends[:-1]) if len(like) else []
    return [part.reshape(np.shape(leaf)) for part, leaf in zip(parts, like, strict=True)]


def _by_leaf(flat: Any, like: Vector) -> Any:
    """For each element the largest finite one of its leaf."""
    sizes = [np.max(part, initial=0.0, where=np.isfinite(part)) for part in _split(flat, like)]
    return np.repeat(sizes, [np.size(leaf) for leaf in like]) if len(like) else np.zeros(0)

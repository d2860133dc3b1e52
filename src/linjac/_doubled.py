"""A function at its point in double precision, where it can be had so, and why it cannot.

This module must not know directions, tolerances or criteria.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from linjac._constants import Jaxpr, equations, place_of, subjaxprs
from linjac._finite import double
from linjac._program import first_line
from linjac._subject import Leaves, Subject, cast
from linjac._tolerances import wide
from linjac._tree import is_inexact, short, short_dtype


class Doubled:
    """A subject in double precision, or the reason why there is none."""

    def __init__(self, subject: Subject) -> None:
        self._short = subject
        self.already = all(_bits(aval) >= 64 for aval in _types(subject))

    @functools.cached_property
    def subject(self) -> Subject | str:
        """The function with its arguments in double precision, or why it, or its derivative, cannot be had."""
        try:
            with double():
                found = self._short.in_double()
                reason = _narrow(found) or _redrawn(self._short, found)
                if not reason and found.no_forward is not None and found.no_reverse is not None:
                    reason = "no derivative can be had in float64"
                return reason or found
        except Exception as err:
            return f"fun cannot be run in float64: {type(err).__name__}: {first_line(err)}"

    @property
    def _known(self) -> Subject:
        assert isinstance(self.subject, Subject)
        return self.subject

    def call(self, point: Sequence[Any]) -> list[Any]:
        """The value in double precision."""
        with double():
            return [np.asarray(leaf) for leaf in self._known.call(*point)]

    def push(self, vector: Sequence[Any], point: Sequence[Any] | None = None) -> list[Any]:
        """J v in double precision, by plain JAX."""
        return self._product("jvp", vector, self._known.inputs, point)

    def pull(self, vector: Sequence[Any]) -> list[Any]:
        """Jᵀ c in double precision, by plain JAX."""
        return self._product("vjp", vector, self._known.outputs, None)

    def _product(self, name: str, vector: Sequence[Any], side: Leaves, point: Sequence[Any] | None) -> list[Any]:
        with double():
            known = self._known
            point = known.point if point is None else cast(point, known.inputs.types)
            return [wide(leaf) for leaf in getattr(known, name)(cast(vector, side.types), point)]


def _types(subject: Subject) -> tuple[Any, ...]:
    return (*subject.inputs.types, *subject.outputs.types)


# where a function casts down ------------------------------------------------------------------------------------------
def _narrow(subject: Subject) -> str:
    """Where what moves leaves double precision, or enters a draw; an empty text where it does not."""
    jaxpr = subject.jaxpr
    if hasattr(jaxpr, "eqns"):
        return next(filter(None, (_obstacle(*row) for row in _moving(jaxpr, [True] * len(jaxpr.invars)))), "")
    low = [
        (name, aval)
        for name, aval in zip(subject.outputs.names, subject.outputs.types, strict=True)
        if _bits(aval) < 64
    ]
    return f"fun itself casts down: {low[0][0]} is {short(low[0][1])} at a float64 point" if low else ""


def _redrawn(subject: Subject, doubled: Subject) -> str:
    """Whether random numbers are other ones in float64: those of the default dtype have other bits."""
    if _draws(subject) == _draws(doubled):
        return ""
    return "fun draws other random numbers in float64: give the functions of jax.random a dtype"


def _draws(subject: Subject) -> collections.Counter[Any]:
    found = equations(subject.jaxpr) if hasattr(subject.jaxpr, "eqns") else ()
    draws = (eqn for eqn in found if eqn.primitive.name in ("random_bits", "threefry2x32", "random_gamma"))
    return collections.Counter(tuple((var.aval.shape, str(var.aval.dtype)) for var in eqn.outvars) for eqn in draws)


def _bits(aval: Any) -> int:
    """Bits of a real number of a floating or complex dtype; more than any for others."""
    if not hasattr(aval, "dtype") or not is_inexact(aval):
        return 1 << 10
    size = 8 * np.dtype(aval.dtype).itemsize
    return size // 2 if np.issubdtype(aval.dtype, np.complexfloating) else size


def _moving(jaxpr: Jaxpr, moves: Sequence[bool], outer: str = "inside JAX") -> Iterator[tuple[Any, list[Any], str]]:
    """The equations that read what depends on the point, with the types of that, and their places."""
    moving = {var for var, flag in zip(jaxpr.invars, moves, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [not isinstance(var, Literal) and var in moving for var in eqn.invars]
        if not any(flags):
            continue
        moving.update(eqn.outvars)
        inner, place = list(subjaxprs(eqn)), place_of(eqn) or outer
        for sub in inner:
            same = len(inner) == 1 and len(sub.invars) == len(flags)
            yield from _moving(sub, flags if same else [True] * len(sub.invars), place)
        yield eqn, [var.aval for var, flag in zip(eqn.invars, flags, strict=True) if flag], place


def _obstacle(eqn: Any, reads: Sequence[Any], place: str) -> str:
    """Why an equation that reads these moving types has no differences in float64."""
    if eqn.primitive.name == "random_gamma":
        return f"the derivative of a gamma distribution is not that of one draw: random_gamma at {place}"
    if eqn.primitive.name == "reduce_precision":
        return f"fun itself casts down: reduce_precision at {place}"
    wrote = min((_bits(var.aval) for var in eqn.outvars), default=64)
    if any(subjaxprs(eqn)) or wrote >= 64 or all(_bits(aval) != 64 for aval in reads):
        return ""
    name = short_dtype(next(var.aval.dtype for var in eqn.outvars if _bits(var.aval) == wrote))
    return f"fun itself casts down: {eqn.primitive.name} to {name} at {place}"

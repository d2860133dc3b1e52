"""Where each residual of a linearization comes from: an argument passed on as it is, or a value to compute and keep.

`jax.linearize` returns every residual as an output of its program; many of them are just a weight or an input again.
Those are forwarded by reference. This module reads one jaxpr and must not know what it is the linearization of.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from linjac._constants import Jaxpr


class Source(NamedTuple):
    """One residual: argument number `index` of the program, or fresh value number `index`."""

    fresh: bool
    place: int


class Recipe(NamedTuple):
    """How to assemble the residuals."""

    sources: tuple[Source, ...]
    positions: tuple[int, ...]  # of the fresh values among the residual outputs
    types: tuple[Any, ...]  # of the fresh values


def recipe(jaxpr: Jaxpr, skip: int) -> Recipe:
    """The sources of the outputs after the first `skip`, each distinct value once."""
    arguments = {var: i for i, var in enumerate(jaxpr.invars)}
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    sources: list[Source] = []
    positions: list[int] = []
    types: list[Any] = []
    seen: dict[Any, int] = {}
    for position, var in enumerate(jaxpr.outvars[skip:]):
        origin = _origin(var, producers)
        if origin in arguments:
            sources.append(Source(False, arguments[origin]))
            continue
        key = position if isinstance(var, Literal) else var
        if key not in seen:
            seen[key] = len(positions)
            positions.append(position)
            types.append(var.aval)
        sources.append(Source(True, seen[key]))
    return Recipe(tuple(sources), tuple(positions), tuple(types))


def _origin(var: Any, producers: dict[Any, Any]) -> Any:
    """Follow a variable back through calls and branches that only pass it on."""
    while not isinstance(var, Literal) and var in producers:
        eqn = producers[var]
        position = next(i for i, out in enumerate(eqn.outvars) if out is var)
        if eqn.primitive.name == "jit":
            before = _passed(eqn.params["jaxpr"], position, eqn.invars)
        elif eqn.primitive.name == "cond":
            before = _passed_by_branches(eqn, position)
        else:
            return None
        if before is None:
            return None
        var = before
    return None if isinstance(var, Literal) else var


def _passed(jaxpr: Jaxpr, position: int, operands: Sequence[Any]) -> Any:
    """The operand that an inner jaxpr returns unchanged at this position, or None."""
    out = jaxpr.outvars[position]
    if isinstance(out, Literal):
        return None
    return next((operand for var, operand in zip(jaxpr.invars, operands, strict=True) if var is out), None)


def _passed_by_branches(eqn: Any, position: int) -> Any:
    """The operand that every branch returns, where branches that return uninitialised memory do not count.

    JAX 0.11 makes the residuals of a branch outputs of all branches; the others fill in `empty` and never read it.
    """
    found: list[Any] = []
    for branch in eqn.params["branches"]:
        if not _is_uninitialised(branch, position):
            found.append(_passed(branch, position, eqn.invars[1:]))
    first = found[0] if found else None
    return first if all(operand is first for operand in found) else None


def _is_uninitialised(jaxpr: Jaxpr, position: int) -> bool:
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    var = jaxpr.outvars[position]
    while not isinstance(var, Literal) and var in producers:
        eqn = producers[var]
        if eqn.primitive.name in ("empty", "empty2"):
            return True
        if eqn.primitive.name != "broadcast_in_dim":
            return False
        var = eqn.invars[0]
    return False

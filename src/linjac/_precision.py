"""The criteria that need float64: finite differences, and how far a shorter dtype is from it.

The function is called with its arguments in double precision, also where 64-bit numbers are off. This module must not
know how the product under check was made.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from linjac._constants import Jaxpr, equations, place_of, subjaxprs
from linjac._finite import EPS, SLACK, Slope, double, order, slope
from linjac._probe import Probe, Product, SkipError, Verdict, masked, merged, only
from linjac._program import first_line
from linjac._report import Difference
from linjac._subject import Flat, Subject, cast, normal
from linjac._tolerances import compare, largest, wide, worst
from linjac._tree import is_inexact, short, short_dtype

RTOL = 1e-6  # of finite differences, beside their own error
UNSURE = 1e-3  # relative error of a finite difference that decides nothing
LINES = 2  # random directions


class Doubled:
    """A subject in double precision, or the reason why there is none."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.already = all(_bits(aval) >= 64 for aval in _types(probe.subject))

    @functools.cached_property
    def subject(self) -> Subject | str:
        """The function with its arguments in double precision, or why it cannot be had."""
        try:
            with double():
                found = self.probe.subject.in_double()
                return _narrow(found) or _redrawn(self.probe.subject, found) or found
        except Exception as err:
            return f"fun cannot be run in float64: {type(err).__name__}: {first_line(err)}"

    def need(self) -> Subject:
        """The subject, or a skip with the reason."""
        self.probe.need_elements()
        if isinstance(self.subject, str):
            raise SkipError(self.subject)
        with double():
            nowhere = self.subject.no_forward is not None and self.subject.no_reverse is not None
        if nowhere:
            raise SkipError("no derivative can be had in float64")
        return self.subject

    def push(self, vector: Sequence[Any], point: Sequence[Any] | None = None) -> list[Any]:
        """J v in double precision, by plain JAX."""
        subject = self.need()
        types = subject.inputs.types
        point = subject.point if point is None else cast(point, types)
        return [wide(leaf) for leaf in subject.jvp(cast(vector, types), point)]


def _types(subject: Subject) -> tuple[Any, ...]:
    return (*subject.inputs.types, *subject.outputs.types)


# where a function casts down ------------------------------------------------------------------------------------------
def _narrow(subject: Subject) -> str:
    """Where the function leaves double precision by itself; an empty text where it does not."""
    jaxpr = subject.jaxpr
    if hasattr(jaxpr, "eqns"):
        place = next(_narrowings(jaxpr, [True] * len(jaxpr.invars)), None)
        return "" if place is None else f"fun itself casts down: {place}"
    low = [
        (name, aval)
        for name, aval in zip(subject.outputs.names, subject.outputs.types, strict=True)
        if _bits(aval) < 64
    ]
    return f"fun itself casts down: {low[0][0]} is {short(low[0][1])} at a float64 point" if low else ""


def _redrawn(subject: Subject, doubled: Subject) -> str:
    """Whether the function draws other random numbers in float64: those of the default dtype have other bits."""
    if _draws(subject) == _draws(doubled):
        return ""
    return "fun draws other random numbers in float64: give the functions of jax.random a dtype"


def _draws(subject: Subject) -> collections.Counter[Any]:
    found = equations(subject.jaxpr) if hasattr(subject.jaxpr, "eqns") else ()
    draws = (eqn for eqn in found if eqn.primitive.name in ("random_bits", "threefry2x32"))
    return collections.Counter(tuple((var.aval.shape, str(var.aval.dtype)) for var in eqn.outvars) for eqn in draws)


def _bits(aval: Any) -> int:
    """Bits of a real number of a floating or complex dtype; more than any for others."""
    if not hasattr(aval, "dtype") or not is_inexact(aval):
        return 1 << 10
    size = 8 * np.dtype(aval.dtype).itemsize
    return size // 2 if np.issubdtype(aval.dtype, np.complexfloating) else size


def _narrowings(jaxpr: Jaxpr, moves: Sequence[bool]) -> Iterator[str]:
    """The equations that take a 64-bit value that depends on the point to a shorter one."""
    moving = {var for var, flag in zip(jaxpr.invars, moves, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [not isinstance(var, Literal) and var in moving for var in eqn.invars]
        if not any(flags):
            continue
        moving.update(eqn.outvars)
        inner = list(subjaxprs(eqn))
        for sub in inner:
            same = len(inner) == 1 and len(sub.invars) == len(flags)
            yield from _narrowings(sub, flags if same else [True] * len(sub.invars))
        reads = [var.aval for var, flag in zip(eqn.invars, flags, strict=True) if flag]
        wrote = min((_bits(var.aval) for var in eqn.outvars), default=64)
        if not inner and any(_bits(aval) == 64 for aval in reads) and wrote < 64:
            name = short_dtype(next(var.aval.dtype for var in eqn.outvars if _bits(var.aval) == wrote))
            yield f"{eqn.primitive.name} to {name} at {place_of(eqn)}"
        if eqn.primitive.name == "reduce_precision":
            yield f"reduce_precision at {place_of(eqn)}"


# finite differences ---------------------------------------------------------------------------------------------------
def finite_differences(doubled: Doubled, product: Product) -> Verdict:
    """A product against finite differences along random directions, with the order of the Taylor remainder."""
    subject = doubled.need()
    own = doubled.already
    found: list[Difference] = []
    notes: list[str] = []
    for turn in range(LINES):
        vector = _line(doubled.probe, subject, by_element=turn > 0)

        def differ(line: Flat, name: str | None = None) -> tuple[list[Difference], str]:
            with double():
                seen = slope(lambda leaves: [np.asarray(x) for x in subject.call(*leaves)], _wide(subject.point), line)
            pushed = product(cast(line, subject.inputs.types)) if own else _in_double(doubled, line)
            return _against(doubled.probe, seen, [wide(leaf) for leaf in pushed], name)

        bad, note = differ(vector)
        notes.append(note)
        if bad:
            names = subject.inputs.names
            blamed = [one for k, name in enumerate(names) for one in differ(only(vector, k), name)[0]]
            found += blamed or bad
            break
    judged = [note for note in notes if note.startswith(("order", "linear"))]
    if not found and not judged:
        raise SkipError(notes[0])
    return Verdict(merged(found), (judged or notes)[-1])


def _in_double(doubled: Doubled, line: Flat) -> list[Any]:
    with double():
        return doubled.push(line)


def _wide(leaves: Sequence[Any]) -> list[Any]:
    return [wide(leaf) for leaf in leaves]


def _line(probe: Probe, subject: Subject, *, by_element: bool) -> Flat:
    """A random direction, as large as the point leaf by leaf, or element by element.

    The second reaches points whose elements have very different sizes.

    Returns:
        The direction.
    """
    drawn = normal(probe.rng, subject.inputs.types)
    return [v * _scale(x, by_element) for v, x in zip(drawn, map(wide, subject.point), strict=True)]


def _scale(leaf: Any, by_element: bool) -> Any:
    whole = largest(leaf) or 1.0
    return np.where(leaf == 0, whole, np.abs(leaf)) if by_element else whole


def _against(probe: Probe, seen: Slope, pushed: list[Any], name: str | None) -> tuple[list[Difference], str]:
    """Where a product is not the slope, and a word on what was seen."""
    rtol = max(RTOL, probe.limits.rtol) if probe.limits.given else RTOL
    names = probe.subject.outputs.names
    found: list[Difference] = []
    count = kinks = unsure = 0
    for k, (p, slope_, error, kink) in enumerate(zip(pushed, seen.estimate, seen.error, seen.kink, strict=True)):
        size = max(largest(p), largest(np.where(kink, 0.0, slope_)))
        noise = SLACK * EPS * largest(seen.value[k]) / seen.steps[-1]
        wild = ~kink & ~(error <= UNSURE * size + noise)
        out = kink | wild | ~np.isfinite(p)
        finite = error[np.isfinite(error)]
        spread = np.maximum(error, np.median(finite) if finite.size else 0.0)
        limit = np.where(out, np.inf, rtol * size + probe.limits.atol + 10 * spread + noise)
        bad = worst(np.where(out, 0.0, p), np.where(out, 0.0, slope_), limit, names[k], name)
        found += [] if bad is None else [bad]
        count, kinks, unsure = count + p.size, kinks + int(kink.sum()), unsure + int(wild.sum())
    left_out = _left_out(count, kinks, unsure)
    if kinks + unsure == count and count:
        return found, left_out
    reached = order(seen, pushed)
    words = "linear up to roundoff" if reached is None else f"order of the remainder {reached:.2f}, 2 where right"
    return found, f"{words}; {seen.calls} calls in float64" + (f"; {left_out}" if left_out else "")


def _left_out(count: int, kinks: int, unsure: int) -> str:
    words: list[str] = []
    if kinks:
        words.append(f"{kinks} of {count} outputs have no derivative along the step (a kink or a jump)")
    if unsure:
        words.append(f"finite differences do not converge for {unsure} of {count} outputs")
    return "; ".join(words)


# shorter dtypes -------------------------------------------------------------------------------------------------------
def precision(doubled: Doubled, product: Product) -> Verdict:
    """A product against the same one in float64, as far as the condition of the function allows."""
    if doubled.already:
        raise SkipError("the products are in float64")
    doubled.need()
    probe = doubled.probe
    point = _wide(probe.subject.point)
    names, inputs = probe.subject.outputs.names, probe.subject.inputs.names

    def differ(vector: Flat, name: str | None = None) -> list[Difference]:
        exact = _wide(vector)
        with double():
            want = doubled.push(exact)
            changes = [_change(doubled, exact, point, want) for _ in range(2)]
        noise = [max(column) for column in zip(*changes, strict=True)]
        allowed = lambda k, leaf: probe.limits.allowed(leaf, noise[k], largest(leaf))  # noqa: E731
        return compare(*masked(product(vector), want), allowed, names, [name] * len(names))

    found: list[Difference] = []
    for direction in probe.forward[-LINES:]:
        bad = differ(direction.vector)
        if bad:
            blamed = [one for k, name in enumerate(inputs) for one in differ(only(direction.vector, k), name)]
            found += blamed or [dataclasses.replace(one, input=inputs[0] if len(inputs) == 1 else None) for one in bad]
            break
    return Verdict(merged(found))


def _change(doubled: Doubled, vector: Flat, point: Flat, there: list[Any]) -> list[float]:
    """How much each leaf of the product changes when point and vector move by one rounding of the shorter dtype."""
    eps, rng = doubled.probe.limits.eps, doubled.probe.rng
    nudged = [[x * (1 + eps * rng.choice((-1.0, 1.0), x.shape)) for x in leaves] for leaves in (vector, point)]
    with np.errstate(all="ignore"):
        return [largest(a - b) for a, b in zip(doubled.push(*nudged), there, strict=True)]

"""The criteria that need float64: finite differences, and how far a shorter dtype is from it.

The function is called with its arguments in double precision, also where 64-bit numbers are off. This module must not
know how the product under check was made.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from linjac._finite import EPS, SLACK, Slope, between_jumps, order, slope
from linjac._probe import Probe, Product, SkipError, Verdict, apart, masked, merged, noise_of, only
from linjac._report import Difference
from linjac._subject import Flat, cast, normal
from linjac._tolerances import compare, largest, wide, worst

RTOL = 1e-6  # of finite differences, beside their own error
UNSURE = 1e-3  # relative error of a finite difference that decides nothing
LINES = 2  # random directions


def _need_double(probe: Probe) -> None:
    """Skip where the function cannot be had in double precision."""
    probe.need_elements()
    if isinstance(probe.doubled.subject, str):
        raise SkipError(probe.doubled.subject)


# finite differences ---------------------------------------------------------------------------------------------------
def finite_differences(probe: Probe, product: Product) -> Verdict:
    """A product against finite differences along random directions, with the order of the Taylor remainder."""
    _need_double(probe)
    doubled, point = probe.doubled, _wide(probe.subject.point)
    types, names = probe.subject.inputs.types, probe.subject.inputs.names

    def differ(line: Flat, name: str | None = None) -> tuple[list[Difference], str]:
        seen = slope(doubled.call, point, line)
        pushed = [wide(x) for x in product(cast(line, types))] if doubled.already else doubled.push(line)
        bad, note = _against(probe, seen, pushed, name)
        if bad:
            jumps = between_jumps(doubled.call, point, line, seen, pushed)
            seen = seen._replace(kink=[a | b for a, b in zip(seen.kink, jumps, strict=True)])
            bad, note = _against(probe, seen, pushed, name)
        return bad, note

    found: list[Difference] = []
    notes: list[str] = []
    for turn in range(LINES):
        vector = _line(probe, by_element=turn > 0)
        bad, note = differ(vector)
        notes.append(note)
        if bad:
            blamed = [one for k, name in enumerate(names) for one in differ(only(vector, k), name)[0]]
            found += blamed or bad
            break
    judged = [note for note in notes if note.startswith(("order", "linear"))]
    if not found and not judged:
        raise SkipError(notes[0])
    return Verdict(merged(found), (judged or notes)[-1])


def _wide(leaves: Sequence[Any]) -> list[Any]:
    return [wide(leaf) for leaf in leaves]


def _line(probe: Probe, *, by_element: bool) -> Flat:
    """A random direction, as large as the point leaf by leaf, or element by element.

    The second reaches points whose elements have very different sizes.

    Returns:
        The direction.
    """
    drawn = normal(probe.rng, probe.subject.inputs.types)
    return [v * _scale(x, by_element) for v, x in zip(drawn, map(wide, probe.subject.point), strict=True)]


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
    whose = "" if probe.doubled.already else "; of jax.jvp in float64"
    return found, f"{words}{whose}; {seen.calls} calls in float64" + (f"; {left_out}" if left_out else "")


def _left_out(count: int, kinks: int, unsure: int) -> str:
    words: list[str] = []
    if kinks:
        words.append(f"{kinks} of {count} outputs have no derivative along the step (a kink or a jump)")
    if unsure:
        words.append(f"finite differences do not converge for {unsure} of {count} outputs")
    return "; ".join(words)


# shorter dtypes -------------------------------------------------------------------------------------------------------
def precision(probe: Probe, product: Product) -> Verdict:
    """A product against the same one in float64, as far as the condition of the function allows."""
    if probe.doubled.already:
        raise SkipError("the products are in float64")
    _need_double(probe)
    point = _wide(probe.subject.point)
    names, inputs = probe.subject.outputs.names, probe.subject.inputs.names

    def differ(vector: Flat, name: str | None = None) -> list[Difference]:
        exact = _wide(vector)
        want = probe.doubled.push(exact)
        noise = _noise(probe, exact, point, want)
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


def _noise(probe: Probe, vector: Flat, point: Flat, there: list[Any]) -> Flat:
    """How much each element of the product changes when point and vector move by one rounding of the shorter dtype.

    They move to both sides, so that one of them lies beyond a kink that is there in the shorter dtype only.

    Returns:
        One array a leaf.
    """
    eps, rng = probe.limits.eps, probe.rng
    turns = [[rng.choice((-1.0, 1.0), x.shape) for x in leaves] for leaves in (vector, point)]
    sides = [
        [
            [x * (1 + sign * eps * t) for x, t in zip(leaves, turn, strict=True)]
            for leaves, turn in zip((vector, point), turns, strict=True)
        ]
        for sign in (1.0, -1.0)
    ]
    return [noise_of(change) for change in apart((probe.doubled.push(*side), there) for side in sides)]

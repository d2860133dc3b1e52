"""Compare the rule of one equation with finite differences of that equation alone.

This module must not know where on a tape the equation stands.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac._constants import subjaxprs
from linjac._finite import EPS, SLACK, Slope, between_jumps, moved, slope
from linjac._tape import Local, finite
from linjac._tolerances import wide
from linjac._tree import type_of

RTOL, COARSE = 1e-5, 1e-2  # default tolerances in float64, and where an equation is in float32
UNSURE = 1e-3  # relative error of a finite difference that decides nothing
FLAT = 1e-6  # or its error relative to the value, where the derivative vanishes
STEP = 1e-2  # of differences in float32

_EXEMPT = {
    "stop_gradient": "its derivative is zero on purpose",
    "random_gamma": "its rule is the derivative of the distribution, not of one draw",
    "custom_linear_solve": "its rule differentiates the solution, not the program that finds it",
}


class Settings(NamedTuple):
    """Tolerances; None for the defaults."""

    rtol: float | None
    atol: float | None


class Verdict(NamedTuple):
    """What the comparison along one direction says."""

    tangents: list[Any]  # of the outs: from the rule, or by differences where there is no forward rule
    wrong: str = ""  # what is wrong
    skipped: str = ""  # why nothing was decided


class _Seen(NamedTuple):
    """A derivative along a direction by differences; flat, all outs one after the other."""

    estimate: Any
    noise: Any  # its error, and roundings
    size: Any  # for each element the largest estimate of its leaf
    value: Any  # for each element the largest value of its leaf
    kink: Any  # True where any slope between those of the two sides is right
    low: Any
    high: Any

    @property
    def decided(self) -> Any:
        """Where the differences are good for a verdict."""
        limit = UNSURE * np.maximum(self.size, np.abs(self.estimate)) + FLAT * self.value
        sharp = np.isfinite(self.estimate) & (self.noise <= limit)
        sided = np.isfinite(self.low) & np.isfinite(self.high)
        return np.where(self.kink, sided, sharp)


def check_rule(local: Local, tangents: Sequence[Any], settings: Settings, rng: np.random.Generator) -> Verdict:
    """Compare along one direction."""
    try:
        primal, product = local.push(tangents)
    except Exception:  # no forward rule
        return _by_pullback(local, tangents, settings, rng)
    product = list(product)
    if local.step.helper:
        return Verdict(product)
    reason = _reason(local, tangents)
    if reason:
        return Verdict(product, skipped=reason)
    same = _same(primal, [local.step.outs[i] for i in local.outs])
    if local.step.owner and not same.all():
        return Verdict(product, _ANOTHER)
    direction, scale = _scaled(local, tangents)
    got = [wide(leaf) / scale for leaf in product]
    seen = _differences(local, direction, got)
    got = _flat(got)
    bad = _bad(seen, got, settings, local) & same & _flat(_meant(local)).astype(bool)
    if bad.any():
        return Verdict(product, _words(seen, got, bad) + _blame_forward(local, tangents, settings))
    return Verdict(product, skipped="" if _is_empty(seen) or seen.decided.any() else _NO_VERDICT)


def _meant(local: Local) -> list[Any]:
    """Where the outs have a meaning: LAPACK leaves what it likes above a Cholesky factor, and its users cut it off."""
    outs = [np.ones(np.shape(local.step.outs[i]), bool) for i in local.outs]
    return [np.tril(out) for out in outs] if local.step.eqn.primitive.name == "cholesky" else outs


def push_only(local: Local, tangents: Sequence[Any]) -> Verdict | None:
    """The tangents of the outs, not compared; None where there is no forward rule."""
    try:
        return Verdict(list(local.push(tangents)[1]))
    except Exception:
        return None


_ANOTHER = "the value that the rule returns is not the value of the function"
_NO_VERDICT = "finite differences do not converge there"


def _is_empty(seen: _Seen) -> bool:
    return not seen.estimate.size


def _reason(local: Local, tangents: Sequence[Any]) -> str:
    """Why an equation is not compared."""
    exempt = _EXEMPT.get(local.step.eqn.primitive.name)
    if exempt is not None:
        return exempt
    if not all(map(finite, [*local.point, *(local.step.outs[i] for i in local.outs), *tangents])):
        return "a value or tangent there is not finite"
    if not any(np.any(wide(tangent) != 0) for tangent in tangents):
        return "only zero tangents reach it"
    return "its dtype is too short for finite differences" if _unit(local) > 1e-6 else ""


def _unit(local: Local) -> float:
    """The unit of rounding of the coarsest operand or result."""
    values = [*local.point, *(local.step.outs[i] for i in local.outs)]
    return max(float(jnp.finfo(type_of(value).dtype).eps) for value in values)


# differences ----------------------------------------------------------------------------------------------------------
def _flat(leaves: Sequence[Any]) -> Any:
    parts = [wide(leaf).ravel() for leaf in leaves]
    return np.concatenate(parts) if parts else np.zeros(0)


def _scaled(local: Local, tangents: Sequence[Any]) -> tuple[list[Any], float]:
    """The direction, made as large as the operands, and the factor that was taken out."""
    ratios = [
        float(np.max(np.abs(wide(t)), initial=0.0)) / (float(np.max(np.abs(wide(x)), initial=0.0)) or 1.0)
        for t, x in zip(tangents, local.point, strict=True)
    ]
    return [wide(t) / max(ratios) for t in tangents], max(ratios)


def _differences(local: Local, direction: Sequence[Any], product: Sequence[Any] | None = None) -> _Seen:
    """The slope along a direction; that of `product` where it is the one between the jumps of the equation."""
    point = [wide(x) for x in local.point]
    types = [type_of(x).dtype for x in local.point]
    nested = any(subjaxprs(local.step.eqn))  # which would be traced anew at every call
    call = jax.jit(local.call) if nested else local.call

    def fun(values: list[Any]) -> list[Any]:
        cast = [jnp.asarray(np.asarray(value).astype(dtype)) for value, dtype in zip(values, types, strict=True)]
        return [wide(out) for out in call(*cast)]

    with np.errstate(all="ignore"):
        if _unit(local) > 1e-10:
            return _in_single(fun, point, direction)
        found = slope(fun, point, direction)
        if product is not None:
            jumps = between_jumps(fun, point, direction, found, product)
            settled = [np.where(j, p, e) for j, p, e in zip(jumps, product, found.estimate, strict=True)]
            kink = [k & ~j for j, k in zip(jumps, found.kink, strict=True)]
            found = found._replace(estimate=settled, kink=kink)
        return _in_double(fun, point, direction, found)


def _in_double(fun: Any, point: list[Any], direction: Sequence[Any], found: Slope) -> _Seen:
    estimate, value, step = _flat(found.estimate), _flat(found.value), found.steps[-1]
    top = _by_leaf(value, found.value)
    noise = 10 * _flat(found.error) + SLACK * EPS * top / step
    kink = _flat(found.kink) != 0
    low, high = estimate, estimate
    if kink.any():
        behind = _flat(fun(moved(point, direction, -step)))
        low, high = _sides((_flat(found.ahead[-1]) - value) / step, (value - behind) / step)
    return _Seen(estimate, noise, _by_leaf(estimate, found.value), top, kink, low, high)


def _in_single(fun: Any, point: list[Any], direction: Sequence[Any]) -> _Seen:
    """One central difference, and another of twice the step to see how good it is."""
    value = fun(moved(point, direction, 0.0))
    there = {k: _flat(fun(moved(point, direction, k * STEP))) for k in (-2, -1, 1, 2)}
    near, far = (there[1] - there[-1]) / (2 * STEP), (there[2] - there[-2]) / (4 * STEP)
    center = _flat(value)
    low, high = _sides((there[1] - center) / STEP, (center - there[-1]) / STEP)
    size, top = _by_leaf(near, value), _by_leaf(center, value)
    noise = np.abs(near - far) + 8 * float(np.finfo(np.float32).eps) * top / STEP
    return _Seen(near, noise, size, top, np.abs(high - low) > 0.1 * size, low, high)


def _sides(front: Any, back: Any) -> tuple[Any, Any]:
    """The smaller and the larger slope of the two sides; for complex numbers there is no order: undecided."""
    if np.iscomplexobj(front):
        return np.full(front.shape, np.nan), np.full(front.shape, np.nan)
    return np.minimum(front, back), np.maximum(front, back)


def _by_leaf(flat: Any, like: Sequence[Any]) -> Any:
    """For each element the largest finite one of its leaf."""
    ends = np.cumsum([np.size(leaf) for leaf in like])
    parts = [np.abs(part) for part in np.split(flat, ends[:-1])] if len(like) else []
    tops = [np.full(part.shape, np.max(part, initial=0.0, where=np.isfinite(part))) for part in parts]
    return np.concatenate(tops) if tops else np.zeros(0)


def _limits(settings: Settings, local: Local) -> tuple[float, float]:
    default = RTOL if _unit(local) < 1e-10 else COARSE
    return default if settings.rtol is None else settings.rtol, settings.atol or 0.0


def _bad(seen: _Seen, got: Any, settings: Settings, local: Local) -> Any:
    """Where a tangent is no derivative."""
    rtol, atol = _limits(settings, local)
    allowed = atol + rtol * seen.size + seen.noise
    with np.errstate(all="ignore"):
        smooth = np.abs(got - seen.estimate) <= allowed
        slack = atol + max(rtol, UNSURE) * np.maximum(np.abs(seen.low), np.abs(seen.high))
        slack = slack + np.where(np.isfinite(seen.noise), np.minimum(seen.noise, seen.size), 0.0)
        between = (got.real >= seen.low - slack) & (got.real <= seen.high + slack)
    return ~np.where(seen.kink, between, smooth) & seen.decided


def _same(primal: Sequence[Any], outs: Sequence[Any]) -> Any:
    """Where a rule returns the value of its function."""
    return np.isclose(_flat(primal), _flat(outs), rtol=1e-4, atol=1e-6, equal_nan=True)


def _words(seen: _Seen, got: Any, bad: Any) -> str:
    want, have = seen.estimate[bad], got[bad]
    norms = float(np.linalg.norm(want)), float(np.linalg.norm(have))
    ratio = float((np.vdot(want, have) / np.vdot(want, want)).real) if norms[0] else float("nan")
    times = f", {ratio:.6g} times as large" if np.allclose(have, ratio * want, rtol=1e-3) else ""
    count = f"{int(bad.sum())} of {bad.size} elements" if bad.size > 1 else "its only element"
    return f"{count} of the tangent: norm {norms[1]:.6g} by the rule{times}, {norms[0]:.6g} by finite differences"


def _blame_forward(local: Local, tangents: Sequence[Any], settings: Settings) -> str:
    """Which operands the rule is wrong in, where it has several."""
    if len(local.ins) < 2:
        return ""
    wrong: list[int] = []
    for k, i in enumerate(local.ins):
        alone = [t if j == k else jnp.zeros_like(t) for j, t in enumerate(tangents)]
        if not np.any(wide(alone[k]) != 0):
            continue
        direction, scale = _scaled(local, alone)
        got = [wide(leaf) / scale for leaf in local.push(alone)[1]]
        if _bad(_differences(local, direction, got), _flat(got), settings, local).any():
            wrong.append(i)
    return _operands(wrong)


def _operands(wrong: Sequence[int]) -> str:
    return f"; in operand{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}" if wrong else ""


# rules that only pull -------------------------------------------------------------------------------------------------
def _by_pullback(local: Local, tangents: Sequence[Any], settings: Settings, rng: np.random.Generator) -> Verdict:
    """Compare ⟨Jᵀ c, v⟩ with ⟨c, J v⟩, J v by differences."""
    outs = [local.step.outs[i] for i in local.outs]
    zeros: list[Any] = [jnp.zeros_like(out) for out in outs]
    reason = _reason(local, tangents)
    if reason:
        return Verdict(zeros, skipped=reason)
    direction, scale = _scaled(local, tangents)
    seen = _differences(local, direction)
    onward = _unflatten(np.where(np.isfinite(seen.estimate), seen.estimate, 0.0) * scale, outs)
    use = seen.decided & ~seen.kink
    if not use.any():
        return Verdict(onward, skipped=_NO_VERDICT)
    weights = np.where(use, rng.uniform(0.5, 1.0, use.shape), 0.0)
    try:
        primal, pulled = local.pull(_unflatten(weights, outs))
    except Exception:
        return Verdict(onward, skipped="it has neither a forward nor a reverse rule")
    if not _same(primal, outs).all():
        return Verdict(onward, _ANOTHER)
    parts = [float(np.sum(wide(c) * v).real) for c, v in zip(pulled, direction, strict=True)]
    if _far(sum(parts), seen, weights, settings, local):
        want = float(np.sum(np.where(use, weights * seen.estimate, 0.0)).real)
        wrong = f"⟨Jᵀc, v⟩ is {sum(parts) / want if want else float('inf'):.6g} times ⟨c, Jv⟩ by finite differences"
        return Verdict(onward, wrong + _blame_reverse(local, direction, parts, weights, settings))
    return Verdict(onward)


def _far(got: float, seen: _Seen, weights: Any, settings: Settings, local: Local) -> bool:
    rtol, atol = _limits(settings, local)
    use = weights != 0
    want = float(np.sum(np.where(use, weights * seen.estimate, 0.0)).real)
    allowed = float(np.sum(weights[use] * (atol + rtol * np.abs(seen.estimate[use]) + seen.noise[use])))
    return not abs(got - want) <= allowed


def _blame_reverse(local: Local, direction: list[Any], parts: list[float], weights: Any, settings: Settings) -> str:
    if len(local.ins) < 2:
        return ""
    wrong: list[int] = []
    for k, i in enumerate(local.ins):
        alone = [v if j == k else np.zeros_like(v) for j, v in enumerate(direction)]
        seen = _differences(local, alone)
        weighted = np.where(seen.decided & ~seen.kink, weights, 0.0)
        if np.array_equal(weighted, weights) and _far(parts[k], seen, weights, settings, local):
            wrong.append(i)
    return _operands(wrong)


def _unflatten(flat: Any, like: Sequence[Any]) -> list[Any]:
    ends = np.cumsum([np.size(leaf) for leaf in like])
    parts = np.split(flat, ends[:-1])
    leaves: list[Any] = []
    for part, leaf in zip(parts, like, strict=True):
        dtype = type_of(leaf).dtype
        values = part if np.issubdtype(dtype, np.complexfloating) else part.real
        leaves.append(jnp.asarray(values.reshape(np.shape(leaf)).astype(dtype)))
    return leaves

"""How far two right answers may be apart: tolerances from dtypes, and comparisons that name the worst element.

This module must not know what is compared.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac._constants import equations
from linjac._options import check_number
from linjac._report import Difference
from linjac._tree import is_inexact, short_dtype

_RTOL = {64: 1e-9, 32: 1e-5}  # by bits; below, 8 roundings
NOISE = 16.0  # times the change that a perturbation by one rounding makes
SHARE = 0.25  # of the largest element: no product is excused by noise beyond
_TENSOR = {"gpu": 2.0**-10, "cuda": 2.0**-10, "rocm": 2.0**-10, "tpu": 2.0**-7}  # float32 matrix products there


class Tolerances(NamedTuple):
    """Tolerances, and where they come from."""

    rtol: float
    atol: float
    eps: float
    source: str
    given: bool

    def allowed(self, want: Any, noise: Any = 0.0, magnitude: float = 0.0, share: float = float("inf")) -> Any:
        """The largest difference allowed in a leaf, where one rounding of the point changes it by `noise`.

        `magnitude` is the largest element that such a leaf has along any direction; noise counts up to a `share` of the
        largest. Given tolerances are taken as they are.

        Returns:
            The difference: one number, or one for each element of `noise`.
        """
        size = largest(want)
        limit = self.rtol * size + self.atol
        if self.given:
            return limit
        return limit + np.minimum(NOISE * noise, share * max(size, magnitude)) + 8 * self.eps * magnitude


def largest(leaf: Any) -> float:
    """The largest finite absolute value."""
    sizes = np.abs(wide(leaf))
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def wide(leaf: Any) -> Any:
    """An array in double precision, NumPy's."""
    values = np.asarray(leaf)
    complex_ = np.issubdtype(values.dtype, np.complexfloating)
    return values.astype(np.complex128 if complex_ else np.float64)


def check_tolerance(who: str, name: str, value: object) -> float | None:
    """A non-negative number or None."""
    return None if value is None else check_number(who, name, value, more=" or None (from the dtype)")


def tolerances(rtol: float | None, atol: float | None, types: Sequence[Any], jaxpr: Any) -> Tolerances:
    """The tolerances given, or those of the coarsest dtype among the leaves and inside the function."""
    avals = [aval for aval in types if is_inexact(aval)]
    words = "leaves"
    inside: list[Any] = []
    if hasattr(jaxpr, "eqns"):
        outs = (var.aval for eqn in equations(jaxpr) for var in eqn.outvars)
        inside = [aval for aval in outs if hasattr(aval, "dtype") and is_inexact(aval)]
    coarse = max((_eps(aval.dtype), short_dtype(aval.dtype)) for aval in avals) if avals else (_eps(np.float32), "f32")
    deep = max(((_eps(aval.dtype), short_dtype(aval.dtype)) for aval in inside), default=coarse)
    if deep[0] > coarse[0]:
        coarse, words = deep, "values inside fun"
    eps, name = coarse
    fast = _fast_products(jaxpr) if name in ("f32", "c64") else None
    if fast is not None and fast > eps:
        eps, name, words = fast, "the default matrix products of this backend", "values inside fun"
    bits = 64 if eps < 1e-12 else 32 if eps < 1e-5 else 16
    default = _RTOL.get(bits, 8 * eps)
    given = rtol is not None or atol is not None
    source = "given" if given else f"from {name}, the coarsest of the {words}"
    return Tolerances(default if rtol is None else rtol, 0.0 if atol is None else atol, eps, source, given)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _fast_products(jaxpr: Any) -> float | None:
    """The rounding of float32 matrix products where the backend makes them from shorter numbers."""
    precision = str(jax.config.jax_default_matmul_precision)
    if not hasattr(jaxpr, "eqns") or precision in ("highest", "float32"):
        return None
    names = {eqn.primitive.name for eqn in equations(jaxpr)}
    return _TENSOR.get(jax.default_backend()) if names & {"dot_general", "conv_general_dilated"} else None


# comparisons ----------------------------------------------------------------------------------------------------------
type Allowed = Callable[[int, Any], Any]  # (leaf, what is expected there) -> the largest difference, of each element


def compare(
    got: Sequence[Any],
    want: Sequence[Any],
    allowed: Allowed,
    outputs: Sequence[str | None],
    inputs: Sequence[str | None],
) -> list[Difference]:
    """One difference for each leaf that is farther off than allowed, with its worst element; NaN equals NaN."""
    found: list[Difference] = []
    for k, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        limit = allowed(k, theirs)
        difference = worst(mine, theirs, limit, outputs[k], inputs[k])
        if difference is not None:
            found.append(difference)
    return sorted(found, key=_excess, reverse=True)


def worst(got: Any, want: Any, limit: Any, output: str | None, into: str | None) -> Difference | None:
    """The worst element of one leaf, or None where all are within the limit (a number, or one for each element)."""
    got, want = wide(got), wide(want)
    if got.shape != want.shape:
        return Difference(output, into, None, float("inf"), float(np.max(limit, initial=0.0)), norm(want), norm(got))
    if got.size == 0:
        return None
    with np.errstate(all="ignore"):
        error = np.abs(got - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
    error = np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))
    excess = error - limit
    if not (excess > 0).any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), got.shape))
    bound = float(np.broadcast_to(limit, got.shape)[index])
    return Difference(output, into, index, float(error[index]), bound, norm(want), norm(got))


def norm(leaf: Any) -> float:
    """Euclidean norm."""
    return float(np.linalg.norm(np.abs(leaf).ravel()))


def _excess(difference: Difference) -> float:
    return difference.error / max(difference.allowed, np.finfo(float).tiny)

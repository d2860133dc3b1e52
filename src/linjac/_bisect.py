"""Find the equation at which a derivative goes wrong: a rule that is no derivative, or the first NaN or infinity.

The program is run on values and written down step by step (`_tape`). Nothing here knows how linjac makes products.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linjac._arguments import Call, refuse_strings, take_apart
from linjac._differences import Settings, check_rule, push_only
from linjac._errors import compose
from linjac._finite import double, in_double
from linjac._options import check_callable, check_flag, settled_argnums
from linjac._origin import Found, bad_cotangent, bad_tangent, bad_value
from linjac._program import CONTROL_FLOW
from linjac._subject import check_key, generator
from linjac._tape import Local, Tape, active_steps
from linjac._tolerances import check_tolerance
from linjac._tracing import call_flat
from linjac._tree import in_trace

_WHO = "testing.bisect_linearization"


@dataclass(frozen=True)
class Bisection:
    """What `bisect_linearization` found. True where it found nothing.

    Attributes:
        kind: `"value"`, `"tangent"` or `"cotangent"` for the first NaN or infinity there; `"rule"` for a rule that
            disagrees with finite differences; None where nothing was found.
        equation: The primitive, and the function whose rule it is.
        place: `file:line (function)` in the user's code, and the turns of the loops around it.
        detail: What is wrong there, without values.
        checked: Equations whose rules were compared with finite differences.
        skipped: Equations whose rules were not, and why.
    """

    __module__ = "linjac.testing"

    kind: str | None
    equation: str | None
    place: str | None
    detail: str
    checked: int
    skipped: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether nothing was found."""
        return self.kind is None

    def __str__(self) -> str:
        """What was found and where."""
        counts = f"{self.checked} equation{'' if self.checked == 1 else 's'} compared with finite differences"
        counts += f", {len(self.skipped)} skipped" if self.skipped else ""
        if self.kind is None:
            return "\n".join([f"linjac.{_WHO}: nothing found ({counts})", *(f"  skipped {s}" for s in self.skipped)])
        what = f"the first {self.kind} that is not finite" if self.kind != "rule" else "a rule that is no derivative"
        return f"linjac.{_WHO}: {what}: {self.equation}\n  at {self.place}\n  {self.detail}\n  ({counts})"


def bisect_linearization(
    fun: Callable[..., Any],
    *primals: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    key: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Bisection:
    """Name the first equation of `fun` whose derivative is wrong, or whose value, tangent or cotangent is not finite.

    Use it where `check_linearization` failed, or where a loss or a gradient became NaN. The program of `fun` is run on
    the primals, equation by equation, with calls, loops and branches opened. First, in the precision of the primals:
    if the output (then J v, then Jᵀ c, for random v and c) is not finite, the equation where that began is named.
    Then, in float64 where `fun` allows it: along two directions the tangent that each rule gives is compared with
    finite differences of that equation alone, at the values and along the tangents that reach it. A function with
    `jax.custom_jvp` or `jax.custom_vjp` is one equation, its rule compared with differences of the function itself; at
    a kink any slope between those of the two sides is accepted. What has no derivative on purpose is let pass and
    listed as skipped, although a check fails there: `stop_gradient`, and draws from a gamma distribution.

    An equation in a loop is compared on three turns at most; loops that would make more than 20,000 equations are not
    opened. Costs two traces of `fun`, which is not called otherwise, and for each equation up to 54 evaluations of it.

    Args:
        fun: The function.
        *primals: The point.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).
        key: A PRNG key for the directions; by default they are fixed.
        rtol: Tolerance relative to the largest element of a tangent, beside the error of the finite differences; by
            default 1e-5 in float64, 1e-2 in float32.
        atol: Absolute tolerance; by default 0.

    Returns:
        A `Bisection`: where it begins, with the line in the user's code; true where nothing was found.

    Raises:
        TypeError: `fun` branches in Python on values, so that it has no one program; or the point is traced.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from linjac import testing
        >>> found = testing.bisect_linearization(lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), jnp.array([0.0, 1.0]))
        >>> bool(found), found.kind, found.equation
        (False, 'cotangent', 'sqrt')
        >>> print(testing.bisect_linearization(jnp.tanh, jnp.ones(3)))
        linjac.testing.bisect_linearization: nothing found (1 equation compared with finite differences)
    """
    check_callable(_WHO, fun)
    check_flag(_WHO, "has_aux", has_aux)
    limits = check_tolerance(_WHO, "rtol", rtol), check_tolerance(_WHO, "atol", atol)
    if key is not None:
        check_key(_WHO, key)
    argnums = settled_argnums(argnums)
    refuse_strings(_WHO, primals, argnums)
    call = take_apart(_WHO, "primals", fun, primals, {}, argnums)
    if in_trace(call.traced):
        what = "it compares values, which are not known inside a trace"
        raise TypeError(compose(_WHO, what, remedy="call it outside jax.jit, jax.vmap and jax.grad"))
    rng = np.random.default_rng(0) if key is None else generator(key)
    run = _Run(call, has_aux, call.traced)
    found = _not_finite(run, rng)
    if found is not None:
        return Bisection(found.kind, found.equation, found.place, found.detail, 0, ())
    return _compare(call, has_aux, run, Settings(*limits), rng)


class _Run:
    """One trace of the function and its run on values."""

    def __init__(self, call: Call, has_aux: bool, leaves: Sequence[Any]) -> None:
        total: list[int] = []

        def flat(*leaves: Any) -> Any:
            outs, output = call_flat(_WHO, call.target.bind(), call.layout, has_aux, leaves)
            total.append(output.output.value.total)
            return outs[: total[-1]]

        try:
            jaxpr = jax.make_jaxpr(flat)(*leaves)
        except CONTROL_FLOW as err:
            what = f"fun branches in Python on the value of an array ({type(err).__name__}): it has no one program"
            remedy = "use jax.lax.cond, jax.lax.while_loop or jnp.where"
            raise TypeError(compose(_WHO, what, remedy=remedy)) from err
        self.tape = Tape(jaxpr, list(leaves))
        _, _, rows = call.selected("primals")
        self.names = dict(zip(self.tape.inputs, call.names("primals"), strict=False))
        self.moving = [
            self.tape.inputs[place]
            for _, place, present in rows
            if present and place is not None and jnp.issubdtype(leaves[place].dtype, jnp.inexact)
        ]
        self.point = dict(zip(self.tape.inputs, leaves, strict=True))
        self.active, self.steps = active_steps(self.tape, self.moving)

    def direction(self, rng: np.random.Generator) -> dict[int, Any]:
        """A random tangent for each input that moves, about as large as it."""
        return {number: _random(rng, self.point[number]) for number in self.moving}


def _random(rng: np.random.Generator, like: Any, *, scaled: bool = True) -> Any:
    """A random array, about as large as another, or about 1: a derivative that is finite stays so."""
    values = rng.uniform(0.5, 1.0, like.shape) * rng.choice([-1.0, 1.0], like.shape)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        values = values + 1j * rng.uniform(-1.0, 1.0, like.shape)
    sizes = np.abs(np.asarray(like).astype(np.complex128 if np.iscomplexobj(values) else np.float64))
    scale = float(np.max(sizes, initial=0.0, where=np.isfinite(sizes))) or 1.0
    return jnp.asarray(np.asarray(values * (scale if scaled else 1.0)).astype(like.dtype))


# not finite -----------------------------------------------------------------------------------------------------------
def _not_finite(run: _Run, rng: np.random.Generator) -> Found | None:
    """In the precision of the primals: the first value, tangent or cotangent that is not finite."""
    tape = run.tape
    found = bad_value(tape, [run.point[number] for number in tape.inputs], run.names)
    if found is not None or not run.moving:
        return found
    ones = {number: _random(rng, run.point[number], scaled=False) for number in run.moving}
    found = bad_tangent(tape, run.steps, run.active, ones)
    if found is not None:
        return found
    ends = zip(tape.output_numbers, tape.outputs, strict=True)
    cotangents = {
        number: _random(rng, value, scaled=False)
        for number, value in ends
        if number is not None and number in run.active
    }
    return bad_cotangent(tape, run.steps, run.active, cotangents)


# rules ----------------------------------------------------------------------------------------------------------------
VISITS = 3  # turns of a loop on which an equation is compared


def _compare(call: Call, has_aux: bool, run: _Run, settings: Settings, rng: np.random.Generator) -> Bisection:
    """In float64 where the function can be traced so, else as it is."""
    with double():
        try:
            leaves = [jnp.asarray(in_double(leaf)) for leaf in call.traced]
            wide = _Run(call._replace(traced=leaves), has_aux, leaves)
        except Exception:
            wide = None
        if wide is not None:
            return _walk(wide, settings, rng)
    return _walk(run, settings, rng)


def _walk(run: _Run, settings: Settings, rng: np.random.Generator) -> Bisection:
    """Push two directions along the tape, comparing at every step."""
    first = run.direction(rng)
    second = {number: -0.7 * jnp.flip(leaf.ravel()).reshape(leaf.shape) for number, leaf in first.items()}
    tracks = [first, second]
    visits: dict[int, int] = {}
    checked, skipped = 0, dict[str, None]()
    for step in run.steps:
        local = Local(step, run.active)
        if not local.ins or not local.outs:
            continue
        visits[id(step.eqn)] = visits.get(id(step.eqn), 0) + (not step.helper)
        again = visits[id(step.eqn)] > VISITS
        reasons: list[str] = []
        for known in tracks:
            tangents = [known[step.sources[i]] for i in local.ins]  # pyright: ignore[reportArgumentType]
            verdict = push_only(local, tangents) if again else None
            if verdict is None:
                verdict = check_rule(local, tangents, settings, rng)
            if verdict.wrong:
                owner = f"; the rule is of {step.owner}" if step.owner else ""
                detail = verdict.wrong + owner
                return Bisection("rule", step.name, step.place, detail, checked, tuple(skipped))
            reasons += [verdict.skipped] if verdict.skipped else []
            known.update({step.targets[i]: t for i, t in zip(local.outs, verdict.tangents, strict=True)})
        if len(reasons) == len(tracks):
            skipped[f"{step.name} at {step.line}: {reasons[0]}"] = None
        elif not again and not step.helper:
            checked += 1
    return Bisection(None, None, None, "", checked, tuple(skipped))


bisect_linearization.__module__ = "linjac.testing"

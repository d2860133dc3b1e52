"""The public checks: `check_linearization` and `check_jacobian`, from arguments to a report.

They put the criteria in the order of the ladder; what a criterion compares is in `_criteria`, `_routes`, `_precision`
and `_blockwise`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linjac import _criteria as one
from linjac import _routes as routes
from linjac._blockwise import Blockwise
from linjac._environment import environment
from linjac._errors import compose
from linjac._keys import keys
from linjac._linearization import Linearization
from linjac._linearize import linearize_many
from linjac._options import check_choice, check_chunk_size, check_count, check_flag, settled_argnums
from linjac._precision import finite_differences, precision
from linjac._probe import Probe, Verdict, decide
from linjac._report import SKIPPED, CheckReport, Criterion
from linjac._subject import Leaves, Subject, check_key, generator
from linjac._tolerances import Tolerances, check_tolerance, tolerances
from linjac._tracing import uncounted
from linjac._tree import short

PROBES = 4  # random directions on each side of a Jacobian, and as many basis directions

type Step = tuple[str, str, Callable[[], Verdict]]  # stage, name, what decides it


def check_linearization(
    fun: Callable[..., Any],
    *primals: Any,
    key: Any,
    directions: int = 8,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    linear_fn: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    r"""Check the linearization of a function at one point against plain JAX, finite differences and itself.

    At the point: the value against a call of `fun` as it is now; J v against `jax.jvp` and Jᵀ c against `jax.vjp`,
    op by op, along basis and random directions; L(0) = 0, L(-v) = -L(v), L(u + v) = L(u) + L(v); J v against finite
    differences in float64, with the order of the Taylor remainder; a shorter dtype against float64; finite values; a
    PRNG key used twice; the same products under `jax.jit`, under `jax.vmap`, in chunks, recomputed, and on the CPU;
    ⟨J v, c⟩ = ⟨v, Jᵀ c⟩. What cannot be had for this function is skipped, with the reason.

    Costs, with d directions: one trace and about 3 compilations of a linearization and 8 of its products; 4 d calls of
    `fun` under `jax.jvp` or `jax.vjp`, op by op; 9 calls, and 2 d + 1 in float64, to see the effect of roundoff; 18 to
    60 more calls in float64 (up to 33 for each input leaf where finite differences disagree). A small model takes a
    second or two.

    Args:
        fun: The function.
        *primals: The point.
        key: A PRNG key for the random directions.
        directions: Random directions on each side, and at most so many basis directions.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).
        linear_fn: A linearization to check in place of a fresh one: one that was kept, which may be stale.
        rtol: Tolerance relative to the largest expected element of a leaf; by default from the coarsest dtype, and
            wider as far as one rounding of the point changes the result.
        atol: Absolute tolerance; by default 0.

    Returns:
        A `linjac.testing.CheckReport`: true where nothing failed; printed, one line a criterion; for a failure the
        first stage, the leaves, the worst element and norms.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An option has a wrong value.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from linjac import testing
        >>> report = testing.check_linearization(jnp.sin, jnp.array([0.3, 1.0]), key=jax.random.key(0))
        >>> bool(report), report.where
        (True, None)
    """
    who = "testing.check_linearization"
    check_key(who, key)
    count = _count(who, directions)
    limits = check_tolerance(who, "rtol", rtol), check_tolerance(who, "atol", atol)
    if linear_fn is not None and not isinstance(linear_fn, Linearization):
        raise TypeError(compose(who, f"linear_fn must be a linjac.Linearization or None, got {short(linear_fn)}"))
    subject = Subject(who, "primals", fun, primals, argnums, has_aux)
    traced = hasattr(subject.jaxpr, "eqns")
    with uncounted():
        found = linearize_many(fun, *primals, argnums=subject.positions, has_aux=subject.has_aux, jit=traced)
    fitting = _tolerances(subject, limits)
    probe = Probe(subject, generator(key), count, fitting)
    case = one.Case(probe, found[0], found[1] if linear_fn is None else linear_fn)
    steps = _ladder(case, held=linear_fn is not None)
    title = f"check_linearization({_name(fun)}: {_types(subject)})"
    return CheckReport(title, _climb(steps), fitting.rtol, fitting.atol, fitting.source, environment())


def check_jacobian(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    mode: str = "auto",
    jacobian: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    chunk_size: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    r"""Check the Jacobian ∂f_i/∂x_j of a function at one point, or one of your own, against other ways to it.

    Its tree, its orientation (rows are outputs, columns are inputs: a block has the shape out.shape + in.shape) and its
    dtypes; J v against `jax.jvp` and Jᵀ c against `jax.vjp`, op by op; J(iv) = i J v where holomorphy is promised;
    finite differences in float64 with the order of the Taylor remainder; a shorter dtype against float64; finite values
    in every mode; PRNG keys used twice; `jax.jit`, `jax.vmap`, chunks; one mode against the other; the CPU.

    Costs about 7 Jacobians (each mode, `jit`, `vmap`, three chunk sizes), most of them compiled for this alone, and 16
    calls of `fun` under `jax.jvp` or `jax.vjp`, op by op; 9 calls, and 9 in float64, to see the effect of roundoff; 18
    to 60 more in float64.

    Args:
        fun: The function.
        *args: The point.
        argnums: The positions to differentiate, as for `linjac.jacobian`.
        mode: `"auto"`, `"fwd"` or `"rev"`: the way that is checked against the others.
        jacobian: Your own Jacobian at this point, to check in place of linjac's: a tree of blocks, one (m, n) matrix,
            or a function that returns it when called with `args`. A transposed one is recognized.
        has_aux: Whether `fun` returns a pair (value, aux).
        holomorphic: Whether `fun` is promised to be holomorphic; the promise is checked.
        allow_int: Whether integer arguments are allowed.
        chunk_size: Directions at a time; by default chosen.
        rtol: Tolerance relative to the largest expected element of a leaf; by default from the coarsest dtype, and
            wider as far as one rounding of the point changes the result.
        atol: Absolute tolerance; by default 0.

    Returns:
        A `linjac.testing.CheckReport`.

    Raises:
        TypeError: An argument has a wrong type, or no derivative; as from `linjac.jacobian`.
        ValueError: An option has a wrong value.
        ModeError: The mode, or every mode, is impossible for this function.

    Example:
        >>> import jax.numpy as jnp
        >>> from linjac import testing
        >>> def fun(x):
        ...     return jnp.stack([x[0] ** 2 + x[1], x[0] * x[1], x[1]])
        >>> mine = jnp.array([[4.0, 3.0, 0.0], [1.0, 2.0, 1.0]])
        >>> report = testing.check_jacobian(fun, jnp.array([2.0, 3.0]), jacobian=mine)
        >>> print(report.where, "|", report.failed[0].detail)
        shapes and dtypes | this is the transpose: rows are outputs, columns are inputs: output with ...
    """
    who = "testing.check_jacobian"
    limits = check_tolerance(who, "rtol", rtol), check_tolerance(who, "atol", atol)
    check_choice(who, "mode", mode, ("auto", "fwd", "rev"))
    flags = {
        name: check_flag(who, name, flag) for name, flag in (("holomorphic", holomorphic), ("allow_int", allow_int))
    }
    options: dict[str, Any] = {**flags, "chunk_size": check_chunk_size(who, chunk_size)}
    positions: Any = settled_argnums(argnums)
    if positions is None:
        raise TypeError(compose(who, "argnums must be an int or a sequence of ints, got None"))
    subject = Subject(who, "args", fun, args, positions, has_aux)
    fitting = _tolerances(subject, limits)
    probe = Probe(subject, np.random.default_rng(0), PROBES, fitting)
    options["jit"] = hasattr(subject.jaxpr, "eqns")
    given = jacobian(*args) if callable(jacobian) else jacobian
    with uncounted():
        blockwise = Blockwise(probe, mode, not isinstance(positions, tuple), options, given)
    title = f"check_jacobian({_name(fun)}: {_types(subject)}, mode={mode!r})"
    return CheckReport(title, _climb(_rungs(blockwise)), fitting.rtol, fitting.atol, fitting.source, environment())


def _rungs(case: Blockwise) -> list[Step]:
    """The criteria of a Jacobian, in order."""
    whose = "J" if case.given is None else "the given J"
    mine: list[Step] = []
    finite: list[Step] = [("finite values", f"J by mode={m!r}", partial(case.finite, m)) for m in ("fwd", "rev")]
    if case.given is not None:
        mine = [("products", "the given J against linjac.jacobian, block by block", case.given_against_ours)]
        finite.insert(0, ("finite values", whose, partial(case.finite, "given")))
    differences = partial(case.linear, finite_differences, case.probe, case.push)
    return [
        ("structure", f"{whose}: outputs outside, arguments inside", case.structure),
        ("shapes and dtypes", f"{whose}: a block is out.shape + in.shape", case.types),
        ("value", "value against fun called now", case.value),
        *mine,
        ("products", f"{whose} times v against jax.jvp", case.products),
        ("products", f"{whose} transposed times c against jax.vjp", case.transposed),
        ("precision", f"{whose} times v against float64", partial(case.linear, precision, case.probe, case.push)),
        ("linearity", "J(iv) = i J v", case.holomorphic),
        ("finite differences", f"{whose} times v against differences of fun in float64", differences),
        *finite,
        ("keys", "no PRNG key used twice", partial(keys, case.subject)),
        ("jit", "J inside jax.jit", case.jitted),
        ("vmap", "J under jax.vmap", case.mapped),
        ("chunked", "J in chunks", case.chunked),
        ("other mode", "forward against reverse", case.other),
        ("other backend", f"{whose} times v against jax.jvp on the CPU", partial(routes.on_cpu, case.probe, case.push)),
    ]


def _ladder(case: one.Case, *, held: bool) -> list[Step]:
    """The criteria of a linearization, in order."""
    at: Callable[..., Callable[[], Verdict]] = lambda step: partial(step, case)  # noqa: E731
    point: list[Step] = [("value", "linear_fn is at these primals", at(one.point))] if held else []
    return [
        ("structure", "trees of value and tangents against those of fun", at(one.structure)),
        ("shapes and dtypes", "value, J v and Jᵀ c; J is (outputs, inputs)", at(one.types)),
        *point,
        ("value", "value against fun called now", at(one.value)),
        ("products", "J v against jax.jvp", at(one.products)),
        ("products", "Jᵀ c against jax.vjp", at(one.transposed)),
        ("precision", "J v against J v in float64", partial(precision, case.probe, case.push)),
        ("linearity", "L(0) = 0, L(-v) = -L(v), L(u + v) = L(u) + L(v)", at(one.linearity)),
        (
            "finite differences",
            "J v against differences of fun in float64",
            partial(finite_differences, case.probe, case.push),
        ),
        ("finite values", "value and J v", at(one.finite_forward)),
        ("finite values", "Jᵀ c", at(one.finite_reverse)),
        ("keys", "no PRNG key used twice", partial(keys, case.subject)),
        ("jit", "linear_fn inside jax.jit", at(routes.jitted_apply)),
        ("jit", "fun linearized inside jax.jit", at(routes.jitted_whole)),
        ("vmap", "linear_fn under jax.vmap against a loop", at(routes.mapped)),
        ("chunked", "linear_fn.many against single products", at(routes.chunked)),
        ("chunked", "linear_fn.transpose_many against single products", at(routes.transposed_chunked)),
        ("recomputed", "products that recompute against stored ones", at(routes.recomputed)),
        ("other mode", "⟨J v, c⟩ = ⟨v, Jᵀ c⟩", at(one.adjoint)),
        ("other backend", "J v against jax.jvp on the CPU", partial(routes.on_cpu, case.probe, case.push)),
    ]


def _climb(steps: Sequence[Step]) -> tuple[Criterion, ...]:
    """Decide the criteria in order; where trees or shapes differ, nothing above can be compared."""
    done: list[Criterion] = []
    fallen = ""
    for stage, name, run in steps:
        if fallen:
            done.append(Criterion(name, stage, SKIPPED, f"the {fallen} differ"))
            continue
        done.append(decide(stage, name, run))
        if done[-1].outcome == "failed" and stage in ("structure", "shapes and dtypes"):
            fallen = {"structure": "trees"}.get(stage, stage)
    return tuple(done)


def _count(who: str, directions: object) -> int:
    if directions is None:
        raise TypeError(compose(who, "directions must be a positive int, got None"))
    count = check_count(who, "directions", directions, "8")
    assert count is not None
    return count


def _tolerances(subject: Subject, limits: tuple[float | None, float | None]) -> Tolerances:
    return tolerances(*limits, [*subject.inputs.types, *subject.outputs.types], subject.jaxpr)


def _name(fun: Any) -> str:
    while hasattr(fun, "func"):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _types(subject: Subject) -> str:
    return f"{_side(subject.inputs)} -> {_side(subject.outputs)}"


def _side(side: Leaves) -> str:
    shown = ", ".join(map(short, side.types[:3])) or "nothing"
    return shown + (f" and {len(side.types) - 3} more" if len(side.types) > 3 else "")

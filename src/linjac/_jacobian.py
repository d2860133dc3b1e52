"""Jacobians: the public functions, from arguments through a plan to blocks."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from linjac import _eager
from linjac._arguments import take_apart
from linjac._decide import decide
from linjac._errors import PointError, compose
from linjac._options import (
    check_argnums,
    check_callable,
    check_choice,
    check_chunk_size,
    check_flag,
    check_memory_budget,
)
from linjac._plan import JacobianPlan, Options, assemble, resolve_mode
from linjac._program import Data, Program, TracedProgram, alive
from linjac._sweeps import parts_eagerly, pieces, work
from linjac._tracing import ByValue, Output, trace
from linjac._tree import rebuild

type Mode = str | JacobianPlan  # "auto", "fwd", "rev", "measure", or a decision to repeat


def jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mode: Mode = "auto",
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    layout: str = "blocks",
    jit: bool = True,
) -> Callable[..., Any]:
    r"""The Jacobian ∂f_i/∂x_j of a function, in the mode that is cheaper: a drop-in for `jax.jacfwd` and `jax.jacrev`.

    Rows are outputs, columns are inputs. Costs one call of `fun` for each signature, then min(m, n) sweeps or so of its
    linear program at each point; `linjac.plan_jacobian` says which and why.

    Args:
        fun: The function.
        argnums: The positions to differentiate, as in `jax.jacfwd`. Array leaves and Python floats elsewhere and in
            keyword arguments are traced (a new batch does not recompile); everything else there is static.
        mode: `"auto"`, `"fwd"`, `"rev"`, `"measure"` (time the candidates on these arguments, once), or a
            `linjac.JacobianPlan`, whose decision is repeated.
        has_aux: Whether `fun` returns a pair (value, aux); aux is any object.
        holomorphic: Whether `fun` is promised to be holomorphic: complex inputs and outputs.
        allow_int: Whether integer arguments are allowed; their blocks are float0.
        chunk_size: Directions at a time; by default chosen from `memory_budget`. 1 runs without `vmap`.
        memory_budget: Bytes of scratch for sweeps; by default 16 MiB, but at least 16 directions.
        layout: `"blocks"`, JAX's tree, or `"matrix"`, one dense (m, n) array.
        jit: False runs op by op.

    Returns:
        A function with the arguments of `fun` that returns the Jacobian: outputs outside, then argnums, then inputs, a
        block having shape out.shape + in.shape and the standard promotion of both dtypes. `(jacobian, aux)` with
        `has_aux`.

    Raises:
        ModeError: The mode cannot work for this function, or none can; every obstacle is named.
        MemoryBudgetError: The result cannot fit the device; raised before anything is allocated.
        TypeError: An argument or output has a dtype without derivative, or a complex one without `holomorphic`.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> def fun(x):
        ...     return jnp.stack([x[0] ** 2 + x[1], x[0] * x[1]])
        >>> print(linjac.jacobian(fun)(jnp.array([2.0, 3.0])))
        [[4. 1.]
         [3. 2.]]
    """
    argnums = tuple(argnums) if isinstance(argnums, Iterator) else argnums
    who = "jacobian"
    limits = (chunk_size, memory_budget)
    options = _options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, jit))

    @functools.wraps(fun)
    def jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        done = _compute(who, fun, args, kwargs, argnums, options)
        return (done.jacobian, done.aux()) if has_aux else done.jacobian

    return jacobian_fun


def value_and_jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mode: Mode = "auto",
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    layout: str = "blocks",
    jit: bool = True,
) -> Callable[..., Any]:
    """The value of a function with its Jacobian, from one evaluation. Arguments as for `linjac.jacobian`.

    Args:
        fun: The function.
        argnums: The positions to differentiate.
        mode: How to compute it.
        has_aux: Whether `fun` returns a pair (value, aux).
        holomorphic: Whether `fun` is promised to be holomorphic.
        allow_int: Whether integer arguments are allowed.
        chunk_size: Directions at a time.
        memory_budget: Bytes of scratch for sweeps.
        layout: `"blocks"` or `"matrix"`.
        jit: False runs op by op.

    Returns:
        A function that returns `(value, jacobian)`; with `has_aux` `((value, aux), jacobian)`, as `jax.value_and_grad`
        does.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> value, jac = linjac.value_and_jacobian(jnp.sin)(0.0)
        >>> print(value, jac)
        0.0 1.0
    """
    who = "value_and_jacobian"
    limits = (chunk_size, memory_budget)
    options = _options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, jit))

    @functools.wraps(fun)
    def value_and_jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        done = _compute(who, fun, args, kwargs, argnums, options, value=True)
        return ((done.value(), done.aux()) if has_aux else done.value()), done.jacobian

    return value_and_jacobian_fun


def plan_jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    mode: Mode = "auto",
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    layout: str = "blocks",
) -> Callable[..., JacobianPlan]:
    """What `linjac.jacobian` would do for these arguments, and why, without running it. Arguments as there.

    Args:
        fun: The function.
        argnums: The positions to differentiate.
        mode: How to compute it; `"measure"` does run and time the candidates.
        has_aux: Whether `fun` returns a pair (value, aux).
        holomorphic: Whether `fun` is promised to be holomorphic.
        allow_int: Whether integer arguments are allowed.
        chunk_size: Directions at a time.
        memory_budget: Bytes of scratch for sweeps.
        layout: `"blocks"` or `"matrix"`.

    Returns:
        A function that returns a `linjac.JacobianPlan`.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> print(linjac.plan_jacobian(lambda x: jnp.outer(jnp.arange(64.0), x))(jnp.ones(2)))
        2 forward sweeps in 1 chunk instead of 128 reverse sweeps: 2 inputs, 128 outputs; ...
    """
    who = "plan_jacobian"
    limits = (chunk_size, memory_budget)
    options = _options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, True))

    @functools.wraps(fun)
    def plan_fun(*args: Any, **kwargs: Any) -> JacobianPlan:
        return _prepare(who, fun, args, kwargs, argnums, options).plan

    return plan_fun


# options and arguments ------------------------------------------------------------------------------------------------
class _Options(NamedTuple):
    plan: Options
    repeated: JacobianPlan | None
    has_aux: bool
    jit: bool


def _options(
    who: str,
    fun: Any,
    argnums: Any,
    mode: Any,
    layout: Any,
    limits: tuple[Any, Any],
    flags: tuple[Any, Any, Any, Any],
) -> _Options:
    """Check what was given; `limits` are chunk_size and memory_budget, `flags` those of the signature in its order."""
    check_callable(who, fun)
    if argnums is None:
        raise TypeError(compose(who, "argnums must be an int or a sequence of ints, got None"))
    has_aux, holomorphic, allow_int, jit = (
        check_flag(who, name, flag)
        for name, flag in zip(("has_aux", "holomorphic", "allow_int", "jit"), flags, strict=True)
    )
    check_choice(who, "layout", layout, ("blocks", "matrix"))
    word, chunk_size, repeated = resolve_mode(who, mode, check_chunk_size(who, limits[0]))
    budget = check_memory_budget(who, limits[1])
    options = Options(word, layout, chunk_size, budget, holomorphic, allow_int)
    return _Options(options, repeated, has_aux, jit)


# the work -------------------------------------------------------------------------------------------------------------
def _integers_as_arrays(who: str, args: tuple[Any, ...], argnums: Any) -> tuple[Any, ...]:
    """Python ints and bools to differentiate are arrays, as in JAX: refused, or float0 with `allow_int`."""
    positions = check_argnums(who, argnums, len(args))
    return tuple(
        jnp.asarray(arg) if i in positions and isinstance(arg, bool | int) else arg for i, arg in enumerate(args)
    )


class _Prepared(NamedTuple):
    """A program with its data and plan; `outs` only where it has run already."""

    program: Program
    output: Output
    data: Data
    plan: JacobianPlan
    outs: list[Any] | None


class _Done(NamedTuple):
    """A Jacobian, and thunks for the value and aux."""

    jacobian: Any
    value: Callable[[], Any]
    aux: Callable[[], Any]


def _prepare(
    who: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any, options: _Options
) -> _Prepared:
    args = _integers_as_arrays(who, args, argnums)
    call = take_apart(who, "args", fun, args, kwargs, argnums, abstract=who == "plan_jacobian")
    plan_options = options.plan._replace(single=np.ndim(argnums) == 0)
    traced = trace(who, call, has_aux=options.has_aux) if options.jit else None
    if traced is None or isinstance(traced, ByValue):
        done = _eager.linearize(who, call, has_aux=options.has_aux, stored=True)
        if traced is not None:
            traced.warn()
        plan = decide(who, done.program, done.data, plan_options, options.repeated)
        return _Prepared(done.program, done.output, done.data, plan, done.outs)
    data = Data(traced.point, traced.constants, [])
    plan = decide(who, traced.program, data, plan_options, options.repeated)
    return _Prepared(traced.program, traced.output, data, plan, None)


def _compute(
    who: str,
    fun: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: Any,
    options: _Options,
    *,
    value: bool = False,
) -> _Done:
    program, output, data, plan, outs = _prepare(who, fun, args, kwargs, argnums, options)
    try:
        if isinstance(program, TracedProgram):
            wanted = value or options.has_aux
            key = ("jacobian", plan.recipe, plan.layout, wanted)
            function = functools.partial(work, program, plan.recipe, plan.layout, wanted)
            outs, found = alive(who, program.run, key, function, data.constants, data.point)
        else:
            found = pieces(program, parts_eagerly(program, data, plan.recipe), plan.recipe, plan.layout)
    except PointError:
        raise
    except Exception as err:
        err.add_note(f"linjac.{who}: raised while running mode={plan.mode!r}: {plan}")
        raise
    result = assemble(who, plan, found)
    return _Done(
        result, functools.partial(_value, who, output, outs or []), functools.partial(output.rebuild_aux, outs or [])
    )


def _value(who: str, output: Output, outs: list[Any]) -> Any:
    leaves = [None if number is None else outs[number] for number in output.value.numbers]
    return rebuild(who, output.value.treedef, leaves)

"""The public functions of one point and many directions: linearize, or push and pull batches and keep nothing."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from linjac import _eager, _watch
from linjac._arguments import Call, refuse_strings, take_apart
from linjac._errors import ModeError, TangentError, compose
from linjac._linearization import RECOMPUTE, STORED, Linearization
from linjac._memory import memory_of
from linjac._options import (
    check_callable,
    check_choice,
    check_count,
    check_flag,
    settled_argnums,
)
from linjac._program import Data, Program, TracedProgram, alive, mode_error
from linjac._tracing import ByValue, refuse_types, trace
from linjac._tree import short

_FIRST = operator.itemgetter(0)
SMALL = 1 << 20  # bytes of residuals that are stored without asking how much memory there is

type Strategy = Literal["auto", "stored", "recompute"]


@overload
def linearize_many(
    fun: Callable[..., Any],
    *primals: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: Literal[False] = False,
    jit: bool = True,
    strategy: Strategy = "auto",
    residual_budget: int | None = None,
) -> tuple[Any, Linearization]: ...
@overload
def linearize_many(
    fun: Callable[..., Any],
    *primals: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: Literal[True],
    jit: bool = True,
    strategy: Strategy = "auto",
    residual_budget: int | None = None,
) -> tuple[Any, Linearization, Any]: ...
def linearize_many(
    fun: Callable[..., Any],
    *primals: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    jit: bool = True,
    strategy: Strategy = "auto",
    residual_budget: int | None = None,
) -> tuple[Any, ...]:
    r"""Linearize a function once, at one point, for many directions.

    Returns f(x) and the map v ↦ J v, J = ∂f/∂x at x. Use it where one point serves several directions, in either
    direction; use `linjac.jvp_many` for a batch of directions too large to keep a linearization for. Costs one call
    of `fun` (its program is traced once for each signature, and compiled), and none at a new point of the same
    signature.

    Args:
        fun: The function. `functools.partial` objects and callable pytrees (equinox modules) are taken apart, so
            that their arrays are arguments.
        *primals: The point. Array leaves and Python floats are traced; other leaves are static, and must be hashable.
        argnums: The positions to differentiate; None for all. The other arguments are fixed: a new array there does not
            retrace.
        has_aux: Whether `fun` returns a pair (value, aux); aux is any object.
        jit: False runs op by op, and always sees the function as it is now.
        strategy: `"stored"` keeps residuals; `"recompute"` keeps the point alone and pushes through `fun` at every
            product; `"auto"` stores while the residuals fit `residual_budget`.
        residual_budget: Bytes of residuals to store at most; by default half the memory of the device (on CPU, of the
            host). They are known from the trace, before any is allocated (`linjac.residual_bytes`).

    Returns:
        `(value, linear_fn)`, or `(value, linear_fn, aux)`; `linear_fn` is a `linjac.Linearization`.

    Raises:
        ModeError: No forward direction can be had; every obstacle is named.
        TypeError: `fun` is not callable, a whole primal is a string, a static argument cannot be hashed.
        ValueError: `argnums` is out of range, an option has a wrong value.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> value, linear_fn = linjac.linearize_many(
        ...     lambda x: jnp.stack([x[0] ** 2 + x[1], x[0] * x[1]]), jnp.array([2.0, 3.0])
        ... )
        >>> print(value, linear_fn(jnp.array([1.0, 0.0])), linear_fn.transpose(jnp.array([1.0, 0.0])))
        [7. 6.] [4. 3.] (Array([4., 1.], dtype=float32),)
        >>> linear_fn
        Linearization(2 x 2: f32[2] -> f32[2], stored 12 B)
    """
    given = (fun, primals, argnums, has_aux, jit, strategy, residual_budget)
    if _watch.active:
        return _watch.watched("linearize_many", _watch.name_of(fun), _linearize_many, given, primals, look=_FIRST)
    return _linearize_many(*given)


def _linearize_many(
    fun: Any, primals: tuple[Any, ...], argnums: Any, has_aux: Any, jit: Any, strategy: Any, residual_budget: Any
) -> tuple[Any, ...]:
    who = "linearize_many"
    _check_options(who, has_aux=has_aux, jit=jit)
    check_choice(who, "strategy", strategy, ("auto", STORED, RECOMPUTE))
    budget = check_count(who, "residual_budget", residual_budget, "half the memory")
    call = _take_apart(who, fun, primals, argnums)
    value, linear_fn, aux = _linearize(who, call, has_aux=has_aux, jit=jit, strategy=strategy, budget=budget)
    return (value, linear_fn, aux()) if has_aux else (value, linear_fn)


def residual_bytes(
    fun: Callable[..., Any], *primals: Any, argnums: int | Sequence[int] | None = None, has_aux: bool = False
) -> int:
    """Bytes that a stored linearization of `fun` at `primals` would keep beside the point and its constants.

    Known from the trace: nothing is computed or allocated, and the program is the one that `linjac.linearize_many`
    uses.

    Args:
        fun: The function.
        *primals: The point, or `jax.ShapeDtypeStruct`s.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).

    Returns:
        The bytes; 0 for a function that JAX can only push forward.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> linjac.residual_bytes(lambda x: jnp.sin(x).sum(), jnp.ones(1000))
        4000
    """
    given = (fun, primals, argnums, has_aux)
    if _watch.active:
        return _watch.watched("residual_bytes", _watch.name_of(fun), _residual_bytes, given, primals)
    return _residual_bytes(*given)


def _residual_bytes(fun: Any, primals: tuple[Any, ...], argnums: Any, has_aux: Any) -> int:
    who = "residual_bytes"
    _check_options(who, has_aux=has_aux)
    call = _take_apart(who, fun, primals, argnums, abstract=True)
    traced = trace(who, call, has_aux=has_aux)
    if isinstance(traced, ByValue):
        refuse_types(who, call, "primals")
        done = _eager.linearize(who, call, has_aux=has_aux, stored=True)
        traced.warn()
        return done.program.residual_bytes
    return traced.program.residual_bytes


def jvp_many(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    jit: bool = True,
) -> Any:
    """J V for a batch of directions, keeping nothing: `jax.vmap` over `jax.jvp`, a chunk at a time.

    Use it for one large batch at one point; `linjac.linearize_many` where batches follow each other. Costs one call
    of `fun` and its tangent program for each chunk.

    Args:
        fun: The function.
        primals: The point: a tuple, as for `jax.jvp`.
        tangents: A tuple with one tree for each differentiated argument, with one more leading axis on every leaf: the
            direction.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).
        chunk_size: Directions at a time; 1 runs without `vmap`. By default chosen from `memory_budget`.
        memory_budget: Bytes of scratch; by default 16 MiB, but at least 16 directions.
        jit: False runs op by op.

    Returns:
        The tangents of the outputs, the axis of directions in front; `(tangents_out, aux)` with `has_aux`.

    Raises:
        TangentError: The tangents do not fit the primals.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> print(linjac.jvp_many(jnp.sin, (jnp.zeros(2),), (jnp.eye(2),)))
        [[1. 0.]
         [0. 1.]]
    """
    return _batch("jvp_many", fun, primals, tangents, (argnums, has_aux, jit), (chunk_size, memory_budget))


def vjp_many(
    fun: Callable[..., Any],
    primals: Sequence[Any],
    cotangents: Any,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    jit: bool = True,
) -> Any:
    """Jᵀ C for a batch of cotangents, keeping nothing: `jax.vmap` over a `jax.vjp`, a chunk at a time.

    The residuals are scratch of the one compiled call. Costs one call of `fun` and one transposed program for each
    chunk.

    Args:
        fun: The function.
        primals: The point: a tuple, as for `jax.jvp`.
        cotangents: A tree like the output, with one more leading axis on every leaf.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).
        chunk_size: Cotangents at a time; 1 runs without `vmap`. By default chosen from `memory_budget`.
        memory_budget: Bytes of scratch; by default 16 MiB, but at least 16 cotangents.
        jit: False runs op by op.

    Returns:
        A tuple with one tree for each differentiated argument, the axis of cotangents in front; `(cotangents_in,
        aux)` with `has_aux`.

    Raises:
        TangentError: The cotangents do not fit the output.
        ModeError: The function has no reverse direction.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> print(*linjac.vjp_many(jnp.sum, (jnp.zeros(3),), jnp.array([1.0, 2.0])))
        [[1. 1. 1.]
         [2. 2. 2.]]
    """
    return _batch("vjp_many", fun, primals, cotangents, (argnums, has_aux, jit), (chunk_size, memory_budget))


# the work behind them -------------------------------------------------------------------------------------------------
def _batch(
    who: str, fun: Any, primals: Any, vectors: Any, options: tuple[Any, Any, Any], limits: tuple[Any, Any]
) -> Any:
    """`jvp_many` and `vjp_many`; `options` are argnums, has_aux and jit."""
    if _watch.active:
        args, look = (who, fun, primals, vectors, options, limits), _FIRST if options[1] else None
        return _watch.watched(who, _watch.name_of(fun), _products, args, (primals, vectors), look=look)
    return _products(who, fun, primals, vectors, options, limits)


def _products(
    who: str, fun: Any, primals: Any, vectors: Any, options: tuple[Any, Any, Any], limits: tuple[Any, Any]
) -> Any:
    argnums, has_aux, jit = options
    if who == "jvp_many":
        vectors = _check_tuple(who, "tangents", vectors)
    linear_fn, aux = _transient(who, fun, primals, argnums, has_aux=has_aux, jit=jit)
    program = linear_fn._program  # pyright: ignore[reportPrivateUsage]
    beside = program.bytes_returned.aux if has_aux and isinstance(program, TracedProgram) else 0
    run = linear_fn._many if who == "jvp_many" else linear_fn._transpose_many  # pyright: ignore[reportPrivateUsage]
    out = run(who, vectors, *limits, beside)
    return (out, aux()) if has_aux else out


def _check_options(who: str, *, has_aux: object = False, jit: object = True) -> None:
    check_flag(who, "has_aux", has_aux)
    check_flag(who, "jit", jit)


def _check_tuple(who: str, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise TangentError(
            compose(who, f"{name} must be a tuple with one entry for each argument, got {short(value)}", remedy="")
        )
    return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _take_apart(
    who: str, fun: Callable[..., Any], primals: Sequence[Any], argnums: Any, *, abstract: bool = False
) -> Call:
    check_callable(who, fun)
    argnums = settled_argnums(argnums)
    refuse_strings(who, primals, argnums)
    return take_apart(who, "primals", fun, tuple(primals), {}, argnums, abstract=abstract)


def _transient(
    who: str, fun: Callable[..., Any], primals: Sequence[Any], argnums: Any, *, has_aux: bool, jit: bool
) -> tuple[Linearization, Callable[[], Any]]:
    _check_options(who, has_aux=has_aux, jit=jit)
    call = _take_apart(who, fun, _check_tuple(who, "primals", primals), argnums)
    _, linear_fn, aux = _linearize(who, call, has_aux=has_aux, jit=jit, strategy=RECOMPUTE, budget=None, value=False)
    return linear_fn, aux


def _linearize(
    who: str,
    call: Call,
    *,
    has_aux: bool,
    jit: bool,
    strategy: str,
    budget: int | None,
    value: bool = True,
) -> tuple[Any, Linearization, Callable[[], Any]]:
    """Value, linearization and a thunk for aux."""
    traced = trace(who, call, has_aux=has_aux) if jit else None
    if traced is None or isinstance(traced, ByValue):
        done = _linearize_eagerly(who, call, has_aux=has_aux, strategy=strategy)
        if traced is not None:
            traced.warn()
        return done
    program, output, constants, point = traced
    everything = Data(point, constants, [])
    if "linearizable" not in program.notes:
        _need_movement(who, program)
        _need_forward(who, program, everything)
        program.notes["linearizable"] = True
        program.notes["function"] = _watch.name_of(call.target.anchor)
    evaluate = functools.partial(alive, who, program.run, "value", program.value, constants, point)
    if not value:  # of use for products alone; aux is computed when it is asked for
        return None, Linearization(everything, program, RECOMPUTE), lambda: output.rebuild_aux(evaluate())
    chosen = _choose(who, program, strategy, budget, point)
    if _watch.here.state.call:
        _watch.admit(_work_of_linearization(program, chosen))
    outs: list[Any]
    if chosen == STORED:
        outs, fresh = alive(who, program.run, "stage", program.stage, constants, point)
        data = Data(point, program.keep(constants), fresh)
        linear_fn = Linearization(data, program, STORED)
    else:
        outs = evaluate()
        linear_fn = Linearization(everything, program, RECOMPUTE)
    return output.rebuild_value(who, outs), linear_fn, lambda: output.rebuild_aux(outs)


def _linearize_eagerly(
    who: str, call: Call, *, has_aux: bool, strategy: str
) -> tuple[Any, Linearization, Callable[[], Any]]:
    done: _eager.Evaluated = alive(who, _linearized_eagerly, who, call, has_aux, strategy != RECOMPUTE)
    _need_movement(who, done.program)
    _need_forward(who, done.program, done.data)
    done.program.notes["function"] = _watch.name_of(call.target.anchor)
    linear_fn = Linearization(done.data, done.program, STORED if done.program.kernel is not None else RECOMPUTE)
    return done.output.rebuild_value(who, done.outs), linear_fn, lambda: done.output.rebuild_aux(done.outs)


def _linearized_eagerly(who: str, call: Call, has_aux: bool, stored: bool) -> _eager.Evaluated:
    return _eager.linearize(who, call, has_aux=has_aux, stored=stored)


def _work_of_linearization(program: TracedProgram, strategy: str) -> _watch.Work:
    """No direction; the bytes of value and aux, and of the residuals where they are stored."""
    key = ("work of a linearization", strategy)
    if key not in program.notes:
        residuals = program.residual_bytes if strategy == STORED else 0
        program.notes[key] = (0, 0, 0, sum(program.bytes_returned) + residuals)
    return program.notes[key]


def _choose(who: str, program: TracedProgram, strategy: str, budget: int | None, point: list[Any]) -> str:
    if program.kernel is None:
        return RECOMPUTE
    if strategy != "auto":
        return strategy
    if budget is None and program.residual_bytes <= SMALL:
        return STORED
    limit = alive(who, memory_of, point) // 2 if budget is None else budget
    return STORED if program.residual_bytes <= limit else RECOMPUTE


def _need_movement(who: str, program: Program) -> None:
    """A point that has leaves, none of which can move, is a mistake (an empty tree is not)."""
    leaves = [leaf for leaf in program.inputs.leaves if leaf.present]
    if leaves and not program.inputs.avals:
        kinds = ["no array" if leaf.aval is None else short(leaf.aval) for leaf in leaves]
        names = [program.argument_name(leaf.name, "primals") for leaf in leaves]
        bad = [f"{name}: {kind}" for name, kind in zip(names, kinds, strict=True)]
        raise TypeError(
            compose(who, "nothing here can move", bad, "only floating and complex leaves do: cast to float")
        )


def _need_forward(who: str, program: Program, data: Data) -> None:
    if program.kernel is not None and program.kernel.collectives:
        what = "fun reduces over a mapped axis, so the two directions would answer different questions"
        remedy = "linearize outside: apply linjac to the mapped function, jax.vmap(fun) or jax.shard_map(fun)"
        raise ModeError(compose(who, what, program.kernel.collectives, remedy))
    if not program.can("forward", data):
        raise mode_error(
            who, "this function has no forward direction", program, "use jax.vjp, or give the function a jvp rule"
        )

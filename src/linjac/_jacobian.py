"""Jacobians: the public functions, from arguments through a plan to blocks."""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from linjac import _eager, _watch
from linjac._arguments import Call, take_apart
from linjac._decide import admit, decide
from linjac._errors import PointError, compose
from linjac._options import (
    check_argnums,
    check_callable,
    check_choice,
    check_chunk_size,
    check_flag,
    check_memory_budget,
    settled_argnums,
)
from linjac._plan import JacobianPlan, Options, assemble, resolve_mode
from linjac._program import Data, Program, alive
from linjac._sweeps import parts_eagerly, pieces, work
from linjac._tracing import ByValue, Output, Traced, refuse_types, trace
from linjac._tree import PyTreeDef, bytes_of

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
    who = "jacobian"
    limits = (chunk_size, memory_budget)
    options = resolve_options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, jit))

    differentiated = Differentiated(who, fun, argnums, options)

    look = operator.itemgetter(0) if has_aux else None

    def computed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done = differentiated.compute(args, kwargs)
        return (done.jacobian, done.aux()) if has_aux else done.jacobian

    @functools.wraps(fun)
    def jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        if _watch.active:
            return _watch.watched(who, _watch.name_of(fun), computed, (args, kwargs), args, look=look)
        return computed(args, kwargs)

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
    options = resolve_options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, jit))

    differentiated = Differentiated(who, fun, argnums, options)

    look = _without_aux if has_aux else None

    def computed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done = differentiated.compute(args, kwargs, value=True)
        return ((done.value(), done.aux()) if has_aux else done.value()), done.jacobian

    @functools.wraps(fun)
    def value_and_jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        if _watch.active:
            return _watch.watched(who, _watch.name_of(fun), computed, (args, kwargs), args, look=look)
        return computed(args, kwargs)

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
    options = resolve_options(who, fun, argnums, mode, layout, limits, (has_aux, holomorphic, allow_int, True))

    differentiated = Differentiated(who, fun, argnums, options)

    @functools.wraps(fun)
    def plan_fun(*args: Any, **kwargs: Any) -> JacobianPlan:
        if _watch.active:
            return _watch.watched(who, _watch.name_of(fun), differentiated.plan, (args, kwargs), args)
        return differentiated.plan(args, kwargs)

    return plan_fun


# options and arguments ------------------------------------------------------------------------------------------------
class Resolved(NamedTuple):
    plan: Options
    repeated: JacobianPlan | None
    has_aux: bool
    jit: bool


def resolve_options(
    who: str,
    fun: Any,
    argnums: Any,
    mode: Any,
    layout: Any,
    limits: tuple[Any, Any],
    flags: tuple[Any, Any, Any, Any],
) -> Resolved:
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
    return Resolved(options, repeated, has_aux, jit)


# the work -------------------------------------------------------------------------------------------------------------
class _Done(NamedTuple):
    """A Jacobian, and thunks for the value and aux."""

    jacobian: Any
    value: Callable[[], Any]
    aux: Callable[[], Any]


def _without_aux(pair: Any) -> Any:
    """What was computed, out of what `linjac.value_and_jacobian` returns with aux."""
    return pair[0][0], pair[1]


class _Ready(NamedTuple):
    """A plan with its compiled program, and the tree of its result once that is known."""

    plan: JacobianPlan
    run: Callable[..., Any]
    tree: PyTreeDef = None  # of the blocks in their flat order; None: they are assembled one by one


class Differentiated:
    """A function with the options of its Jacobian. What was decided for a program is kept with that program."""

    def __init__(self, who: str, fun: Callable[..., Any], argnums: Any, options: Resolved) -> None:
        self.who, self.fun, self.argnums = who, fun, settled_argnums(argnums)
        self.options = options._replace(plan=options.plan._replace(single=not isinstance(self.argnums, tuple)))
        shape = None if options.repeated is None else (options.repeated.m, options.repeated.n)
        self.key = ("ready", self.options.plan, shape)  # in the notes of a program

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, abstract: bool = False) -> Call:
        """Take a call apart. Python ints and bools to differentiate are arrays, as in JAX."""
        if any(isinstance(arg, int) for arg in args):
            positions = check_argnums(self.who, self.argnums, len(args))
            args = tuple(
                jnp.asarray(arg) if i in positions and isinstance(arg, int) else arg for i, arg in enumerate(args)
            )
        return take_apart(self.who, "args", self.fun, args, kwargs, self.argnums, abstract=abstract)

    def trace(self, call: Call) -> Traced | ByValue | None:
        """The program of a call; None for `jit=False`."""
        return trace(self.who, call, has_aux=self.options.has_aux) if self.options.jit else None

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JacobianPlan:
        """The plan for these arguments (which may be types)."""
        call = self.call(args, kwargs, abstract=True)
        traced = self.trace(call)
        if isinstance(traced, Traced):
            return self._decide(traced.program, Data(traced.point, traced.constants, []))
        refuse_types(self.who, call, "args")
        return self._run_eagerly(call, traced)[1]

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, value: bool = False) -> _Done:
        """The Jacobian, and value and aux where they are wanted."""
        call = self.call(args, kwargs)
        traced = self.trace(call)
        if not isinstance(traced, Traced):
            done, plan = self._run_eagerly(call, traced)
            if _watch.here.state.call:
                total = done.output.value.total
                beside = [*(done.outs[:total] if value else []), *done.outs[total:]]
                admit(plan, sum(map(bytes_of, beside)))
            try:
                swept = parts_eagerly(done.program, done.data, plan.recipe)
            except Exception as err:
                self._note(err, plan)
                raise
            found = pieces(done.program, swept, plan.recipe, plan.layout)
            return self._done(assemble(self.who, plan, found), done.output, done.outs)
        wanted = value or self.options.has_aux
        ready = traced.program.notes.get((self.key, wanted)) or self._ready(traced, wanted)
        if _watch.here.state.call:
            sizes = traced.program.bytes_returned
            admit(ready.plan, sizes.value * value + sizes.aux * self.options.has_aux)
        try:
            outs, found = alive(self.who, ready.run, traced.constants, traced.point)
        except Exception as err:
            self._note(err, ready.plan)
            raise
        if ready.tree is None:
            return self._done(self._assemble(traced.program, ready, found, wanted), traced.output, outs)
        return self._done(jax.tree_util.tree_unflatten(ready.tree, itertools.chain(*found)), traced.output, outs)

    def _ready(self, traced: Traced, wanted: bool) -> _Ready:
        program = traced.program
        plan = self._decide(program, Data(traced.point, traced.constants, []))
        key = ("jacobian", plan.recipe, plan.layout, wanted)
        ready = _Ready(plan, program.prepared(key, functools.partial(work, program, plan.recipe, plan.layout, wanted)))
        if self.options.plan.mode != "measure":  # inside a trace nothing is measured, so the answer may change
            program.notes[self.key, wanted] = ready
        return ready

    def _assemble(self, program: Program, ready: _Ready, found: list[list[Any]], wanted: bool) -> Any:
        """The result in its tree, which is remembered where it has the blocks as its leaves and nothing else."""
        jacobian = assemble(self.who, ready.plan, found)
        blocks = list(itertools.chain(*found))
        leaves, tree = jax.tree_util.tree_flatten(jacobian)
        plain = len(leaves) == len(blocks) and all(map(operator.is_, leaves, blocks))
        if plain and (self.key, wanted) in program.notes:
            program.notes[self.key, wanted] = ready._replace(tree=tree)
        return jacobian

    def _decide(self, program: Program, data: Data) -> JacobianPlan:
        return decide(self.who, program, data, self.options.plan, self.options.repeated)

    def _run_eagerly(self, call: Call, by_value: Any) -> tuple[_eager.Evaluated, JacobianPlan]:
        done = _eager.linearize(self.who, call, has_aux=self.options.has_aux, stored=True)
        if isinstance(by_value, ByValue):
            by_value.warn()
        return done, self._decide(done.program, done.data)

    def _note(self, err: Exception, plan: JacobianPlan) -> None:
        """Add what was tried to an error that passes through."""
        if not isinstance(err, PointError):
            err.add_note(f"linjac.{self.who}: raised while running mode={plan.mode!r}: {plan}")

    def _done(self, jacobian: Any, output: Output, outs: list[Any]) -> _Done:
        value = functools.partial(output.rebuild_value, self.who, outs)
        return _Done(jacobian, value, functools.partial(output.rebuild_aux, outs))

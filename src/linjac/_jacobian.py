"""Jacobians: the public functions, from arguments through a plan to blocks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.dtypes import float0

from linjac import _eager
from linjac._arguments import Call, take_apart
from linjac._errors import MemoryBudgetError, ModeError, compose
from linjac._memory import memory_of
from linjac._options import check_callable, check_choice, check_chunk_size, check_flag, check_memory_budget
from linjac._plan import MODES, JacobianPlan, Options, make_plan
from linjac._program import Data, Program, TracedProgram, alive
from linjac._sweeps import Recipe, as_blocks, as_matrix, parts, parts_eagerly
from linjac._tracing import ByValue, Output, trace
from linjac._tree import is_complex, is_key, rebuild, short

type Mode = str | JacobianPlan


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
        argnums: The positions to differentiate, as in `jax.jacfwd`. Array leaves and Python floats elsewhere and in keyword
            arguments are traced (a new batch does not recompile); everything else there is static.
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
        block having shape out.shape + in.shape and the standard promotion of both dtypes. `(jacobian, aux)` with `has_aux`.

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
    options = _options("jacobian", fun, mode, has_aux, holomorphic, allow_int, chunk_size, memory_budget, layout, jit)

    @functools.wraps(fun)
    def jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        done = _compute("jacobian", fun, args, kwargs, argnums, options)
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
        A function that returns `(value, jacobian)`; `((value, aux), jacobian)` with `has_aux`, like `jax.value_and_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> value, jac = linjac.value_and_jacobian(jnp.sin)(0.0)
        >>> print(value, jac)
        0.0 1.0
    """
    who = "value_and_jacobian"
    options = _options(who, fun, mode, has_aux, holomorphic, allow_int, chunk_size, memory_budget, layout, jit)

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
    options = _options(who, fun, mode, has_aux, holomorphic, allow_int, chunk_size, memory_budget, layout, True)

    @functools.wraps(fun)
    def plan_fun(*args: Any, **kwargs: Any) -> JacobianPlan:
        return _prepare(who, fun, args, kwargs, argnums, options).plan

    return plan_fun


# options and arguments ------------------------------------------------------------------------------------------------
class _Options(NamedTuple):
    plan: Options
    repeated: JacobianPlan | None
    has_aux: bool
    allow_int: bool
    jit: bool


def _options(
    who: str,
    fun: Any,
    mode: Any,
    has_aux: Any,
    holomorphic: Any,
    allow_int: Any,
    chunk_size: Any,
    memory_budget: Any,
    layout: Any,
    jit: Any,
) -> _Options:
    check_callable(who, fun)
    for name, flag in (("has_aux", has_aux), ("holomorphic", holomorphic), ("allow_int", allow_int), ("jit", jit)):
        check_flag(who, name, flag)
    check_choice(who, "layout", layout, ("blocks", "matrix"))
    repeated = mode if isinstance(mode, JacobianPlan) else None
    if repeated is None:
        check_choice(who, "mode", mode, MODES)
    chunk_size = check_chunk_size(who, chunk_size)
    if repeated is not None:
        mode, chunk_size = repeated.mode, chunk_size or repeated.chunk_size
    options = Options(mode, layout, chunk_size, check_memory_budget(who, memory_budget), bool(holomorphic))
    return _Options(options, repeated, bool(has_aux), bool(allow_int), bool(jit))


def _check_inputs(who: str, program: Program, options: _Options) -> None:
    """Arguments without a derivative are refused whole; such leaves in a tree are held."""
    layout = program.layout
    complex_: list[str] = []
    real: list[str] = []
    bad: list[str] = []
    moving: dict[str, bool] = {}
    for leaf in program.inputs.leaves:
        slot, _, rest = leaf.name.removeprefix("tangents[").partition("]")
        name = f"args[{layout.argnums[int(slot)] - layout.shift}]{rest}"
        moving[slot] = moving.get(slot, False) or leaf.slot is not None
        if leaf.slot is not None:
            (complex_ if is_complex(leaf.aval) else real).append(f"{name}: {short(leaf.aval)}")
    for leaf in program.inputs.leaves:
        slot, _, rest = leaf.name.removeprefix("tangents[").partition("]")
        if leaf.aval is not None and not moving[slot] and not (options.allow_int and not is_key(leaf.aval)):
            kind = "a PRNG key" if is_key(leaf.aval) else "an integer or bool"
            bad.append(f"args[{layout.argnums[int(slot)] - layout.shift}]{rest}: {short(leaf.aval)}, {kind}")
    if bad:
        remedy = "cast to float, leave it out of argnums, or pass allow_int=True for float0 blocks"
        raise TypeError(compose(who, "these arguments have no derivative", bad, remedy))
    if options.plan.holomorphic and real:
        raise TypeError(compose(who, "holomorphic=True needs complex inputs", real, "leave holomorphic out"))


def _check_outputs(who: str, program: Program, options: _Options) -> None:
    bad = [
        f"{leaf.name.replace('cotangent', 'output', 1)}: {short(leaf.aval)}"
        for leaf in program.outputs.leaves
        if leaf.aval is not None and leaf.slot is None
    ]
    if bad:
        raise TypeError(compose(who, "an integer output has no derivative", bad, "return it as aux (has_aux=True)"))
    outs = program.outputs
    names = zip(outs.names, outs.avals, strict=True)
    pairs = [(name.replace("cotangent", "output", 1), aval) for name, aval in names]
    if options.plan.holomorphic:
        real = [f"{name}: {short(aval)}" for name, aval in pairs if not is_complex(aval)]
        if real:
            raise TypeError(compose(who, "holomorphic=True needs complex outputs", real, "leave holomorphic out"))
    elif program.inputs.is_complex and outs.is_complex:
        lines = [f"{name}: {short(aval)}" for name, aval in pairs if is_complex(aval)]
        what = "a function from complex to complex has a complex Jacobian only where it is holomorphic"
        remedy = "pass holomorphic=True if it is; otherwise differentiate real and imaginary parts"
        raise TypeError(compose(who, what, lines, remedy))


# the work -------------------------------------------------------------------------------------------------------------
class _Prepared(NamedTuple):
    """A program with its data and plan; `outs` only where it has run already."""

    program: Program
    output: Output
    data: Data
    plan: JacobianPlan
    outs: list[Any] | None
    single: bool


class _Done(NamedTuple):
    jacobian: Any
    value: Callable[[], Any]
    aux: Callable[[], Any]


def _prepare(
    who: str, fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Any, options: _Options
) -> _Prepared:
    call = take_apart(who, "args", fun, args, kwargs, argnums)
    single = np.ndim(argnums) == 0
    traced = trace(who, call, has_aux=options.has_aux) if options.jit else None
    if traced is None or isinstance(traced, ByValue):
        prepared = _prepare_eagerly(who, call, options, single)
        if traced is not None:
            traced.warn()
        return prepared
    program, output, constants, point = traced
    data = Data(point, constants, [])
    plan = _plan(who, program, data, options)
    return _Prepared(program, output, data, plan, None, single)


def _plan(who: str, program: Program, data: Data, options: _Options) -> JacobianPlan:
    _check_inputs(who, program, options)
    _check_outputs(who, program, options)
    key = ("plan", options.plan)
    plan: JacobianPlan | None = program.notes.get(key)
    if plan is None:
        plan = program.notes[key] = make_plan(who, program, data, options.plan)
    if options.repeated is not None and (plan.m, plan.n) != (options.repeated.m, options.repeated.n):
        made, here = options.repeated, f"{plan.n} inputs and {plan.m} outputs"
        what = f"the plan was made for {made.n} inputs and {made.m} outputs, not for {here}"
        raise ValueError(compose(who, what, remedy="make a plan for these arguments with linjac.plan_jacobian"))
    limit = alive(who, memory_of, data.point)
    if plan.result_bytes > limit:
        what = f"the Jacobian is {plan.m} x {plan.n}, {plan.result_bytes:,} bytes; there are {limit:,}"
        remedy = "use linjac.linearize_many and its products, or linjac.jvp_many for some directions"
        raise MemoryBudgetError(compose(who, what, remedy=remedy))
    return plan


def _prepare_eagerly(who: str, call: Call, options: _Options, single: bool) -> _Prepared:
    done = _eager.linearize(who, call, has_aux=options.has_aux, stored=True)
    plan = _plan(who, done.program, done.data, options)
    return _Prepared(done.program, done.output, done.data, plan, done.outs, single)


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
    ready = _prepare(who, fun, args, kwargs, argnums, options)
    program, output, data, plan, outs, single = ready
    try:
        if isinstance(program, TracedProgram):
            wanted = value or options.has_aux
            key = ("jacobian", plan.recipe, plan.layout, wanted)
            work = functools.partial(_work, program, plan.recipe, plan.layout, wanted)
            outs, pieces = alive(who, program.run, key, work, data.constants, data.point)
        else:
            pieces = _pieces(program, parts_eagerly(program, data, plan.recipe), plan.recipe, plan.layout)
    except (ModeError, MemoryBudgetError):
        raise
    except Exception as err:
        err.add_note(f"linjac.{who}: raised while running mode={plan.mode!r}; {plan}")
        raise
    assert outs is not None
    result = pieces[0][0] if plan.layout == "matrix" else _tree(who, program, pieces, single, options.allow_int)
    return _Done(result, functools.partial(_value, who, output, outs), functools.partial(output.rebuild_aux, outs))


def _value(who: str, output: Output, outs: list[Any]) -> Any:
    leaves = [None if number is None else outs[number] for number in output.value.numbers]
    return rebuild(who, output.value.treedef, leaves)


def _work(
    program: TracedProgram, recipe: Recipe, layout: str, wanted: bool, constants: list[Any], point: list[Any]
) -> tuple[list[Any], list[list[Any]]]:
    """What is compiled: the outputs, where they are wanted, and the blocks or the matrix."""
    if recipe.fused:
        outs = program.value(constants, point) if wanted else []
        data = Data(point, constants, [])
    else:
        outs, fresh = program.stage(constants, point)
        data = Data(point, [constants[i] for i in program.kept_constants], fresh)
    return (outs if wanted else []), _pieces(program, parts(program, data, recipe), recipe, layout)


def _pieces(program: Program, found: list[Any], recipe: Recipe, layout: str) -> list[list[Any]]:
    if layout == "matrix":
        return [[as_matrix(program, found, recipe.direction)]]
    return as_blocks(program, found, recipe.direction)


def _tree(who: str, program: Program, blocks: list[list[Any]], single: bool, allow_int: bool) -> Any:
    """Outputs outside, then argnums, then inputs."""
    inner: list[Any] = []
    held = _zero_block if allow_int else None
    for row, leaf in zip(blocks, [leaf for leaf in program.outputs.leaves if leaf.slot is not None], strict=True):
        entries = [
            row[into.slot] if into.slot is not None else (held(leaf.aval, into.aval) if held and into.aval else None)
            for into in program.inputs.leaves
        ]
        tree = rebuild(who, program.inputs.treedef, entries)
        inner.append(tree[0] if single else tree)
    slots = iter(inner)
    return rebuild(
        who, program.outputs.treedef, [None if leaf.slot is None else next(slots) for leaf in program.outputs.leaves]
    )


def _zero_block(out: Any, into: Any) -> Any:
    return np.zeros(out.shape + into.shape, float0)


def unflatten_matrix(program: Program, matrix: Any) -> Any:
    """The tree of blocks of a dense matrix."""
    array = jax.numpy.asarray(matrix)
    rows: list[list[Any]] = []
    above = 0
    for out in program.outputs.avals:
        height = int(np.prod(out.shape, dtype=int))
        before = 0
        blocks: list[Any] = []
        for into in program.inputs.avals:
            width = int(np.prod(into.shape, dtype=int))
            block = array[above : above + height, before : before + width]
            blocks.append(block.reshape(out.shape + into.shape))
            before += width
        rows.append(blocks)
        above += height
    return _tree("JacobianPlan.unflatten", program, rows, len(program.layout.argnums) == 1, False)


def compiled(plan: JacobianPlan) -> Any:
    """The compiled program of a plan, lowered from types alone."""
    program = plan.program
    if not isinstance(program, TracedProgram):
        raise ModeError(compose("JacobianPlan.compile", "the function runs op by op, so there is nothing to compile"))
    work = functools.partial(_work, program, plan.recipe, plan.layout, False)
    return jax.jit(work).lower(list(program.constant_types), list(program.point_types)).compile()

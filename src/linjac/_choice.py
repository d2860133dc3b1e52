"""Choose the mode of a Jacobian and how it is swept: sizes, availability and structure in, a `JacobianPlan` out.

Pure: a choice depends on shapes, dtypes and the linear program, never on values. This module runs nothing.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from linjac._constants import Jaxpr, equations, place_of
from linjac._cut import find_cut
from linjac._directions import BUDGET, FLOOR, balanced
from linjac._errors import ModeError, compose
from linjac._plan import DIRECTION, OTHER, JacobianPlan, Options, Side
from linjac._program import Data, Program, TracedProgram, bytes_of_direction, first_line, mode_error
from linjac._sweeps import Recipe, ends
from linjac._tree import is_complex, promoted, size_of

CLOSE = 4.0  # sizes within this factor of each other decide nothing alone
CHUNK = 128  # directions in a chunk of a Jacobian too large for one: enough for dense nets, and little scratch
FUSED = 64  # fused forward sweeps through a scan win up to about so many inputs (tests/benchmarks/bench_sweeps.py)


# what is possible -----------------------------------------------------------------------------------------------------
# What JAX's error says, the primitive that is then to blame, and what to call it.
_SUSPECTS = (
    ("while_loop", "while", "a while_loop with a trip count known at run time only"),
    ("allback", "pure_callback", "a host callback without derivative rule"),
    ("allback", "io_callback", "a host callback without derivative rule"),
    ("known values", "custom_vmap_call", "a custom_vmap, which is pushed forward only"),
    ("custom_vmap", "custom_vmap_call", "a custom_vmap, which is pushed forward only"),
    ("custom_vjp", "custom_vjp_call", "a custom_vjp, which has no forward rule"),
    ("", "custom_jvp_call", "a custom_jvp whose rule is not linear in its tangent, or has no transpose"),
)


def obstacles(program: Program, data: Data) -> dict[str, str]:
    """For each mode that cannot work: why, and where in the function."""
    found: dict[str, str] = {}
    for mode, direction in DIRECTION.items():
        if not program.can(direction, data):
            found[mode] = _reason(program, direction)
    return found


def _reason(program: Program, direction: str) -> str:
    error = program.obstacles.get(direction) or program.obstacles.get("linearize")
    said = first_line(error) if error is not None else ""
    blamed = _blame(program, said)
    if direction == "forward" and program.kernel is not None and program.kernel.is_custom:
        place = _place_of(program, "custom_vjp_call")
        blamed = f"a custom_vjp{place} has no forward rule, and its pullback cannot be transposed: {blamed}"
    return f"{blamed} ({type(error).__name__}: {said})"


def _blame(program: Program, said: str) -> str:
    """The primitive at fault and its place in the user's code, as far as JAX's error tells."""
    for words, primitive, name in _SUSPECTS:
        if words in said:
            place = _place_of(program, primitive)
            if place:
                return name + place
    return "a derivative rule cannot be used this way"


def _place_of(program: Program, primitive: str) -> str:
    jaxpr = getattr(program, "primal", None) or (program.kernel and program.kernel.linear)
    for eqn in equations(jaxpr) if jaxpr is not None else ():
        if eqn.primitive.name == primitive:
            place = place_of(eqn)
            return f" at {place}" if place else " in JAX's own code"
    return ""


# what is chosen -------------------------------------------------------------------------------------------------------
def make_plan(who: str, program: Program, data: Data, options: Options) -> JacobianPlan:
    """The plan for these options; `options.mode` is "auto", "fwd" or "rev" ("measure" counts as "auto")."""
    m, n = program.outputs.size, program.inputs.size
    refused = obstacles(program, data)
    if program.kernel is not None and program.kernel.collectives:
        what = "fun reduces over a mapped axis, so forward and reverse mode answer different questions"
        remedy = "differentiate outside: apply linjac to the mapped function, jax.vmap(fun) or jax.shard_map(fun)"
        raise ModeError(compose(who, what, program.kernel.collectives, remedy))
    mode, notes = _resolve_mode(who, program, data, options, refused)
    recipe, more = _resolve_recipe(program, data, mode, options)
    count = n if mode == "fwd" else m
    chunks, size = balanced(count, recipe.chunk_size)
    factor = 2 if recipe.paired else 1
    result = sum(
        size_of(out) * size_of(into) * promoted([out, into]).itemsize
        for out, into in itertools.product(program.outputs.avals, program.inputs.avals)
    )
    if options.layout == "matrix":
        result = m * n * promoted([*program.outputs.avals, *program.inputs.avals]).itemsize
    scratch = size * factor * _per_direction(program, recipe.direction) + program.residual_bytes
    if _is_copied(program, recipe.direction, options.layout):
        scratch += result
    return JacobianPlan(
        mode=mode,
        m=m,
        n=n,
        sweeps=count * factor,
        chunks=chunks,
        chunk_size=size,
        layout=options.layout,
        result_bytes=result,
        scratch_bytes=scratch if count and m * n else 0,
        ruled_out=tuple(refused.items()),
        notes=(*notes, *more, *(() if program.maps(recipe.direction, data) or count < 2 else (_UNMAPPED,))),
        row_leaves=_side(program.outputs.names, "cotangent", "output", program.outputs.avals),
        column_leaves=_columns(program),
        recipe=recipe._replace(chunk_size=max(1, size)),
        options=options,
        program=program,
    )


_UNMAPPED = "one direction at a time: jax.vmap cannot map a host callback of this kind"


def _is_copied(program: Program, direction: str, layout: str) -> bool:
    """Whether the result is cut or joined from the parts of the sweeps: it is then scratch once more."""
    near, far = ends(program, direction)
    dtype = promoted([*near.avals, *far.avals])
    cast = any(aval.dtype != dtype for aval in far.avals)
    return cast or len((near if layout == "blocks" else far).avals) > 1


def _side(names: Sequence[str], old: str, new: str, avals: Sequence[Any]) -> Side:
    return Side(tuple(new + name.removeprefix(old) for name in names), tuple(aval.shape for aval in avals))


def _columns(program: Program) -> Side:
    names = tuple(program.argument_name(name, "args") for name in program.inputs.names)
    return Side(names, tuple(aval.shape for aval in program.inputs.avals))


def _resolve_mode(
    who: str, program: Program, data: Data, options: Options, refused: dict[str, str]
) -> tuple[str, tuple[str, ...]]:
    m, n = program.outputs.size, program.inputs.size
    if len(refused) == 2:
        lines = [f"{DIRECTION[mode]}: {reason}" for mode, reason in refused.items()]
        remedy = "give that part a derivative rule that JAX can push forward or transpose"
        raise mode_error(who, "no mode works for this function", program, remedy, lines)
    if options.mode in refused:
        other = OTHER[options.mode]
        what = f"mode={options.mode!r} cannot work here"
        raise mode_error(who, what, program, f"use mode={other!r}", [refused[options.mode]])
    if options.mode in DIRECTION:
        return options.mode, _custom_note(program, options.mode)
    available = [mode for mode in DIRECTION if mode not in refused]
    if len(available) == 2 and program.kernel is not None and program.kernel.is_custom:
        return "rev", ("reverse: the function has a custom_vjp, its own rule for this direction",)
    if len(available) == 1:
        return available[0], _custom_note(program, available[0])
    if program.inputs.is_complex != program.outputs.is_complex:  # one sweep each, instead of two
        return ("rev" if program.inputs.is_complex else "fwd"), ("one end is complex: seeds at the real end",)
    mode = _by_size(program, data, m, n, options)
    near = m and n and max(m, n) <= CLOSE * min(m, n)
    return mode, ("sizes are close: consider mode='measure'",) if near else ()


def _by_size(program: Program, data: Data, m: int, n: int, options: Options) -> str:
    """The fewer sweeps; in a tie, whichever was measured to be faster for such a program."""
    kernel = program.kernel
    if kernel is None:
        return "fwd"
    if not kernel.primitives & (_MATMULS | _LOOPED) and m < n <= _REDUCING * m and _expands(kernel.linear, 2 * (n + m)):
        return "fwd"
    if n != m:
        return "fwd" if n < m else "rev"
    copied = [_is_copied(program, direction, options.layout) for direction in ("forward", "reverse")]
    if copied[0] != copied[1] and n * m * 4 >= BUDGET:
        return "rev" if copied[0] else "fwd"
    if kernel.primitives & _MOVES and not kernel.primitives & (_MATMULS | _LOOPED) and not _SHIFTS_FUSE:
        return "rev"
    chunked = balanced(n, _limit(program, data, "fwd", Options()))[0] > 1
    if kernel.primitives & _LOOPED:  # forward keeps nothing of the steps; in reverse 1.3 to 1.8 times as long for RK4
        return "rev" if chunked else "fwd"
    if chunked and kernel.primitives & _MATMULS:
        return "fwd"  # a chunk of rows times a matrix as it lies in memory; in reverse it would be packed for each one
    return "rev" if chunked or kernel.primitives & _MATMULS else "fwd"


def _expands(jaxpr: Jaxpr, size: int) -> bool:
    """Whether a sum over something larger than both ends is taken: in reverse XLA sums down the columns, slowly."""
    sums = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "reduce_sum")
    return any(size_of(eqn.invars[0].aval) > size for eqn in sums)


def _custom_note(program: Program, mode: str) -> tuple[str, ...]:
    if mode == "fwd" and program.kernel is not None and program.kernel.is_custom:
        return ("forward: through the transposed pullback, since the function has a custom_vjp",)
    return ()


# how it is swept ------------------------------------------------------------------------------------------------------
# Each choice below was measured by tests/benchmarks/bench_sweeps.py; repeat it there when XLA changes.
_MATMULS = frozenset({"dot_general", "conv_general_dilated"})
_LOOPED = frozenset({"scan", "while"})
_MOVES = frozenset({"concatenate", "slice", "gather", "pad", "dynamic_slice", "rev"})
_REDUCING = 24  # forward sweeps of sums over an outer product win up to this many inputs for each output
_TALL = 4  # outputs for each input from which a layout pass pays in any program with a matrix product
_SHIFTS_FUSE = jax.__version_info__ < (0, 12)  # from XLA of JAX 0.12 on, fused forward sweeps of stencils are slow


def _resolve_recipe(program: Program, data: Data, mode: str, options: Options) -> tuple[Recipe, tuple[str, ...]]:
    direction = DIRECTION[mode]
    m, n = program.outputs.size, program.inputs.size
    kernel = program.kernel
    paired = _is_paired(program, mode)
    limit = _limit(program, data, mode, options)
    if kernel is None:
        return Recipe(direction, limit, fused=True, paired=paired), ("jvp only: the function cannot be linearized",)
    if not (m and n):
        return Recipe(direction, limit), ()
    matmuls = bool(kernel.primitives & _MATMULS)
    if paired:
        return Recipe(direction, limit, paired=True), ("two real sweeps: one end is complex",)
    if mode == "rev":
        cut = find_cut(kernel, direction) is not None
        recipe = Recipe(direction, limit, pinned=not matmuls and not kernel.primitives & _LOOPED, cut=cut)
    else:
        recipe = _forward_recipe(program, limit, matmuls)
    return recipe, tuple(text for name, text in _WHY.items() if getattr(recipe, name))


_WHY = {
    "fused": "fused: tangents are pushed through the function together with its values",
    "pinned": "pinned: residuals are computed once, not for every direction",
    "laid_out": "laid out: rows first, transposed after a barrier",
    "cut": "cut: the identity is not multiplied into the first matrix",
}


def _forward_recipe(program: Program, limit: int, matmuls: bool) -> Recipe:
    kernel = program.kernel
    assert kernel is not None
    m, n = program.outputs.size, program.inputs.size
    recipe = Recipe("forward", limit)
    if kernel.is_custom or (isinstance(program, TracedProgram) and program.primal.effects):
        return recipe  # effects of the function have to happen once, not in the sweeps again
    if kernel.primitives & _LOOPED:
        return recipe._replace(fused="scan" in kernel.primitives and limit >= n and n <= FUSED)
    if not matmuls:
        if kernel.primitives & _MOVES and not _SHIFTS_FUSE and m < _TALL * n:
            return recipe._replace(pinned=True, laid_out=True)
        return recipe._replace(fused=limit >= n)
    laid_out = _ends_in_matmul(kernel.pushforward) or m >= _TALL * n
    return recipe._replace(laid_out=laid_out, cut=find_cut(kernel, "forward") is not None)


def _is_paired(program: Program, mode: str) -> bool:
    """Two real sweeps: seeds at a complex end, the far end real."""
    near, far = (program.inputs, program.outputs) if mode == "fwd" else (program.outputs, program.inputs)
    return near.is_complex and not all(map(is_complex, far.avals))


def _per_direction(program: Program, direction: str) -> int:
    return max(1, bytes_of_direction(program, direction))


def _limit(program: Program, data: Data, mode: str, options: Options) -> int:
    """Directions in a chunk: all of them while they fit the budget, else as many as fit."""
    count = program.inputs.size if mode == "fwd" else program.outputs.size
    if not program.maps(DIRECTION[mode], data):
        return 1
    per_direction = _per_direction(program, DIRECTION[mode])
    if options.chunk_size is not None:
        return options.chunk_size
    if options.memory_budget is not None:
        return max(1, min(count, options.memory_budget // (2 * per_direction)))
    if count * per_direction <= BUDGET:
        return max(1, count)
    return max(FLOOR, min(CHUNK, BUDGET // (2 * per_direction)))


def _ends_in_matmul(jaxpr: Jaxpr) -> bool:
    """Whether every output comes straight out of a matrix product (a scaling or reshape after it aside)."""
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def ends(var: Any) -> bool:
        for _ in range(8):
            eqn = producers.get(var) if not hasattr(var, "val") else None
            if eqn is None:
                return False
            if eqn.primitive.name in _MATMULS:
                return True
            if eqn.primitive.name not in ("mul", "neg", "reshape", "convert_element_type", "squeeze", "transpose"):
                return False
            inputs = [v for v in eqn.invars if not hasattr(v, "val") and v in producers]
            if not inputs:
                return False
            var = inputs[-1]
        return False

    return all(map(ends, jaxpr.outvars))

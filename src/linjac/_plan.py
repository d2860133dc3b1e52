"""Decide how to compute a Jacobian, and say why: sizes, availability and structure in, a `JacobianPlan` out.

Pure: a plan depends on shapes, dtypes and the linear program, never on values. This module runs nothing.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.extend.source_info_util
import numpy as np

from linjac._blocks import block_tree, unflatten_matrix
from linjac._constants import Jaxpr, equations
from linjac._cut import find_cut
from linjac._directions import BUDGET, FLOOR, balanced
from linjac._errors import ModeError, compose
from linjac._options import check_choice
from linjac._program import Data, Program, TracedProgram, bytes_of_direction
from linjac._sweeps import Recipe, work
from linjac._tree import is_complex, promoted, size_of

MODES = ("auto", "fwd", "rev", "measure")
DIRECTION = {"fwd": "forward", "rev": "reverse"}
OTHER = {"fwd": "rev", "rev": "fwd"}
CLOSE = 4.0  # sizes within this factor of each other decide nothing alone
CHUNK = 128  # directions in a chunk of a Jacobian too large for one: enough for dense nets, and little scratch
FUSED = 512  # fused forward sweeps win up to about this many inputs (FACTS: GRU by 1.2 to 1.4)


class Options(NamedTuple):
    """What the caller asked for; static."""

    mode: str = "auto"
    layout: str = "blocks"
    chunk_size: int | None = None
    memory_budget: int | None = None
    holomorphic: bool = False
    allow_int: bool = False
    single: bool = True  # whether one argument is differentiated, so that the blocks come without a tuple


class Side(NamedTuple):
    """The leaves along the rows or the columns of the matrix."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def labels(self) -> tuple[str, ...]:
        """A name for every row or column: key path and index."""
        labels: list[str] = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            if shape:
                labels += [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]
            else:
                labels.append(name)
        return tuple(labels)


@dataclass(frozen=True)
class JacobianPlan:
    """How `linjac.jacobian` computes a Jacobian, and why. Printed, it reads as one sentence.

    Frozen and hashable: it holds sizes, names and reasons, no arrays. Given as `mode=`, it repeats its decision.

    Attributes:
        mode: `"fwd"` (a sweep for each input) or `"rev"` (a sweep for each output).
        m: Number of outputs, the rows.
        n: Number of inputs, the columns.
        sweeps: Directions that are pushed or pulled.
        chunks: Compiled sweeps over `chunk_size` directions each.
        chunk_size: Directions at a time.
        layout: `"blocks"` or `"matrix"`.
        result_bytes: Bytes of the Jacobian.
        scratch_bytes: Bytes of scratch, estimated from the linear program; `compile()` has the compiler's figure.
        ruled_out: For each mode that cannot work, its name and the obstacle.
        notes: What else was decided from the program, and advice.
    """

    __module__ = "linjac"

    mode: str
    m: int
    n: int
    sweeps: int
    chunks: int
    chunk_size: int
    layout: str
    result_bytes: int
    scratch_bytes: int
    ruled_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    row_leaves: Side = field(repr=False)
    column_leaves: Side = field(repr=False)
    recipe: Recipe = field(repr=False)
    options: Options = field(repr=False)
    program: Program = field(repr=False, compare=False)

    @property
    def rows(self) -> tuple[str, ...]:
        """The name of each row of the matrix: key path and index of an output."""
        return self.row_leaves.labels()

    @property
    def columns(self) -> tuple[str, ...]:
        """The name of each column of the matrix: key path and index of an input."""
        return self.column_leaves.labels()

    def unflatten(self, matrix: Any) -> Any:
        """The tree of blocks of an (m, n) matrix; see `linjac.jacobian` for its form.

        Args:
            matrix: An array of shape (m, n).

        Returns:
            The blocks, each in the dtype of the matrix.

        Raises:
            ValueError: The matrix has another shape.
        """
        if np.shape(matrix) != (self.m, self.n):
            raise ValueError(
                compose("JacobianPlan.unflatten", f"expected shape {(self.m, self.n)}, got {np.shape(matrix)}")
            )
        return unflatten_matrix(self.program, matrix, single=self.options.single)

    def compile(self) -> int:
        """Compile, run nothing, and return the compiler's figure for the scratch.

        Returns:
            Bytes of temporary memory, the result not counted.

        Raises:
            ModeError: The function runs op by op.
        """
        program = self.program
        if not isinstance(program, TracedProgram):
            raise ModeError(compose("JacobianPlan.compile", "the function runs op by op: there is nothing to compile"))
        function = functools.partial(work, program, self.recipe, self.layout, False)
        lowered = jax.jit(function).lower(list(program.constant_types), list(program.point_types))
        figures: Any = lowered.compile().memory_analysis()
        return int(figures.temp_size_in_bytes)

    def __str__(self) -> str:
        """One sentence, then a line for each note."""
        words = {"fwd": ("forward", self.n), "rev": ("reverse", self.m)}
        mine, theirs = words[self.mode], words[OTHER[self.mode]]
        ruled = dict(self.ruled_out)
        other = OTHER[self.mode]
        rest = f"{theirs[0]} ruled out: {ruled[other]}" if other in ruled else f"{theirs[0]} possible"
        lines = [
            f"{_many(self.sweeps, mine[0] + ' sweep')} in {_many(self.chunks, 'chunk')} instead of "
            f"{_many(theirs[1], theirs[0] + ' sweep')}: {_many(self.n, 'input')}, {_many(self.m, 'output')}; "
            f"result {_size(self.result_bytes)}, scratch {_size(self.scratch_bytes)}; {rest}"
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def resolve_mode(who: str, mode: Any, chunk_size: int | None) -> tuple[str, int | None, JacobianPlan | None]:
    """The word for a mode, the chunk size, and the plan that was given in its place."""
    if isinstance(mode, JacobianPlan):
        return mode.mode, chunk_size or mode.recipe.chunk_size, mode
    return check_choice(who, "mode", mode, MODES), chunk_size, None


def assemble(who: str, plan: JacobianPlan, found: list[list[Any]]) -> Any:
    """The result in the plan's layout, from the pieces of its sweeps."""
    if plan.layout == "matrix":
        return found[0][0]
    options = plan.options
    return block_tree(who, plan.program, found, single=options.single, allow_int=options.allow_int)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    if count < 1 << 18:
        return f"{count / 1024:.0f} KiB"
    return f"{count / (1 << 20):.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


# what is possible -----------------------------------------------------------------------------------------------------
_LOOPS = {"while": "a while_loop with a trip count known at run time only", "custom_vmap_call": "a custom_vmap"}


def obstacles(program: Program, data: Data) -> dict[str, str]:
    """For each mode that cannot work: why, and where in the function."""
    found: dict[str, str] = {}
    for mode, direction in DIRECTION.items():
        if not program.can(direction, data):
            found[mode] = _reason(program, direction)
    return found


def _reason(program: Program, direction: str) -> str:
    error = program.obstacles.get(direction) or program.obstacles.get("linearize")
    lines = str(error).strip().splitlines() if error is not None else []
    said = lines[0][:160] if lines else "its derivative rule is not linear in the tangent, or has no transpose"
    return f"{_suspect(program)}{type(error).__name__}: {said}"


def _suspect(program: Program) -> str:
    """The primitive that is to blame, with its place in the user's code, where it is one that is known to be."""
    jaxpr = program.primal if isinstance(program, TracedProgram) else program.kernel and program.kernel.linear
    for eqn in equations(jaxpr) if jaxpr is not None else ():
        name = eqn.primitive.name
        if name in _LOOPS or name in ("custom_vjp_call", "custom_jvp_call", "pure_callback", "io_callback"):
            what = _LOOPS.get(name, name.removesuffix("_call"))
            return f"{what} at {place_of(eqn)}: "
    return ""


def place_of(eqn: Any) -> str:
    """`file:line (function)` of an equation, in the user's code."""
    return jax.extend.source_info_util.summarize(eqn.source_info)


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
    scratch = size * factor * _bytes_per_direction(program, recipe) + program.residual_bytes
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
        notes=(*notes, *more),
        row_leaves=_side(program.outputs.names, "cotangent", "output", program.outputs.avals),
        column_leaves=_columns(program),
        recipe=recipe._replace(chunk_size=max(1, size)),
        options=options,
        program=program,
    )


def _side(names: Sequence[str], old: str, new: str, avals: Sequence[Any]) -> Side:
    return Side(tuple(new + name.removeprefix(old) for name in names), tuple(aval.shape for aval in avals))


def _columns(program: Program) -> Side:
    layout = program.layout
    names: list[str] = []
    for name in program.inputs.names:
        slot, _, rest = name.removeprefix("tangents[").partition("]")
        position = layout.argnums[int(slot)] - layout.shift
        names.append((f"args[{position}]" if position >= 0 else "fun") + rest)
    return Side(tuple(names), tuple(aval.shape for aval in program.inputs.avals))


def _resolve_mode(
    who: str, program: Program, data: Data, options: Options, refused: dict[str, str]
) -> tuple[str, tuple[str, ...]]:
    m, n = program.outputs.size, program.inputs.size
    if len(refused) == 2:
        lines = [f"{DIRECTION[mode]}: {reason}" for mode, reason in refused.items()]
        raise _raised(program, ModeError(compose(who, "no mode works for this function", lines)))
    if options.mode in refused:
        other = OTHER[options.mode]
        lines = [refused[options.mode]]
        raise _raised(
            program,
            ModeError(compose(who, f"mode={options.mode!r} cannot work here", lines, f"use mode={other!r}")),
        )
    if options.mode in DIRECTION:
        return options.mode, _custom_note(program, options.mode)
    available = [mode for mode in DIRECTION if mode not in refused]
    if len(available) == 2 and program.kernel is not None and program.kernel.is_custom:
        return "rev", ("reverse: the function has a custom_vjp, its own rule for this direction",)
    if len(available) == 1:
        return available[0], _custom_note(program, available[0])
    if program.inputs.is_complex != program.outputs.is_complex:  # one sweep each, instead of two
        return ("rev" if program.inputs.is_complex else "fwd"), ("one end is complex: seeds at the real end",)
    mode = _by_size(program, data, m, n)
    near = m and n and max(m, n) <= CLOSE * min(m, n)
    return mode, ("sizes are close: consider mode='measure'",) if near else ()


def _by_size(program: Program, data: Data, m: int, n: int) -> str:
    """The fewer sweeps; in a tie, reverse where it writes rows in place chunk by chunk or begins with a matrix."""
    kernel = program.kernel
    if kernel is None:
        return "fwd"
    if not kernel.primitives & (_MATMULS | _LOOPED) and m < n <= _REDUCING * m and _expands(kernel.linear, 2 * (n + m)):
        return "fwd"
    if n != m:
        return "fwd" if n < m else "rev"
    chunked = balanced(n, _limit(program, data, "fwd", Options()))[0] > 1
    return "rev" if chunked or kernel.primitives & (_MATMULS | {"scan"}) else "fwd"


def _expands(jaxpr: Jaxpr, size: int) -> bool:
    """Whether a sum over something larger than both ends is taken: in reverse XLA sums down the columns, slowly."""
    sums = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "reduce_sum")
    return any(size_of(eqn.invars[0].aval) > size for eqn in sums)


def _custom_note(program: Program, mode: str) -> tuple[str, ...]:
    if mode == "fwd" and program.kernel is not None and program.kernel.is_custom:
        return ("forward: through the transposed pullback, since the function has a custom_vjp",)
    return ()


def _raised(program: Program, error: ModeError) -> ModeError:
    """With JAX's own error chained."""
    error.__cause__ = next(iter(program.obstacles.values()), None)
    return error


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
    if kernel.is_custom:
        return recipe
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


def _bytes_per_direction(program: Program, recipe: Recipe) -> int:
    return _per_direction(program, recipe.direction)


def _limit(program: Program, data: Data, mode: str, options: Options) -> int:
    """Directions in a chunk: all of them while they fit the budget, else as many as fit."""
    count = program.inputs.size if mode == "fwd" else program.outputs.size
    if options.chunk_size is None and not program.maps(DIRECTION[mode], data):
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

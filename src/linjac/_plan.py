"""What was decided about a Jacobian, as an object that explains itself: options in, a `JacobianPlan` out.

How the decision is made is in `_choice`; nothing here chooses, and only `JacobianPlan.compile` compiles.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from linjac._blocks import block_tree, unflatten_matrix
from linjac._errors import ModeError, compose
from linjac._options import check_choice
from linjac._program import Program, TracedProgram
from linjac._sweeps import Recipe, work

MODES = ("auto", "fwd", "rev", "measure")
DIRECTION = {"fwd": "forward", "rev": "reverse"}
OTHER = {"fwd": "rev", "rev": "fwd"}


_PICKLED = "the plan comes from another process (it was pickled), so it has no program"
_PLAN_HERE = "make a plan here with linjac.plan_jacobian, or give this one to linjac.jacobian as mode"


class Options(NamedTuple):
    """What the caller asked for; static."""

    mode: str = "auto"
    layout: str = "blocks"
    chunk_size: int | None = None
    memory_budget: int | None = None
    holomorphic: bool = False
    allow_int: bool = False
    hold: bool = False  # arguments that cannot move are held, not refused: the linearization has accepted them
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

    Frozen and hashable: it holds sizes, names and reasons, no arrays. Given as `mode=`, it repeats its decision, in
    another process too: a pickled plan is the decision without the program, so that it neither compiles nor unflattens.

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
    program: Program | None = field(repr=False, compare=False)  # None in another process: it cannot be pickled

    def __getstate__(self) -> dict[str, Any]:
        """The decision without the program, so that another process can repeat it."""
        return {**vars(self), "program": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "JacobianPlan":
        return self  # nothing in it changes

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
            ValueError: The matrix has another shape, or the plan was pickled.
        """
        who = "JacobianPlan.unflatten"
        try:
            shape = np.shape(matrix)
        except ValueError:  # ragged
            shape = None
        if shape != (self.m, self.n):
            raise ValueError(compose(who, f"expected shape {(self.m, self.n)}, got {shape or 'rows of several sizes'}"))
        if self.program is None:
            raise ValueError(compose(who, _PICKLED, remedy=_PLAN_HERE))
        options = self.options
        return unflatten_matrix(self.program, matrix, single=options.single, allow_int=options.allow_int)

    def compile(self) -> int:
        """Compile, run nothing, and return the compiler's figure for the scratch.

        Returns:
            Bytes of temporary memory, the result not counted.

        Raises:
            ModeError: The function runs op by op.
            ValueError: The plan was pickled.
        """
        who, program = "JacobianPlan.compile", self.program
        if program is None:
            raise ValueError(compose(who, _PICKLED, remedy=_PLAN_HERE))
        if not isinstance(program, TracedProgram):
            raise ModeError(compose(who, "the function runs op by op: there is nothing to compile"))
        key = ("scratch", self.recipe, self.layout)
        if key not in program.notes:
            function = functools.partial(work, program, self.recipe, self.layout, False)
            lowered = jax.jit(function).lower(list(program.constant_types), list(program.point_types))
            figures: Any = lowered.compile().memory_analysis()
            program.notes[key] = int(figures.temp_size_in_bytes)
        return program.notes[key]

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
    return check_choice(who, "mode", mode, MODES, "or a JacobianPlan"), chunk_size, None


def assemble(who: str, plan: JacobianPlan, found: list[list[Any]]) -> Any:
    """The result in the plan's layout, from the pieces of its sweeps."""
    if plan.layout == "matrix":
        return found[0][0]
    options = plan.options
    assert plan.program is not None
    return block_tree(who, plan.program, found, single=options.single, allow_int=options.allow_int)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    if count < 1 << 18:
        return f"{count / 1024:.0f} KiB"
    return f"{count / (1 << 20):.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.1f} GiB"


def work_of(plan: JacobianPlan) -> tuple[int, int, int, int]:
    """Directions, sweeps, chunks and bytes of the result: what monitors are told."""
    return plan.n if plan.mode == "fwd" else plan.m, plan.sweeps, plan.chunks, plan.result_bytes

"""The program of one function at one signature: value, residual recipe and linear program, traced once, without data.

A `Program` is static: it holds jaxprs without constants, types and names, and is compared by identity, so that
linearizations at different points of one function have equal treedefs and compile nothing anew. Its data (constants,
point, residuals) are always arguments. It must not know the cache that keeps it, nor the public objects.
"""

import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
from jax.extend.core import Literal

from linjac._arguments import Call, Layout
from linjac._constants import Jaxpr, evaluate, surface
from linjac._directions import bytes_per_direction
from linjac._errors import ModeError, PointError, compose
from linjac._kernel import Kernel
from linjac._residuals import Recipe, Source, recipe
from linjac._space import COTANGENT, TANGENTS, Leaf, Space
from linjac._tree import PyTreeDef, axes_of, bytes_of, is_inexact, is_none, key_paths, type_of

_UNMAPPABLE = frozenset({"pure_callback", "io_callback", "custom_vmap_call"})

# Python that needs the value of an array, met while tracing.
CONTROL_FLOW = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


_NAMES_A_TRACER = re.compile(r"Tracer|concrete|traced")


def needs_values(err: Exception) -> bool:
    """Whether an error met while tracing may be one that values would spare: a branch, a shape, a slice, a hash.

    JAX raises plain TypeErrors, IndexErrors and ValueErrors for some of these; their texts name the tracer.
    """
    if isinstance(err, Warning) or str(err).startswith("linjac."):  # a warning that is an error, a refusal of ours
        return False
    return isinstance(err, CONTROL_FLOW) or bool(_NAMES_A_TRACER.search(str(err)))


class Data(NamedTuple):
    """What a linearization holds: all arrays, nothing static."""

    point: list[Any]  # the traced arguments
    constants: list[Any]  # what the function closes over, each array once; None where stored data does not need it
    residuals: list[Any]  # the fresh ones; the rest is point and constants again


class Outputs(NamedTuple):
    """The output tree of a traced function, described by its leaves (None included)."""

    treedef: PyTreeDef
    plain: PyTreeDef  # the same, None being no leaf
    names: tuple[str, ...]
    numbers: tuple[int | None, ...]  # place among the flat outputs, None for None
    total: int


def describe_outputs(value: Any) -> Outputs:
    """Describe a tree of arrays."""
    leaves, treedef = jax.tree_util.tree_flatten(value, is_leaf=is_none)
    counter = itertools.count()
    numbers = tuple(None if leaf is None else next(counter) for leaf in leaves)
    plain = jax.tree_util.tree_structure(value)
    return Outputs(treedef, plain, tuple(key_paths(value, "cotangent")), numbers, next(counter))


def alive(who: str, run: Callable[..., Any], *args: Any) -> Any:
    """Run, saying in our own words that an array was deleted."""
    try:
        return run(*args)
    except (RuntimeError, ValueError) as err:
        if not any(map(_is_deleted, jax.tree_util.tree_leaves(args))):
            raise
        what = "an array has been deleted (donated to another computation)"
        raise PointError(compose(who, what, remedy="pass arrays that are alive, or do not donate them")) from err


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


class Program:
    """What a linearization knows of its function, whether traced or run op by op."""

    compiled: bool

    def __init__(self, layout: Layout, inputs: Space, outputs: Space) -> None:
        self.layout = layout
        self.inputs = inputs
        self.outputs = outputs
        self.kernel: Kernel | None = None
        self.obstacles: dict[str, Exception] = {}
        self.sources: tuple[Source, ...] = ()
        self.residual_types: tuple[Any, ...] = ()
        self.point_types: tuple[Any, ...] = ()
        self.constant_types: tuple[Any, ...] = ()
        self._jitted: dict[Any, Callable[..., Any]] = {}
        self.products: dict[Any, Callable[..., Any]] = {}  # of single vectors, by direction and strategy
        self._settled: dict[str, bool] = {}
        self.notes: dict[Any, Any] = {}  # static facts that upper layers derive from the program, by their own keys

    def __deepcopy__(self, memo: dict[int, Any]) -> "Program":
        return self  # static, and compared by identity

    def argument_name(self, name: str, root: str) -> str:
        """The caller's word for a leaf of the tangents: `args[2]['w']` for `tangents[0]['w']`."""
        slot, _, rest = name.removeprefix("tangents[").partition("]")
        position = self.layout.argnums[int(slot)] - self.layout.shift
        return (f"{root}[{position}]" if position >= 0 else "fun") + rest

    # products: pure functions of the data -----------------------------------------------------------------------------
    def push(self, data: Data, tangents: Sequence[Any]) -> list[Any]:
        """J v from stored residuals."""
        assert self.kernel is not None
        return self.kernel.push(self.residuals(data), tangents)

    def pull(self, data: Data, cotangents: Sequence[Any]) -> list[Any]:
        """Jᵀ c from stored residuals."""
        assert self.kernel is not None
        return self.kernel.pull(self.residuals(data), cotangents)

    def jvp(self, data: Data, tangents: Sequence[Any]) -> list[Any]:
        """J v through the function itself: nothing is kept. Needs all constants."""
        raise NotImplementedError

    def vjp(self, data: Data, cotangents: Sequence[Any]) -> list[Any]:
        """Jᵀ c with the residuals computed on the way. Needs all constants."""
        raise NotImplementedError

    def residuals(self, data: Data) -> list[Any]:
        """All residuals in the order of the linear program."""
        raise NotImplementedError

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        """The axes of an enclosing shard_map over which the data varied where this was traced."""
        return frozenset().union(*map(axes_of, (*self.point_types, *self.constant_types, *self.residual_types)))

    @functools.cached_property
    def residual_bytes(self) -> int:
        """Bytes of the fresh residuals: what a stored linearization keeps beside its point and constants."""
        return sum(map(bytes_of, self.residual_types))

    # which directions there are ---------------------------------------------------------------------------------------
    def can(self, direction: str, data: Data) -> bool:
        """Whether "forward" or "reverse" works; where not, `obstacles` says why. Nothing is computed."""
        known = self._settled.get(direction)
        if known is None:
            known = self._settled[direction] = self._try(direction, data)
        return known

    def _try(self, direction: str, data: Data) -> bool:
        try:
            if direction == "forward" and self.kernel is None:
                jax.eval_shape(self.jvp, data, list(self.inputs.avals))
            elif direction == "forward":
                _ = self.kernel.pushforward if self.kernel is not None and self.inputs.avals else None
            elif self.kernel is None:
                return False
            elif self.inputs.size and self.outputs.size:
                _ = self.kernel.pullback
        except Exception as err:
            self.obstacle(direction, err)
            return False
        return True

    def maps(self, direction: str, data: Data) -> bool:
        """Whether the products of a direction can be mapped by `jax.vmap`; host callbacks may refuse it."""
        if self.kernel is not None and not self.kernel.primitives & _UNMAPPABLE:
            return True
        key = ("maps", direction)
        if key not in self.notes:
            self.notes[key] = self._try_map(direction, data)
        return self.notes[key]

    def _try_map(self, direction: str, data: Data) -> bool:
        """Trace the mapped product; nothing is computed."""
        if self.kernel is not None:
            return self.kernel.maps(direction)
        batch = [jax.ShapeDtypeStruct((2, *aval.shape), aval.dtype) for aval in self.inputs.avals]
        try:
            jax.eval_shape(jax.vmap(self.jvp, in_axes=(None, 0)), data, batch)
        except Exception:
            return False
        return True

    def obstacle(self, direction: str, err: Exception) -> None:
        """Remember why a direction cannot be had, without the frames (and their arrays) that the error saw."""
        err.__traceback__ = err.__context__ = err.__cause__ = None
        self.obstacles[direction] = err

    @property
    def fuses(self) -> bool:
        """Whether large forward batches go through the function itself, which is faster in a scan."""
        return False

    # compiled forms ---------------------------------------------------------------------------------------------------
    def run(self, key: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`, compiled once for each `key`; op by op where the program is not compiled."""
        return self.prepared(key, function)(*args)

    def prepared(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled form of `function`, one for each `key`; itself where the program is not compiled."""
        known = self._jitted.get(key)
        if known is None:
            known = self._jitted.setdefault(key, jax.jit(function) if self.compiled else function)
        return known


def bytes_of_direction(program: Program, direction: str) -> int:
    """Estimated scratch of one direction of a sweep."""
    key = ("bytes of a direction", direction)
    if key not in program.notes:
        program.notes[key] = _estimate(program, direction)
    return program.notes[key]


def _estimate(program: Program, direction: str) -> int:
    kernel = program.kernel
    ends = sum(aval.size * aval.dtype.itemsize for space in (program.inputs, program.outputs) for aval in space.avals)
    if kernel is None or not (program.inputs.size and program.outputs.size):
        return 4 * ends
    jaxpr = kernel.pushforward if direction == "forward" else kernel.pullback
    held = len(kernel.residual_types)
    return max(ends, bytes_per_direction(jaxpr, [i >= held for i in range(len(jaxpr.invars))]))


def mode_error(who: str, what: str, program: Program, remedy: str, lines: Sequence[str] | None = None) -> ModeError:
    """A ModeError that names every obstacle (in the caller's `lines`, where given) and is raised from the first one."""
    if lines is None:
        lines = [f"{name}: {type(err).__name__}: {first_line(err)}" for name, err in program.obstacles.items()]
    error = ModeError(compose(who, what, lines, remedy))
    error.__cause__ = next(iter(program.obstacles.values()), None)
    return error


def first_line(err: Exception) -> str:
    """What an error says, in one line of words, not cut within one."""
    lines = str(err).strip().splitlines()
    if not lines:
        return "(no message; a derivative rule that is not linear in its tangent does this)"
    return textwrap.shorten(lines[0], 200, placeholder=" ...")


class Sizes(NamedTuple):
    """Bytes of what a function returns."""

    value: int
    aux: int


class TracedProgram(Program):
    """The program of a function traced at one signature."""

    compiled = True

    def __init__(self, call: Call, primal: Jaxpr, constants: Sequence[Any], outputs: Outputs) -> None:
        types = [var.aval for var in primal.invars][len(constants) :]
        inputs, self.moving = input_space(call, types)
        space, self.out_moving = output_space(outputs, [_type_of_var(var) for var in primal.outvars])
        super().__init__(call.layout, inputs, space)
        self.point_types = tuple(types)
        self.primal, self._total = primal, outputs.total
        self._added = 0  # constants that linearizing needs beyond the function's own: they come first
        self._captured = 0  # of these, the ones that are residuals at once
        self._set_constants(constants)

    def _set_constants(self, constants: Sequence[Any]) -> None:
        """Each array is held once, however often it is captured: callers pass the distinct ones."""
        first: dict[int, int] = {}
        self._alias = tuple(first.setdefault(id(value), len(first)) for value in constants)
        self.distinct = tuple(self._alias.index(k) for k in range(len(first)))
        self.constant_types = tuple(type_of(constants[i]) for i in self.distinct)

    # construction ---------------------------------------------------------------------------------------------------
    def linearize(self, constants: Sequence[Any], point: Sequence[Any]) -> list[Any]:
        """Trace the linear program; returns the constants that it needs beyond those of the function.

        They come first among the constants from here on. A function that `jax.linearize` refuses keeps no linear
        program; the refusal is an obstacle.
        """
        try:
            staged, shape = jax.make_jaxpr(self._linearized, return_shape=True)(list(constants), list(point))
        except CONTROL_FLOW:  # a rule that branches in Python on values: op by op, as for the function itself
            raise
        except Exception as err:
            self.obstacle("linearize", err)
            return []
        residuals, treedef = jax.tree_util.tree_flatten(shape[1])
        skip = len(staged.outvars) - len(residuals)
        stage, extra = surface(staged, [*constants, *point])
        types = [var.aval for var in stage.outvars[skip:]]

        def apply(held: list[Any], tangents: list[Any]) -> list[Any]:
            return jax.tree_util.tree_unflatten(treedef, held)(*tangents)

        traced = jax.make_jaxpr(apply)(types, list(self.inputs.avals))
        linear, captured = surface(traced, [*types, *self.inputs.avals])
        self.kernel = Kernel(linear, self.inputs.avals, self.outputs.avals)
        captured = self._lift() + captured
        plan = recipe(stage, skip)
        self._stage, self._skip, self._fresh = stage, skip, plan.positions
        self._captured, self._added = len(captured), len(captured) + len(extra)
        self.residual_types = plan.types
        self._set_constants([*captured, *extra, *constants])
        self.sources = self._number(plan, len(captured))
        used = {source.place for source in self.sources if not source.fresh}
        self._needed = None if self.fuses else used
        return captured + extra

    def _number(self, plan: Recipe, captured: int) -> tuple[Source, ...]:
        """Number what residuals come from as (distinct constants, point); captured constants are residuals too."""
        count, distinct = len(self._alias), len(self.distinct)

        def place(index: int) -> int:
            return self._alias[index] if index < count else index - count + distinct

        heads = [Source(False, place(i)) for i in range(captured)]
        rest = [source if source.fresh else Source(False, place(source.place + captured)) for source in plan.sources]
        return (*heads, *rest)

    @functools.cached_property
    def bytes_returned(self) -> Sizes:
        """Bytes of the arrays among value and aux."""
        sizes = [bytes_of(_type_of_var(var)) for var in self.primal.outvars]
        return Sizes(sum(sizes[: self._total]), sum(sizes[self._total :]))

    @property
    def fuses(self) -> bool:
        """Whether large forward batches go through the function itself, which is faster in a scan."""
        return self.kernel is not None and "scan" in self.kernel.primitives and not self.kernel.is_custom

    def keep(self, constants: Sequence[Any]) -> list[Any]:
        """The constants that stored data needs, None for the others."""
        return [c if self._needed is None or i in self._needed else None for i, c in enumerate(constants)]

    def _lift(self) -> list[Any]:
        """The constants of custom backward rules; a rule that does not transpose has none to give."""
        assert self.kernel is not None
        try:
            return self.kernel.lift_constants()
        except Exception as err:
            self.obstacle("reverse", err)
            return []

    def _linearized(self, constants: list[Any], point: list[Any]) -> tuple[list[Any], Any]:
        def moved(*tangible: Any) -> tuple[list[Any], list[Any]]:
            outs = self.value(constants, self._at(point, tangible))
            return [outs[i] for i in self.out_moving], outs

        if not self.moving:
            zeros = [jax.numpy.zeros(aval.shape, aval.dtype) for aval in self.outputs.avals]
            return self.value(constants, point), jax.tree_util.Partial(_constant, zeros)
        _, linear, outs = jax.linearize(moved, *[point[i] for i in self.moving], has_aux=True)
        return outs, linear

    # evaluation: pure functions of the data ---------------------------------------------------------------------------
    def _at(self, point: Sequence[Any], tangible: Sequence[Any]) -> list[Any]:
        moved = list(point)
        for i, leaf in zip(self.moving, tangible, strict=True):
            moved[i] = leaf
        return moved

    def _all(self, constants: Sequence[Any]) -> list[Any]:
        """All constants, in the order of the jaxprs, from the distinct ones."""
        return [constants[i] for i in self._alias]

    def value(self, constants: Sequence[Any], point: Sequence[Any]) -> list[Any]:
        """The outputs of the function, aux arrays last."""
        return evaluate(self.primal, [], *self._all(constants)[self._added :], *point)

    def stage(self, constants: Sequence[Any], point: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs and the fresh residuals."""
        outs = evaluate(self._stage, [], *self._all(constants)[self._captured :], *point)
        return outs[: self._skip], [outs[self._skip + i] for i in self._fresh]

    def residuals(self, data: Data) -> list[Any]:
        arguments = [*data.constants, *data.point]
        return [data.residuals[place] if fresh else arguments[place] for fresh, place in self.sources]

    def jvp(self, data: Data, tangents: Sequence[Any]) -> list[Any]:
        """J v by pushing through the function itself: nothing is kept. Needs all constants."""
        if self.kernel is not None and self.kernel.is_custom:
            return self.push(self._recomputed(data), tangents)

        def moved(*tangible: Any) -> list[Any]:
            outs = self.value(data.constants, self._at(data.point, tangible))
            return [outs[i] for i in self.out_moving]

        if not self.moving:
            return [jax.numpy.zeros(aval.shape, aval.dtype) for aval in self.outputs.avals]
        return jax.jvp(moved, tuple(data.point[i] for i in self.moving), tuple(tangents))[1]

    def vjp(self, data: Data, cotangents: Sequence[Any]) -> list[Any]:
        """Jᵀ c with the residuals computed on the way. Needs all constants."""
        return self.pull(self._recomputed(data), cotangents)

    def _recomputed(self, data: Data) -> Data:
        _, fresh = self.stage(data.constants, data.point)
        return data._replace(residuals=fresh)


def _constant(zeros: list[Any], *_: Any) -> list[Any]:
    return zeros


def input_space(call: Call, types: Sequence[Any]) -> tuple[Space, list[int]]:
    """The space of tangents, and the places of its moving leaves among the traced leaves."""
    treedef, plain, rows = call.selected("tangents")
    moving: list[int] = []
    leaves: list[Leaf] = []
    for name, place, present in rows:
        aval = None if place is None else types[place]
        slot = None
        if place is not None and is_inexact(aval):
            slot = len(moving)
            moving.append(place)
        leaves.append(Leaf(name, aval, slot, present))
    return Space(TANGENTS, treedef, leaves, plain), moving


def _type_of_var(var: Any) -> Any:
    return type_of(var.val) if isinstance(var, Literal) else var.aval


def output_space(outputs: Outputs, types: Sequence[Any]) -> tuple[Space, list[int]]:
    """The space of cotangents, and the places of its moving leaves among the flat outputs."""
    moving: list[int] = []
    leaves: list[Leaf] = []
    for name, number in zip(outputs.names, outputs.numbers, strict=True):
        aval = None if number is None else types[number]
        slot = None
        if number is not None and is_inexact(aval):
            slot = len(moving)
            moving.append(number)
        leaves.append(Leaf(name, aval, slot, number is not None))
    return Space(COTANGENT, outputs.treedef, leaves, outputs.plain), moving

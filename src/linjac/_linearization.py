"""The linearization of a function at one point: a pytree, an operator, and the checks at its door."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Never

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from linjac import _watch
from linjac._decide import admit, decide
from linjac._directions import balanced, chunk_limit, from_batch, sweep, sweep_eagerly
from linjac._errors import PointError, TangentError, compose
from linjac._operator import Operator
from linjac._options import check_choice, check_chunk_size, check_flag, check_memory_budget
from linjac._plan import JacobianPlan, Options, assemble, resolve_mode
from linjac._program import Data, Program, TracedProgram, alive, bytes_of_direction, mode_error
from linjac._space import Space
from linjac._sweeps import parts, parts_eagerly, pieces, work
from linjac._tree import bytes_of, in_trace, is_complex, is_inexact, is_key, short, type_of, vary, varying_axes

STORED, RECOMPUTE = "stored", "recompute"
FUSED = 256  # directions from which a batch through a scan is pushed through the function itself


class Linearization(Operator):
    r"""The derivative of a function at one point, as a linear map: made by `linjac.linearize_many`.

    With J of shape (m, n), rows being outputs and columns inputs,

    - `linear_fn(*tangents)` is J v, `linear_fn.many(*batches)` that for every direction of a batch;
    - `linear_fn.transpose(c)` is Jᵀ c, `linear_fn.transpose_many(cs)` that for every cotangent of a batch;
    - `linear_fn.primals` is the point, and `linear_fn.check_point` compares with it.

    It is a pytree whose leaves are arrays (point, constants, residuals), so it can be passed to and returned from
    `jax.jit`, `jax.vmap`, `jax.lax.scan` and the rest. At two points of one signature the treedefs are equal, so
    nothing is compiled anew. It costs no call of the function to apply one that is stored; one that recomputes (see
    `strategy`) costs about two a direction chunk.
    """

    __slots__ = ("__weakref__", "_checked", "_data", "_program", "_strategy", "_traced")
    __module__ = "linjac"

    def __init__(self, data: Data, program: Program, strategy: str, *, checked: bool = True) -> None:
        """Made by `linjac.linearize_many`, not by hand."""
        self._data = data
        self._program = program
        self._strategy = strategy
        self._checked = checked
        self._traced: bool | None = None

    # products ---------------------------------------------------------------------------------------------------------
    def __call__(self, *tangents: Any) -> Any:
        """J v: the tangent of the outputs along one direction.

        Args:
            *tangents: One tree for each differentiated argument, with exactly its structure, shapes and dtypes. A
                leaf that cannot move (integer, bool, PRNG key, no array) takes None, or a float0 zero.

        Returns:
            A tree like the function's output (float0 zeros at integer outputs, as `jax.jvp` gives).

        Raises:
            TangentError: The tangents do not fit the point; the text names every leaf that is wrong.
            PointError: The point was donated to another computation.
        """
        if _watch.active:
            return self._watched("linear_fn", self._push, (tangents,), direction="forward")
        return self._push(tangents)

    def many(self, *tangents: Any, chunk_size: int | None = None, memory_budget: int | None = None) -> Any:
        """J V: the tangents of the outputs along every direction of a batch.

        Args:
            *tangents: As for a single direction, with one more leading axis on every leaf: the direction.
            chunk_size: Directions at a time under `vmap`; 1 runs without `vmap`. By default chosen from
                `memory_budget`.
            memory_budget: Bytes of scratch to stay within; by default 16 MiB, but at least 16 directions.

        Returns:
            A tree like the function's output, with the axis of directions in front of every leaf.

        Raises:
            TangentError: A leaf has no such axis, the axes disagree, or the rest does not fit the point.
        """
        who = "linear_fn.many"
        if _watch.active:
            return self._watched(who, self._many, (who, tangents, chunk_size, memory_budget), tangents)
        return self._many(who, tangents, chunk_size, memory_budget)

    def transpose(self, cotangent: Any) -> tuple[Any, ...]:
        """Jᵀ c: the cotangent of the point, from the same residuals. No conjugation (`rmatvec` is Jᴴ c).

        Args:
            cotangent: A tree like the function's output; None (or float0) at integer outputs.

        Returns:
            A tuple with one tree for each differentiated argument, as from `jax.vjp`; None at leaves that cannot move.

        Raises:
            TangentError: The cotangent does not fit the output.
            ModeError: The function has no reverse direction.
        """
        if _watch.active:
            return self._watched("linear_fn.transpose", self._pull, (cotangent,), direction="reverse")
        return self._pull(cotangent)

    def transpose_many(
        self, cotangents: Any, *, chunk_size: int | None = None, memory_budget: int | None = None
    ) -> tuple[Any, ...]:
        """Jᵀ C: the cotangents of the point for every cotangent of a batch; arguments as for `many`."""
        who = "linear_fn.transpose_many"
        if _watch.active:
            args = (who, cotangents, chunk_size, memory_budget)
            return self._watched(who, self._transpose_many, args, (cotangents,))
        return self._transpose_many(who, cotangents, chunk_size, memory_budget)

    def jacobian(
        self,
        *,
        mode: str | JacobianPlan = "auto",
        holomorphic: bool = False,
        allow_int: bool = False,
        chunk_size: int | None = None,
        memory_budget: int | None = None,
        layout: str = "blocks",
    ) -> Any:
        """The Jacobian at this point, from the same residuals. Arguments as for `linjac.jacobian`.

        Args:
            mode: `"auto"`, `"fwd"`, `"rev"`, or a `linjac.JacobianPlan` to repeat.
            holomorphic: Whether the function is promised to be holomorphic.
            allow_int: Whether integer arguments are allowed; their blocks are float0.
            chunk_size: Directions at a time; by default chosen from `memory_budget`.
            memory_budget: Bytes of scratch.
            layout: `"blocks"` or `"matrix"`.

        Returns:
            Outputs outside, then the differentiated arguments (a tuple unless there is one), then their leaves; or the
            (m, n) matrix.

        Raises:
            ModeError: The mode cannot work for this function.
            ValueError: `mode="measure"`, or an option has a wrong value.
        """
        given = (mode, layout, (chunk_size, memory_budget), (holomorphic, allow_int))
        if _watch.active:
            return self._watched("linear_fn.jacobian", self._jacobian, given, ())
        return self._jacobian(*given)

    def _jacobian(self, mode: str | JacobianPlan, layout: str, limits: tuple[Any, Any], flags: tuple[Any, Any]) -> Any:
        who = "linear_fn.jacobian"
        (chunk_size, memory_budget), (holomorphic, allow_int) = limits, flags
        check_choice(who, "layout", layout, ("blocks", "matrix"))
        check_flag(who, "holomorphic", holomorphic)
        check_flag(who, "allow_int", allow_int)
        word, chunk_size, repeated = resolve_mode(who, mode, check_chunk_size(who, chunk_size))
        budget = check_memory_budget(who, memory_budget)
        if word == "measure":
            what = "a linearization does not measure"
            raise ValueError(compose(who, what, remedy="pass a plan of linjac.plan_jacobian(fun, mode='measure')"))
        single = self._is_single()
        options = Options(word, layout, chunk_size, budget, holomorphic, allow_int, hold=True, single=single)
        data, _ = self._ready([])
        plan = decide(who, self._program, data, options, repeated)
        if _watch.here.state.call:
            admit(plan)
        return assemble(who, plan, alive(who, self._pieces, plan, data))

    def as_matrix(self) -> jax.Array:
        """The dense matrix, in the cheaper of the modes that are possible.

        Returns:
            An array of shape (m, n). For complex inputs and outputs it is the matrix of a holomorphic function; for
            complex inputs and real outputs it has the convention of `jax.jacrev`.

        Raises:
            TypeError: Some inputs are real and some complex, and so are the outputs: there is no such matrix.
        """
        inputs, outputs = self._program.inputs, self._program.outputs
        both = inputs.is_complex and outputs.is_complex
        if both and not all(map(is_complex, (*inputs.avals, *outputs.avals))):
            what = "real and complex leaves on both sides: the map is linear over the reals alone and has no matrix"
            raise TypeError(compose("linear_fn.as_matrix", what, remedy="differentiate real and imaginary parts"))
        return self.jacobian(layout="matrix", holomorphic=both)

    def _pieces(self, plan: JacobianPlan, data: Data) -> list[list[Any]]:
        program, layout = self._program, plan.layout
        if isinstance(program, TracedProgram) and self._strategy == RECOMPUTE:
            function = functools.partial(work, program, plan.recipe, layout, False)
            return program.run(("jacobian", plan.recipe, layout, False), function, data.constants, data.point)[1]
        recipe = plan.recipe._replace(fused=self._strategy == RECOMPUTE)
        swept = parts if program.compiled else parts_eagerly

        def run(data: Data) -> list[list[Any]]:
            return pieces(program, swept(program, data, recipe), recipe, layout)

        return program.run(("stored jacobian", recipe, layout), run, data)

    # the point --------------------------------------------------------------------------------------------------------
    @property
    def primals(self) -> tuple[Any, ...]:
        """The point: all positional arguments of the function, differentiated or not."""
        args, _ = self._program.layout.unflatten(self._data.point)
        return args[self._program.layout.shift :]

    def check_point(self, *primals: Any) -> None:
        """Raise unless these are the point of this linearization, value for value (NaN equals NaN).

        Raises:
            PointError: A leaf moved; the text names it. Also inside a trace, where values cannot be known.
        """
        who = "linear_fn.check_point"
        mine = jax.tree_util.tree_flatten_with_path(self.primals)
        theirs = jax.tree_util.tree_flatten_with_path(primals)
        if mine[1] != theirs[1]:
            names = [["primals" + jax.tree_util.keystr(path) for path, _ in side[0]] for side in (mine, theirs)]
            bad = [f"{name}: missing" for name in names[0] if name not in names[1]]
            bad += [f"{name}: not in the point" for name in names[1] if name not in names[0]]
            bad = bad or [f"expected {mine[1]}, got {theirs[1]}"]
            raise PointError(compose(who, "this is not the point: the structure differs", bad))
        leaves = [(path, a, b) for (path, a), (_, b) in zip(mine[0], theirs[0], strict=True)]
        if in_trace([leaf for _, *pair in leaves for leaf in pair]):
            what = "the point cannot be compared inside a trace, where values are not known"
            raise PointError(compose(who, what, remedy="call it outside jax.jit, jax.vmap and jax.grad"))
        same = [alive(who, _same, a, b) for _, a, b in leaves]
        moved = [leaf for leaf, kept in zip(leaves, same, strict=True) if not kept]
        bad = [f"primals{jax.tree_util.keystr(path)}: {_change(a, b)}" for path, a, b in moved]
        if bad:
            raise PointError(compose(who, "this is not the point of the linearization", bad, "linearize again there"))

    # what it is -------------------------------------------------------------------------------------------------------
    @property
    def strategy(self) -> str:
        """`"stored"`: products use stored residuals. `"recompute"`: they run the function again and keep nothing."""
        return self._strategy

    @property
    def residual_bytes(self) -> int:
        """Bytes kept beside the point and the function's own constants: 0 where products recompute."""
        return self._program.residual_bytes if self._strategy == STORED else 0

    def __repr__(self) -> str:
        """One line with shapes, never values."""
        inputs, outputs = (_summary(space.avals) for space in (self._program.inputs, self._program.outputs))
        m, n = self.shape
        return f"Linearization({m} x {n}: {inputs} -> {outputs}, {self._strategy} {self.residual_bytes} B)"

    def __reduce__(self) -> Never:
        """Not picklable: compiled programs are not."""
        raise TypeError(
            compose("Linearization", "it cannot be pickled", remedy="pickle the point, and linearize again at it")
        )

    def __copy__(self) -> "Linearization":
        return Linearization(self._data, self._program, self._strategy, checked=self._checked)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Linearization":
        data = jax.tree.map(jnp.copy, self._data)
        return Linearization(data, self._program, self._strategy, checked=self._checked)

    # inside -----------------------------------------------------------------------------------------------------------
    def _verify(self) -> None:
        """Refuse data of other shapes than were traced: a linearization that was made under vmap, used without it."""
        program, data = self._program, self._data
        wanted = [*program.point_types, *(program.residual_types if self._strategy == STORED else ())]
        have = [*data.point, *(data.residuals if self._strategy == STORED else ())]
        for leaf, aval in zip(have, wanted, strict=True):
            if leaf.dtype != aval.dtype:
                what = "its leaves have been cast since it was made"
                line = f"a leaf is {short(leaf)} where the function was linearized at {short(aval)}"
                raise TangentError(compose("linear_fn", what, [line], "linearize at a point of that dtype"))
            if np.shape(leaf) != aval.shape:
                what = "made under jax.vmap (or stacked), and used without it"
                line = f"a leaf is {short(leaf)} where the function was linearized at {short(aval)}"
                raise TangentError(compose("linear_fn", what, [line], "apply it under jax.vmap too"))
        self._checked = True

    def _ready(self, flat: list[Any]) -> tuple[Data, list[Any]]:
        """Data and vector, of one kind where an enclosing shard_map tells devices apart."""
        if not self._checked:
            self._verify()
        data = self._data
        if self._traced is None:
            self._traced = in_trace(*data)
        if self._traced or (flat and isinstance(flat[0], jax.core.Tracer)):
            return self._aligned(flat)
        return data, flat

    def _aligned(self, flat: list[Any]) -> tuple[Data, list[Any]]:
        """Inside shard_map: data as it was traced, the vector varying over the same axes; all over more, if it does."""
        mine = self._program.axes
        extra = frozenset().union(*map(varying_axes, flat)) - mine
        if extra:
            point, constants, residuals = ([vary(leaf, varying_axes(leaf) | extra) for leaf in g] for g in self._data)
            return Data(point, constants, residuals), [vary(leaf, mine | extra) for leaf in flat]
        return self._data, [vary(leaf, mine) for leaf in flat]

    def _watched(
        self,
        entry: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        given: Any = None,
        direction: str = "",
    ) -> Any:
        program = self._program
        work = _work_of_product(program, direction) if direction else None
        return _watch.watched(entry, program.notes.get("function", "?"), run, args, given, work=work)

    def _push(self, tangents: tuple[Any, ...]) -> Any:
        program = self._program
        flat = program.inputs.flatten("linear_fn", tangents)
        return program.outputs.unflatten_with_zeros("linear_fn", self._product("forward", "linear_fn", flat))

    def _pull(self, cotangent: Any) -> tuple[Any, ...]:
        program = self._program
        flat = program.outputs.flatten("linear_fn.transpose", cotangent)
        return program.inputs.unflatten("linear_fn.transpose", self._product("reverse", "linear_fn.transpose", flat))

    def _apply(self, direction: str) -> Callable[[Data, Sequence[Any]], list[Any]]:
        program = self._program
        if self._strategy == STORED:
            return program.push if direction == "forward" else program.pull
        return program.jvp if direction == "forward" else program.vjp

    def _product(self, direction: str, who: str, flat: list[Any]) -> list[Any]:
        data, flat = self._ready(flat)
        if direction == "reverse":
            self._need_reverse(who, data)
        program, key = self._program, (direction, self._strategy)
        product = program.products.get(key)
        if product is None:
            product = program.products[key] = program.prepared(key, self._apply(direction))
        try:  # the hot path: alive() in its own words
            return product(data, flat)
        except (RuntimeError, ValueError):
            return alive(who, product, data, flat)

    def _many(
        self, who: str, tangents: tuple[Any, ...], chunk_size: int | None, memory_budget: int | None, beside: int = 0
    ) -> Any:
        limits = check_chunk_size(who, chunk_size), check_memory_budget(who, memory_budget)
        flat, count = self._program.inputs.flatten_batch(who, tangents)
        outs = self._sweep("forward", who, flat, count, limits, beside)
        return self._program.outputs.unflatten_with_zeros(who, outs, (count,))

    def _transpose_many(
        self, who: str, cotangents: Any, chunk_size: int | None, memory_budget: int | None, beside: int = 0
    ) -> tuple[Any, ...]:
        limits = check_chunk_size(who, chunk_size), check_memory_budget(who, memory_budget)
        flat, count = self._program.outputs.flatten_batch(who, cotangents)
        return self._program.inputs.unflatten(who, self._sweep("reverse", who, flat, count, limits, beside))

    def _products(self, direction: str, who: str, batch: list[Any], count: int) -> list[Any]:
        return self._sweep(direction, who, batch, count, (None, None))

    def _spaces(self) -> tuple[Space, Space]:
        return self._program.inputs, self._program.outputs

    def _is_single(self) -> bool:
        return len(self._program.layout.argnums) == 1

    def _need_reverse(self, who: str, data: Data) -> None:
        if not self._program.can("reverse", data):
            raise mode_error(who, "this function has no reverse direction", self._program, "use forward products")

    def _sweep(
        self,
        direction: str,
        who: str,
        batch: list[Any],
        count: int,
        limits: tuple[int | None, int | None],
        beside: int = 0,
    ) -> list[Any]:
        """Products with every direction of a batch; `beside` are the bytes of what is returned with them."""
        data, batch = self._ready(batch)
        if direction == "reverse":
            self._need_reverse(who, data)
        program = self._program
        apply = program.jvp if direction == "forward" and count >= FUSED and program.fuses else self._apply(direction)
        limit = chunk_limit(bytes_of_direction(program, direction), *limits)
        if limit > 1 and not program.maps(direction, data):
            limit = 1
        ends = (program.inputs, program.outputs) if direction == "forward" else (program.outputs, program.inputs)
        mapped = sweep if program.compiled else sweep_eagerly

        if _watch.here.state.call:
            _watch.admit(_work_of_batch(program, direction, count, limit), beside)

        def run(data: Data, batch: list[Any]) -> list[Any]:
            like = [*data.point, *data.constants, *data.residuals, *batch]
            return mapped(lambda vector: apply(data, vector), from_batch(batch), ends[1].avals, count, limit, like)

        key = ("sweep", direction, self._strategy, count, limit)
        return alive(who, program.run, key, run, data, batch)


def _work_of_product(program: Program, direction: str) -> _watch.Work:
    """One direction in one call."""
    key = ("work of a product", direction)
    known: _watch.Work | None = program.notes.get(key)
    if known is None:
        space = program.outputs if direction == "forward" else program.inputs
        known = program.notes[key] = (1, 1, 1, sum(map(bytes_of, space.avals)))
    return known


def _work_of_batch(program: Program, direction: str, count: int, limit: int) -> _watch.Work:
    """All directions of one call."""
    key = ("work of a batch", direction, count, limit)
    known: _watch.Work | None = program.notes.get(key)
    if known is None:
        chunks, size = balanced(count, limit)
        bytes_of_one = _work_of_product(program, direction)[3]
        known = program.notes[key] = (count, chunks * size, chunks, count * bytes_of_one)
    return known


def _same(mine: Any, theirs: Any) -> bool:
    ours, other = type_of(mine), type_of(theirs)
    if ours is None or other is None:
        return ours is other and type(mine) is type(theirs) and bool(mine == theirs)
    if ours.shape != other.shape or ours.dtype != other.dtype:
        return False
    if is_key(ours):
        return bool(jnp.array_equal(jax.random.key_data(mine), jax.random.key_data(theirs)))
    return bool(jnp.array_equal(mine, theirs, equal_nan=is_inexact(ours)))


def _change(mine: Any, theirs: Any) -> str:
    return "moved" if short(mine) == short(theirs) else f"expected {short(mine)}, got {short(theirs)}"


def _summary(avals: Sequence[Any]) -> str:
    return ", ".join(map(short, avals)) if len(avals) <= 3 else f"{short(avals[0])} and {len(avals) - 1} more"


def _flatten(linear_fn: Linearization) -> tuple[tuple[Any, ...], tuple[Program, str]]:
    return tuple(linear_fn._data), (linear_fn._program, linear_fn._strategy)  # pyright: ignore[reportPrivateUsage]


def _unflatten(static: tuple[Program, str], children: tuple[Any, ...]) -> Linearization:
    return Linearization(Data(*children), *static, checked=False)


jax.tree_util.register_pytree_node(Linearization, _flatten, _unflatten)

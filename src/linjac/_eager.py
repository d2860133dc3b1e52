"""Linearize op by op: for functions that branch in Python on values, and for `jit=False`.

The function is called as it is now, at each linearization; nothing is cached and nothing is compiled. The products
run op by op too. This module must not know the public objects.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac._arguments import TRACED, Call
from linjac._constants import surface
from linjac._kernel import Kernel
from linjac._program import CONTROL_FLOW, Data, Program, input_space, output_space
from linjac._residuals import Source
from linjac._tracing import Output, call_flat
from linjac._tree import in_trace, is_inexact, manual_axes, type_of, vary


class EagerProgram(Program):
    """A function at one point, run op by op. Unlike a traced program it is made anew at every point."""

    compiled = False

    def __init__(self, who: str, call: Call, has_aux: bool) -> None:
        self._who, self._has_aux = who, has_aux
        self._fault = False  # whether the last exception was raised by the function itself
        self.primal: Any = None  # its jaxpr, to name an obstacle by its place
        self._call: Callable[..., Any] = call.target.bind()
        types = [type_of(leaf) for leaf in call.traced]
        self._given = _as_given(call)
        inputs, self.moving = input_space(call, types)
        self._layout = call.layout
        self._inputs = inputs
        self.point_types = tuple(types)

    def finish(self, outs: Sequence[Any], output: Output) -> None:
        """Complete with what the first call of the function returned."""
        space, _ = output_space(output.value, [type_of(out) for out in outs])
        types = self.point_types
        super().__init__(self._layout, self._inputs, space)
        self.point_types = types

    def _split(self, point: Sequence[Any], outputs: list[Output]) -> Callable[..., tuple[list[Any], list[Any]]]:
        def moved(*tangible: Any) -> tuple[list[Any], list[Any]]:
            leaves = [leaf if given is None else given for leaf, given in zip(point, self._given, strict=True)]
            for i, leaf in zip(self.moving, tangible, strict=True):
                leaves[i] = leaf
            try:
                outs, static = call_flat(self._who, self._call, self._layout, self._has_aux, leaves)
            except Exception as err:
                self._fault = not _raised_by_jax(err)
                raise
            outputs.append(static.output)
            return [out for out in outs[: static.output.value.total] if is_inexact(type_of(out))], outs

        return moved

    def linearize(self, point: list[Any]) -> tuple[list[Any], Output, Data]:
        """Value, description of the output, and the stored data."""
        outputs: list[Output] = []
        moved = self._split(point, outputs)
        linear: Any
        if not self.moving:
            inexact, outs = moved()
            zeros = [jnp.zeros_like(out) for out in inexact]
            linear = jax.tree_util.Partial(lambda zeros: zeros, zeros)
        else:
            try:
                _, linear, outs = jax.linearize(moved, *[point[i] for i in self.moving], has_aux=True)
            except Exception as err:
                if self._fault or isinstance(err, CONTROL_FLOW):
                    raise
                # An obstacle to differentiation, or a fault of fun itself: the latter comes again when it is called.
                done = self.evaluate(point)
                self.primal = self._traced(point)
                self.obstacle("linearize", err)
                return done
        self.finish(outs, outputs[-1])
        residuals, treedef = jax.tree_util.tree_flatten(linear)

        def apply(held: list[Any], tangents: list[Any]) -> list[Any]:
            return jax.tree_util.tree_unflatten(treedef, held)(*tangents)

        types = [type_of(leaf) for leaf in residuals]
        traced = jax.make_jaxpr(apply)(types, list(self.inputs.avals))
        jaxpr, captured = surface(traced, [*types, *self.inputs.avals])
        self.kernel = Kernel(jaxpr, self.inputs.avals, self.outputs.avals)
        try:
            captured = self.kernel.lift_constants() + captured
        except Exception as err:
            self.obstacle("reverse", err)
        self._call = _gone  # stored: the function is needed no more, and must not live on in a treedef
        return outs, outputs[-1], Data(point, [], self._store([*captured, *residuals], point))

    def _store(self, residuals: Sequence[Any], point: Sequence[Any]) -> list[Any]:
        """The residuals that are not leaves of the point, each buffer once."""
        known = {id(leaf): Source(False, i) for i, leaf in enumerate(point)}
        fresh: list[Any] = []
        sources: list[Source] = []
        for leaf in residuals:
            if id(leaf) not in known:
                known[id(leaf)] = Source(True, len(fresh))
                fresh.append(leaf)
            sources.append(known[id(leaf)])
        self.sources = tuple(sources)
        self.residual_types = tuple(type_of(leaf) for leaf in fresh)
        return fresh

    def _try(self, direction: str, data: Data) -> bool:
        """Without a linear program the products call the function: JAX says then what it cannot do."""
        if self.kernel is None and "linearize" not in self.obstacles:
            return True
        return super()._try(direction, data)

    def _traced(self, point: Sequence[Any]) -> Any:
        try:
            return jax.make_jaxpr(lambda *leaves: self._split(leaves, [])(*[leaves[i] for i in self.moving])[1])(*point)
        except Exception:
            return None

    def evaluate(self, point: list[Any]) -> tuple[list[Any], Output, Data]:
        """As `linearize`, keeping nothing: products call the function again."""
        outputs: list[Output] = []
        _, outs = self._split(point, outputs)(*[point[i] for i in self.moving])
        self.finish(outs, outputs[-1])
        return outs, outputs[-1], Data(point, [], [])

    def residuals(self, data: Data) -> list[Any]:
        return [data.residuals[index] if fresh else data.point[index] for fresh, index in self.sources]

    def jvp(self, data: Data, tangents: Sequence[Any]) -> list[Any]:
        if not self.moving:
            return [jnp.zeros(aval.shape, aval.dtype) for aval in self.outputs.avals]
        moved = self._split(data.point, [])
        diff = tuple(data.point[i] for i in self.moving)
        return jax.jvp(lambda *tangible: moved(*tangible)[0], diff, tuple(tangents))[1]

    def vjp(self, data: Data, cotangents: Sequence[Any]) -> list[Any]:
        moved = self._split(data.point, [])
        _, pullback, _ = jax.vjp(moved, *[data.point[i] for i in self.moving], has_aux=True)
        return list(pullback(list(cotangents)))


def _as_given(call: Call) -> list[Any]:
    """For each traced leaf the number or NumPy array that was given (inside `jax.jit` it has a value), or None."""
    leaves = jax.tree_util.tree_leaves((call.args, call.kwargs))
    kept = [leaf for leaf, static in zip(leaves, call.layout.statics, strict=True) if static is TRACED]
    return [leaf if isinstance(leaf, float | complex | np.ndarray | np.generic) else None for leaf in kept]


def _raised_by_jax(err: Exception) -> bool:
    """Whether JAX raised this, and not the user's function; the traceback must not be filtered yet."""
    trace = err.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in ("jax", "jaxlib")


def _gone(*_: Any, **__: Any) -> Any:
    raise AssertionError("a stored linearization does not call its function")


class Evaluated(NamedTuple):
    """An eager program with its outputs and data."""

    program: EagerProgram
    outs: list[Any]
    output: Output
    data: Data


def linearize(who: str, call: Call, *, has_aux: bool, stored: bool) -> Evaluated:
    """Linearize op by op; a function that `jax.linearize` refuses keeps nothing."""
    point = [vary(leaf, manual_axes()) for leaf in call.traced]
    program = EagerProgram(who, call._replace(traced=point), has_aux)
    try:
        return Evaluated(program, *(program.linearize(point) if stored else program.evaluate(point)))
    except CONTROL_FLOW as err:
        if in_trace(point):
            err.add_note(f"linjac.{who}: fun needs in Python a value that an enclosing transformation traces")
        raise

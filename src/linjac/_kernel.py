"""The linear program: a jaxpr without constants from residuals and tangents to tangents of the outputs.

Forward products evaluate it, reverse products transpose it. A function with a `custom_vjp` has no forward rule; its
pullback exists and is linear, so its forward products transpose the pullback. Everything here is static; residuals
are arguments.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core.primitives import custom_lin_p

from linjac._constants import Jaxpr, equations, evaluate, place_of, subjaxprs, surface
from linjac._tree import size_of, struct_of

_COLLECTIVES = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all"}
    | {"reduce_scatter", "psum_scatter", "ragged_all_to_all", "pgather"}
)


def collectives(jaxpr: Jaxpr) -> tuple[str, ...]:
    """The collectives over axes that are mapped outside the jaxpr, such as `psum over 'b' at model.py:3`."""
    found: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name"))
            named = [axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if isinstance(axis, str)]
            if named:
                found[f"{eqn.primitive.name} over {', '.join(map(repr, named))} at {place_of(eqn)}"] = None
        elif eqn.primitive.name != "shard_map":  # that one maps its own axes
            for inner in subjaxprs(eqn):
                found.update(dict.fromkeys(collectives(inner)))
    return tuple(found)


class Kernel:
    """The linear program at one signature.

    Arguments of `push` and `pull` are flat: residuals, then the moving leaves of tangents or cotangents.
    """

    def __init__(self, linear: Jaxpr, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        count = len(linear.invars) - len(inputs)
        self.linear = linear
        self.residual_types = [var.aval for var in linear.invars[:count]]
        self._inputs = list(inputs)
        self._outputs = list(outputs)
        self.is_custom = any(eqn.primitive is custom_lin_p for eqn in equations(linear))
        self.primitives = frozenset(eqn.primitive.name for eqn in equations(linear))
        self.collectives = collectives(linear)

    # programs -------------------------------------------------------------------------------------------------------
    @functools.cached_property
    def pushforward(self) -> Jaxpr:
        """(residuals, tangents) -> tangents of the outputs."""
        if not self.is_custom:
            return self.linear
        return self._transposed(self.pullback, self._outputs, self._inputs)

    @functools.cached_property
    def pullback(self) -> Jaxpr:
        """(residuals, cotangents) -> cotangents of the inputs."""
        return self._transposed(self.linear, self._inputs, self._outputs)

    def _transposed(self, jaxpr: Jaxpr, inputs: Sequence[Any], outputs: Sequence[Any]) -> Jaxpr:
        def transposed(residuals: list[Any], vectors: list[Any]) -> list[Any]:
            def forward(*operands: Any) -> list[Any]:
                return evaluate(jaxpr, jaxpr.consts, *residuals, *operands)

            return list(jax.linear_transpose(forward, *map(struct_of, inputs))(list(vectors)))

        return jax.make_jaxpr(transposed)(self.residual_types, list(outputs))

    def lift_constants(self) -> list[Any]:
        """Move the constants that custom backward rules bring along out of the programs; returns them.

        They become the first residuals.
        """
        if not self.is_custom or not self._inputs:
            return []
        pullback = self.pullback
        pullback, lifted = surface(pullback, [*self.residual_types, *self._outputs])
        if not lifted:
            return []
        count = len(lifted)
        self.linear = _with_unused(self.linear, pullback.invars[:count])
        self.residual_types = [*(var.aval for var in pullback.invars[:count]), *self.residual_types]
        self.pullback = pullback
        return lifted

    def maps(self, direction: str) -> bool:
        """Whether `jax.vmap` takes this direction; found by tracing, nothing is computed."""
        product, vectors = (self.push, self._inputs) if direction == "forward" else (self.pull, self._outputs)
        batch = [jax.ShapeDtypeStruct((2, *aval.shape), aval.dtype) for aval in vectors]
        try:
            jax.eval_shape(jax.vmap(product, in_axes=(None, 0)), self.residual_types, batch)
        except Exception:
            return False
        return True

    # products -------------------------------------------------------------------------------------------------------
    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """J v."""
        if not tangents or not self._outputs:
            return [jax.numpy.zeros(out.shape, out.dtype) for out in self._outputs]
        program = self.pushforward
        return evaluate(program, program.consts, *residuals, *tangents)

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Jᵀ c."""
        if not any(map(size_of, self._inputs)) or not any(map(size_of, self._outputs)):
            return [jax.numpy.zeros(into.shape, into.dtype) for into in self._inputs]
        program = self.pullback
        return evaluate(program, program.consts, *residuals, *cotangents)


def _with_unused(jaxpr: Jaxpr, variables: Sequence[Any]) -> Jaxpr:
    """The jaxpr with leading arguments that it does not read."""

    def widened(extra: list[Any], args: list[Any]) -> list[Any]:
        del extra
        return evaluate(jaxpr, jaxpr.consts, *args)

    return jax.make_jaxpr(widened)([var.aval for var in variables], [var.aval for var in jaxpr.invars])

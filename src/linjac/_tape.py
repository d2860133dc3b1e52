"""Run a jaxpr on values and write down every equation: one straight list of steps, without nested programs.

Calls, loops and branches are opened, so that a step inside a loop stands there once for each turn. Rules of the user's
stay one step. This module must not know what is looked for on the tape.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from linjac._constants import Jaxpr, equations, evaluate, place_of, scan_counts, single, subjaxprs
from linjac._tree import is_inexact, type_of

LIMIT = 20_000  # steps of one tape; a loop that would make it longer stays one step

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_vmap_call"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})


class Context(NamedTuple):
    """Where a nested program stands."""

    line: str = ""  # the line of the call, where the program is a function of JAX's own
    turns: tuple[str, ...] = ()

    def turn(self, number: int, loop: str) -> "Context":
        """One turn of a loop in here."""
        return self._replace(turns=(*self.turns, f"turn {number} of a {loop}"))


_JAX = os.path.dirname(jax.__file__)


def _is_of_jax(jaxpr: Jaxpr) -> bool:
    """Whether a program was traced from a function of JAX's own: traced once, its lines are those of the first call."""
    info = getattr(jaxpr, "debug_info", None)
    return _JAX in str(getattr(info, "func_src_info", None) or "")


class Step(NamedTuple):
    """One equation at the values that reached it."""

    eqn: Any
    run: Callable[..., list[Any]]  # the equation as a function of its operands
    operands: list[Any]
    outs: list[Any]
    sources: list[int | None]  # numbers of the operands on the tape, None for a constant
    targets: list[int]  # numbers of the outs
    context: Context
    helper: bool = False  # takes a slice for a turn of a scan, or stacks what the turns gave

    @property
    def name(self) -> str:
        """The primitive, and for a rule of the user's the function that it belongs to."""
        name, owner = self.eqn.primitive.name, self.owner.partition(" at ")[0]
        return f"{name} of {owner}" if owner else name

    @property
    def owner(self) -> str:
        """`function at file:line` of a function with a rule of its own; empty for any other equation."""
        if self.eqn.primitive.name not in CUSTOM:
            return ""
        info = getattr(self.eqn.params["call_jaxpr"], "debug_info", None)
        return str(getattr(info, "func_src_info", None) or "")

    @property
    def place(self) -> str:
        """`file:line (function)`, and the turns of loops."""
        return ", ".join([self.line, *self.context.turns])

    @property
    def line(self) -> str:
        """`file:line (function)`."""
        known = self.context.line or place_of(self.eqn)
        return known or self.owner.partition(" at ")[2] or "the function itself"


class Tape:
    """The steps of one run."""

    def __init__(self, jaxpr: Jaxpr, args: Sequence[Any]) -> None:
        self.steps: list[Step] = []
        self.count = 0
        self.inputs = [self._number() for _ in args]
        outs = self._play(jaxpr, list(zip(args, self.inputs, strict=True)), Context())
        self.outputs = [value for value, _ in outs]
        self.output_numbers = [number for _, number in outs]

    def _number(self) -> int:
        self.count += 1
        return self.count - 1

    def _play(self, jaxpr: Jaxpr, args: Sequence[tuple[Any, int | None]], context: Context) -> list[Any]:
        """Run a jaxpr; arguments and results are pairs of a value and its number."""
        known: dict[Any, tuple[Any, int | None]] = {}
        known.update((var, (value, None)) for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(var: Any) -> tuple[Any, int | None]:
            return (var.val, None) if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            operands = [read(var) for var in eqn.invars]
            opener = self._opener(eqn, operands)
            outs = (opener or functools.partial(self._single, jaxpr))(eqn, operands, context)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _opener(self, eqn: Any, operands: list[Any]) -> Callable[..., list[Any]] | None:
        name = eqn.primitive.name
        if name in _CALLS and _inner(eqn) is not None:
            return self._call
        if name == "cond":
            return self._cond
        if name == "scan" and eqn.params["length"] * _length(eqn.params["jaxpr"]) <= self._left:
            return self._scan
        if name == "while":
            trips = _trips(eqn, [value for value, _ in operands], self._left)
            return None if trips is None else functools.partial(self._while, trips)
        return None

    @property
    def _left(self) -> int:
        return LIMIT - len(self.steps)

    # one step ---------------------------------------------------------------------------------------------------------
    def _single(self, jaxpr: Jaxpr, eqn: Any, operands: list[Any], context: Context) -> list[Any]:
        return self._write(eqn, single(jaxpr, eqn), operands, context)

    def _write(
        self,
        eqn: Any,
        run: Callable[..., list[Any]],
        operands: list[Any],
        context: Context,
        *,
        helper: bool = False,
    ) -> list[Any]:
        values = [value for value, _ in operands]
        outs = run(*values)
        numbers = [self._number() for _ in outs]
        sources = [number for _, number in operands]
        self.steps.append(Step(eqn, run, values, outs, sources, numbers, context, helper))
        return list(zip(outs, numbers, strict=True))

    # nested programs --------------------------------------------------------------------------------------------------
    def _call(self, eqn: Any, operands: list[Any], context: Context) -> list[Any]:
        inner = _inner(eqn)
        assert inner is not None
        if not context.line and _is_of_jax(inner):
            context = context._replace(line=place_of(eqn))
        return self._play(inner, operands, context)

    def _cond(self, eqn: Any, operands: list[Any], context: Context) -> list[Any]:
        branches = eqn.params["branches"]
        taken = min(max(int(operands[0][0]), 0), len(branches) - 1)
        return self._play(branches[taken], operands[1:], context)

    def _scan(self, eqn: Any, operands: list[Any], context: Context) -> list[Any]:
        consts, carried = scan_counts(eqn)
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        held, state, rows = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
        stacks: list[list[Any]] = []
        for turn in range(length)[:: -1 if eqn.params["reverse"] else 1]:
            slices = [self._write(eqn, functools.partial(_slice, turn), [row], context, helper=True)[0] for row in rows]
            outs = self._play(body, [*held, *state, *slices], context.turn(turn, "scan"))
            state = outs[:carried]
            stacks.append(outs[carried:])
        if eqn.params["reverse"]:
            stacks.reverse()
        types = [var.aval for var in eqn.outvars[carried:]]
        stacked = [
            self._write(eqn, functools.partial(_stack, aval), [row[k] for row in stacks], context, helper=True)[0]
            for k, aval in enumerate(types)
        ]
        return [*state, *stacked]

    def _while(self, trips: int, eqn: Any, operands: list[Any], context: Context) -> list[Any]:
        ahead, behind = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        held, state = operands[ahead : ahead + behind], operands[ahead + behind :]
        for turn in range(trips):
            state = self._play(eqn.params["body_jaxpr"], [*held, *state], context.turn(turn, "while_loop"))
        return state


def _inner(eqn: Any) -> Any:
    """The program of a call, or None."""
    return next(subjaxprs(eqn), None)


def _length(jaxpr: Jaxpr) -> int:
    return sum(1 for _ in equations(jaxpr)) + 1


def _trips(eqn: Any, values: list[Any], left: int) -> int | None:
    """How often a while loop turns; None where that is too often to write down."""
    ahead, behind = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    most = left // _length(body)

    def count(state: Any) -> Any:
        return state[0] + 1, evaluate(body, body.consts, *values[ahead : ahead + behind], *state[1])

    def go(state: Any) -> Any:
        more = evaluate(cond, cond.consts, *values[:ahead], *state[1])[0]
        return jnp.logical_and(more, state[0] <= most)

    trips = int(jax.lax.while_loop(go, count, (jnp.zeros((), jnp.int32), values[ahead + behind :]))[0])
    return trips if trips <= most else None


def _slice(turn: int, row: Any) -> list[Any]:
    return [row[turn]]


def _stack(aval: Any, *rows: Any) -> list[Any]:
    return [jnp.stack(rows) if rows else jnp.zeros(aval.shape, aval.dtype)]


# derivatives of one step ----------------------------------------------------------------------------------------------
def moves(value: Any) -> bool:
    """Whether a value has a tangent of its own."""
    aval = type_of(value)
    return aval is not None and hasattr(aval, "dtype") and is_inexact(aval)


def active_steps(tape: Tape, moving: Sequence[int]) -> tuple[set[int], list[Step]]:
    """The numbers of what depends on the moving inputs, and the steps through which it does."""
    active = set(moving)
    steps: list[Step] = []
    for step in tape.steps:
        if any(number in active for number in step.sources):
            steps.append(step)
            active.update(n for n, out in zip(step.targets, step.outs, strict=True) if moves(out))
    return active, steps


class Local:
    """One step as a function of the operands that move, to the outs that can."""

    def __init__(self, step: Step, active: set[int]) -> None:
        self.step = step
        self.ins = [i for i, n in enumerate(step.sources) if n in active and moves(step.operands[i])]
        self.outs = [i for i, out in enumerate(step.outs) if moves(out)]
        self.point = [step.operands[i] for i in self.ins]

    def call(self, *point: Any) -> list[Any]:
        """The outs that can move."""
        operands = list(self.step.operands)
        for i, value in zip(self.ins, point, strict=True):
            operands[i] = value
        outs = self.step.run(*operands)
        return [outs[i] for i in self.outs]

    def push(self, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Outs and their tangents."""
        return jax.jvp(self.call, tuple(self.point), tuple(tangents))

    def pull(self, cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Outs and the cotangents of the operands."""
        outs, pullback = jax.vjp(self.call, *self.point)
        return outs, list(pullback(list(cotangents)))


def finite(value: Any) -> bool:
    """Whether a value has neither NaN nor infinities (one that cannot have any has none)."""
    if not moves(value):
        return True
    array = np.asarray(value)
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return bool(np.isfinite(wide).all())

"""Where NaN or infinity begins: on the values of a tape, on tangents pushed along it, on cotangents pulled back.

Going back from a result that is not finite, an equation is to blame where it stays so with its operands made finite.
This module must not know how a tape was recorded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from linjac._tape import Local, Step, Tape, finite, moves
from linjac._tree import short


class Found(NamedTuple):
    """An equation to blame."""

    kind: str
    equation: str
    place: str
    detail: str


# a step run again: from the operands by position (None where there is nothing) to the outs by position
type Again = Callable[[Step, dict[int, Any]], list[Any]]


def _report(kind: str, step: Step, out: Any, why: str) -> Found:
    array = np.asarray(out)
    wide = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    bad = ~np.isfinite(wide)
    count = f"{int(bad.sum())} of {bad.size} elements" if bad.size > 1 else "it"
    verb = "are" if bad.sum() > 1 else "is"
    word = "NaN" if np.isnan(wide).any() else "infinite"
    if np.isnan(wide).any() and np.isinf(wide).any():
        word = "NaN or infinite"
    owner = f"; the rule is of {step.owner}" if step.owner and kind != "value" else ""
    return Found(kind, step.name, step.place, f"{short(out)}: {count} {verb} {word}, {why}{owner}")


def _cleaned(value: Any) -> Any:
    return jnp.where(jnp.isfinite(value), value, jnp.ones_like(value))


def origin(tape: Tape, number: int, known: Mapping[int, Any], again: Again) -> tuple[Step | None, int, bool]:
    """From a number whose quantity is not finite back to the step where that began.

    Returns:
        The step (None for an input), the number, and whether a constant of the program is to blame.
    """
    producers = {target: step for step in tape.steps for target in step.targets}
    while number in producers:
        step = producers[number]
        place = step.targets.index(number)
        given = _operands(step, known)
        bad = [i for i, value in given.items() if not finite(value)]
        everything = {**given, **{i: _cleaned(given[i]) for i in bad}}
        if not bad or not finite(again(step, everything)[place]):
            return step, number, False
        alone = (i for i in bad if finite(again(step, {**given, i: _cleaned(given[i])})[place]))
        cause = next(alone, bad[0])
        source = step.sources[cause]
        if source is None:
            return step, number, True
        number = source
    return None, number, False


def _operands(step: Step, known: Mapping[int, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for i, source in enumerate(step.sources):
        value = known.get(source) if source is not None else None
        if value is not None:
            found[i] = value
    return found


# values ---------------------------------------------------------------------------------------------------------------
def bad_value(tape: Tape, args: Sequence[Any], names: Mapping[int, str]) -> Found | None:
    """The step where the first output that is not finite became so."""
    bad = [n for n, value in zip(tape.output_numbers, tape.outputs, strict=True) if not finite(value)]
    if not bad or bad[0] is None:
        return None
    known = dict(zip(tape.inputs, args, strict=True))
    for step in tape.steps:
        known.update(zip(step.targets, step.outs, strict=True))

    def again(step: Step, given: dict[int, Any]) -> list[Any]:
        return step.run(*[given.get(i, value) for i, value in enumerate(step.operands)])

    step, number, _ = origin(tape, bad[0], known, again)
    if step is None:
        name = names.get(number, "an argument")
        return Found("value", "no equation", name, f"{short(known[number])}: the argument itself is not finite")
    inner = _inside(step)
    if inner is not None:
        return inner
    return _report("value", step, known[number], _why(step))


def _why(step: Step) -> str:
    operands = [value for value in step.operands if moves(value)]
    if all(map(finite, operands)):
        return "and all its operands are finite"
    return "and it would not be finite for finite operands either, or an operand is a constant that is not"


def _inside(step: Step) -> Found | None:
    """The equation inside a function with a rule of its own."""
    inner = step.eqn.params.get("call_jaxpr")
    if step.helper or not hasattr(inner, "eqns") or not all(map(finite, step.operands)):
        return None
    return bad_value(Tape(inner, step.operands), step.operands, {})


# tangents -------------------------------------------------------------------------------------------------------------
def bad_tangent(tape: Tape, steps: Sequence[Step], active: set[int], direction: Mapping[int, Any]) -> Found | None:
    """The step where the first tangent that is not finite began; nothing where a step cannot be pushed through."""
    known = dict(direction)
    locals_: dict[int, Local] = {}
    for step in steps:
        local = locals_[id(step)] = Local(step, active)
        if not local.ins or not local.outs:
            continue
        try:
            pushed = local.push([_tangent(known, step, i) for i in local.ins])[1]
        except Exception:  # no forward rule, as for custom_vjp
            return None
        known.update({step.targets[i]: out for i, out in zip(local.outs, pushed, strict=True)})
    bad = [n for n in tape.output_numbers if n is not None and n in known and not finite(known[n])]
    if not bad:
        return None

    def again(step: Step, given: dict[int, Any]) -> list[Any]:
        local = locals_[id(step)]
        tangents = [given[i] if i in given else jnp.zeros_like(step.operands[i]) for i in local.ins]
        pushed = dict(zip(local.outs, local.push(tangents)[1], strict=True))
        return [pushed.get(i) for i in range(len(step.outs))]

    step, number, _ = origin(tape, bad[0], known, again)
    if step is None:
        return None
    return _report("tangent", step, known[number], "for finite tangents of its operands")


def _tangent(known: Mapping[int, Any], step: Step, place: int) -> Any:
    source = step.sources[place]
    found = known.get(source) if source is not None else None
    return jnp.zeros_like(step.operands[place]) if found is None else found


# cotangents -----------------------------------------------------------------------------------------------------------
def bad_cotangent(tape: Tape, steps: Sequence[Step], active: set[int], cotangents: Mapping[int, Any]) -> Found | None:
    """The step in whose transpose the first cotangent that is not finite arises, if an input's is not finite."""
    known = dict(cotangents)
    first: Found | None = None
    for step in reversed(steps):
        local = Local(step, active)
        given = [known.get(step.targets[i]) for i in local.outs]
        if not local.ins or all(cotangent is None for cotangent in given):
            continue
        filled = [jnp.zeros_like(step.outs[i]) if c is None else c for i, c in zip(local.outs, given, strict=True)]
        try:
            pulled = local.pull(filled)[1]
        except Exception:  # no reverse rule
            return None
        for i, cotangent in zip(local.ins, pulled, strict=True):
            if first is None and all(map(finite, filled)) and not finite(cotangent):
                first = _report("cotangent", step, cotangent, "for finite cotangents of its results")
            source = step.sources[i]
            assert source is not None
            before = known.get(source)
            known[source] = cotangent if before is None else before + cotangent
    bad = any(not finite(known[number]) for number in tape.inputs if number in known)
    return first if bad else None

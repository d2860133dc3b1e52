"""Bring the constants of a jaxpr to the surface, so that programs can take them as arguments.

JAX hoists what a loop or a branch closes over, but a nested `jax.jit` keeps its constants inside: they would be baked
into every program made from it, and copied into residuals. Such calls are inlined, and the loops, branches and rules
around them are traced again through JAX's public functions. Nothing here may change what the jaxpr computes, or touch
a part of it that holds no hidden constant.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.source_info_util
from jax import lax
from jax.extend.core import Literal

type Jaxpr = Any  # jax.extend.core.Jaxpr: since JAX 0.11 open and closed jaxprs are one class

evaluate = jax.core.eval_jaxpr


def subjaxprs(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of one equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield item


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation, those of nested jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from equations(inner)


jax.extend.source_info_util.register_exclusion(os.path.dirname(__file__))  # places are in the user's code


def place_of(eqn: Any) -> str:
    """`file:line (function)` of an equation, in the user's code."""
    return jax.extend.source_info_util.summarize(eqn.source_info)


def _hides(jaxpr: Jaxpr) -> bool:
    return any(inner.consts or _hides(inner) for eqn in jaxpr.eqns for inner in subjaxprs(eqn))


def surface(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """A jaxpr without constants and the constants, which are its new leading arguments.

    `args` are values (or types) of the jaxpr's own arguments.
    """
    if not _hides(jaxpr):
        constants = list(jaxpr.consts)
        return jaxpr.replace(consts=None), constants
    opened = jax.make_jaxpr(functools.partial(_open, jaxpr))(*args)
    return opened.replace(consts=None), list(opened.consts)


def _open(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate, with everything that hides constants opened."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else values[var]

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        inner = list(subjaxprs(eqn))
        hidden = any(sub.consts or _hides(sub) for sub in inner)
        opener = _OPENERS.get(eqn.primitive.name) if hidden else None
        outs = opener(eqn, operands) if opener is not None else None
        if outs is None:
            outs = single(jaxpr, eqn)(*operands)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def single(jaxpr: Jaxpr, eqn: Any) -> Callable[..., list[Any]]:
    """One equation as a function of its operands."""
    variables = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, Literal)))
    alone = jaxpr.replace(consts=[], constvars=[], eqns=[eqn], invars=variables, outvars=list(eqn.outvars))

    def run(*operands: Any) -> list[Any]:
        given = {var: value for var, value in zip(eqn.invars, operands, strict=True) if not isinstance(var, Literal)}
        return evaluate(alone, [], *[given[var] for var in variables])

    return run


def _open_jit(eqn: Any, operands: list[Any]) -> list[Any] | None:
    shardings = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None  # inlining would lose what the user said about placement
    return _open(eqn.params["jaxpr"], *operands)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Number of loop-invariant operands and of carried ones of a scan."""
    consts, carry, _ = (len(part) for part in eqn.params["ft_in"].unpack())
    return consts, carry


def _open_scan(eqn: Any, operands: list[Any]) -> list[Any]:
    consts, carry = scan_counts(eqn)
    body = eqn.params["jaxpr"]

    def step(state: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _open(body, *operands[:consts], *state, *xs)
        return outs[:carry], outs[carry:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    init, xs = operands[consts : consts + carry], operands[consts + carry :]
    state, stacked = lax.scan(step, init, xs, **options)
    return [*state, *stacked]


def _open_while(eqn: Any, operands: list[Any]) -> list[Any]:
    ahead, behind = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return lax.while_loop(
        lambda state: _open(cond, *operands[:ahead], *state)[0],
        lambda state: _open(body, *operands[ahead : ahead + behind], *state),
        operands[ahead + behind :],
    )


def _open_cond(eqn: Any, operands: list[Any]) -> list[Any]:
    branches = [functools.partial(_open, branch) for branch in eqn.params["branches"]]
    return list(lax.switch(operands[0], branches, *operands[1:]))


def _open_remat(eqn: Any, operands: list[Any]) -> list[Any]:
    inner = functools.partial(_open, eqn.params["jaxpr"])
    options = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
    return list(jax.checkpoint(inner, **options)(*operands))


def _open_custom_jvp(eqn: Any, operands: list[Any]) -> list[Any]:
    """The primal opened; the rule stays the user's own, reached by differentiating the original equation."""
    opened = jax.custom_jvp(functools.partial(_open, eqn.params["call_jaxpr"]))
    opened.defjvp(lambda primals, tangents: jax.jvp(_alone(eqn), primals, tangents))
    return list(opened(*operands))


def _open_custom_vjp(eqn: Any, operands: list[Any]) -> list[Any]:
    opened = jax.custom_vjp(functools.partial(_open, eqn.params["call_jaxpr"]))
    opened.defvjp(lambda *primals: jax.vjp(_alone(eqn), *primals), lambda pullback, cotangents: pullback(cotangents))
    return list(opened(*operands))


def _alone(eqn: Any) -> Callable[..., list[Any]]:
    inner = eqn.params["call_jaxpr"]
    return single(inner, eqn)


_OPENERS: dict[str, Callable[[Any, list[Any]], list[Any] | None]] = {
    "jit": _open_jit,
    "scan": _open_scan,
    "while": _open_while,
    "cond": _open_cond,
    "remat2": _open_remat,
    "checkpoint": _open_remat,
    "custom_jvp_call": _open_custom_jvp,
    "custom_vjp_call": _open_custom_vjp,
}

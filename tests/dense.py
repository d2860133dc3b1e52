"""What the Jacobian of a scenario is as a whole (tree, shapes, dtypes, entries), and counters of calls and compiles.

References come from the closed forms of `scenarios.py` and from plain JAX; nothing here knows how linjac works.
"""

import itertools
import math
import types
from contextlib import contextmanager

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np

from scenarios import as_numpy, is_moving

_COMPILE = "/jax/core/compile/backend_compile_duration"
_compiles = [0]
_numbers = itertools.count()


def _count(event, duration, **_):
    del duration
    _compiles[0] += event == _COMPILE


jax.monitoring.register_event_duration_secs_listener(_count)


@contextmanager
def compiles(at_most):
    """Assert that no more than this many programs are compiled inside."""
    before = _compiles[0]
    yield
    assert _compiles[0] - before <= at_most, f"{_compiles[0] - before} compiles, {at_most} allowed"


class Counted:
    """A function that counts its calls; each instance has a plain function of its own as `fun`."""

    def __init__(self, fun):
        self.calls = 0

        def counted(*args, **kwargs):
            self.calls += 1
            return fun(*args, **kwargs)

        # Code of its own: linjac warns when one code location makes function after function.
        code = counted.__code__.replace(co_name=f"counted_{next(_numbers)}")
        self.fun = types.FunctionType(code, globals(), closure=counted.__closure__)


def promoted(out, into):
    """The dtype of a block: standard promotion of the output and the input leaf."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(jnp.result_type(out), jnp.result_type(into))


def settings_of(scenario):
    """The keyword arguments that `linjac.jacobian` needs for this scenario; integer arguments are left out."""
    if scenario.argnums is not None:
        found = {"argnums": scenario.argnums}
    else:
        kept = [i for i, x in enumerate(scenario.primals) if any(map(is_moving, jax.tree.leaves(x)))]
        found = {"argnums": tuple(kept)} if len(kept) > 1 else {}
    if scenario.has_aux:
        found["has_aux"] = True
    ends = [any(map(np.iscomplexobj, jax.tree.leaves(moving_of(t)))) for t in (scenario.inputs, scenario.value)]
    return found | ({"holomorphic": True} if all(ends) else {})


def moving_of(tree):
    """The leaves that can move."""
    return [x for x in jax.tree.leaves(tree) if is_moving(x)]


def inputs_of(scenario):
    """The inputs inside a block: a tree for one integer in argnums, else a tuple of trees."""
    argnums = settings_of(scenario).get("argnums", 0)
    if isinstance(argnums, int):
        return scenario.primals[argnums]
    return tuple(scenario.primals[i] for i in argnums)


def exact(scenario, moving=None):
    """The dense Jacobian by the closed form, in the convention of jacrev, or of jacfwd from real to complex."""
    n, m = (sum(np.size(x) for x in moving_of(t)) for t in (scenario.inputs, scenario.value))
    if any(map(np.iscomplexobj, moving_of(scenario.value))):
        return np.reshape(scenario.push(np.eye(n), moving), (n, m)).T
    return np.reshape(scenario.pull(np.eye(m), moving), (m, n))


def matrix_of(jac, value, inputs, batch=()):
    """The dense matrix of a tree of blocks, after checking its structure, shapes and dtypes."""
    inner = jax.tree.map(lambda x: x if is_moving(x) else None, inputs)
    want = jax.tree.map(lambda _: inner, value)
    assert jax.tree.structure(jac) == jax.tree.structure(want)
    outs, ins = moving_of(value), moving_of(inputs)
    leaves = iter(jax.tree.leaves(jac))
    rows = []
    for out in outs:
        row = []
        for into in ins:
            block = next(leaves)
            assert isinstance(block, jax.Array)
            assert block.shape == (*batch, *np.shape(out), *np.shape(into))
            assert block.dtype == promoted(out, into)
            row.append(as_numpy(block).reshape(*batch, np.size(out), np.size(into)))
        rows.append(np.concatenate(row, axis=-1))
    return np.concatenate(rows, axis=-2)


def finite_differences(fun, moving, step=1e-6):
    """The dense Jacobian of a function of arrays by central differences; d/dz = (d/dx - i d/dy) / 2 or jacrev's."""

    def flat(arrays):
        return np.concatenate([np.zeros(0), *[as_numpy(x).ravel() for x in fun(*arrays)]])

    def slope(place, index, direction):
        def at(sign):
            changed = [np.array(x) for x in moving]
            changed[place][index] += sign * step * direction
            return flat([jnp.asarray(x) for x in changed])

        return (at(1) - at(-1)) / (2 * step)

    columns = []
    for place, x in enumerate(moving):
        for index in np.ndindex(*np.shape(x)):
            column = slope(place, index, 1.0)
            if np.iscomplexobj(x) and not np.iscomplexobj(column):
                column = column - 1j * slope(place, index, 1j)
            columns.append(column)
    return np.stack(columns, axis=1) if columns else np.zeros((flat(moving).size, 0))


def largest(jaxpr):
    """The largest number of elements of any value in a jaxpr, sub-jaxprs included, constants too."""
    found = [math.prod(np.shape(c)) for c in getattr(jaxpr, "consts", ())]
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in inner.eqns:
        found += [math.prod(var.aval.shape) for var in (*eqn.invars, *eqn.outvars) if hasattr(var.aval, "shape")]
        found += [
            largest(sub) for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr) if _is_jaxpr(sub)
        ]
    return max(found, default=0)


def _is_jaxpr(value):
    return hasattr(value, "eqns")

"""What a type checker infers of the public functions: checked by pyright, never run."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import linjac


def fun(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


x = jnp.ones(3)

value, linear_fn = linjac.linearize_many(fun, x)
assert_type(linear_fn, linjac.Linearization)
assert_type(linjac.linearize_many(fun, x, has_aux=True), tuple[Any, linjac.Linearization, Any])
assert_type(linear_fn.transpose(x), tuple[Any, ...])
assert_type(linear_fn.transpose_many(x), tuple[Any, ...])
assert_type(linear_fn.primals, tuple[Any, ...])
assert_type(linear_fn.shape, tuple[int, int])
assert_type(linear_fn.matvec(x), jax.Array)
assert_type(linear_fn.as_matrix(), jax.Array)
assert_type(linear_fn.residual_bytes, int)
assert_type(linjac.residual_bytes(fun, x), int)

assert_type(linjac.jacobian(fun), Callable[..., Any])
assert_type(linjac.plan_jacobian(fun), Callable[..., linjac.JacobianPlan])
plan = linjac.plan_jacobian(fun)(x)
assert_type(plan.rows, tuple[str, ...])
assert_type(plan.compile(), int)
linjac.jacobian(fun, mode=plan)

with linjac.Monitor(max_directions=8) as monitor:
    assert_type(monitor, linjac.Monitor)
assert_type(monitor.start(), linjac.Monitor)
assert_type(monitor.snapshot(), dict[str, Any])

"""Families of functions with any number of inputs and outputs: float32, closed over their weights.

`FAMILIES[name](n, m)` is a function and a point; sizes are rounded where the family needs it. `NAMED` are fixed
problems.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Problem = tuple[Callable[[jax.Array], jax.Array], jax.Array]


def _weights(seed: int) -> Callable[..., jax.Array]:
    draw = np.random.default_rng(seed).standard_normal

    def normal(*shape: int, scale: float | None = None) -> jax.Array:
        return jnp.asarray(draw(shape) / math.sqrt(scale or shape[0]), jnp.float32)

    return normal


def dense(*widths: int) -> Problem:
    """A tanh network that ends in a matrix product."""
    normal = _weights(1)
    layers = [normal(a, b) for a, b in itertools.pairwise(widths)]

    def fun(x: jax.Array) -> jax.Array:
        for w in layers[:-1]:
            x = jnp.tanh(x @ w)
        return x @ layers[-1]

    return fun, normal(widths[0], scale=1)


def convolution(n: int, m: int) -> Problem:
    """Three 3 x 3 convolutions on a 16 x 16 image between two matrices."""
    normal = _weights(2)
    first, last = normal(n, 256), normal(256, m)
    kernels = [normal(3, 3, 1, 8, scale=9), normal(3, 3, 8, 8, scale=72), normal(3, 3, 8, 1, scale=72)]

    def fun(x: jax.Array) -> jax.Array:
        image = (x @ first).reshape(1, 16, 16, 1)
        for kernel in kernels:
            image = jnp.tanh(
                lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return image.reshape(-1) @ last

    return fun, normal(n, scale=1)


def recurrence(n: int, m: int, steps: int = 16, width: int = 64) -> Problem:
    """A tanh recurrence from sequence to sequence, under scan."""
    normal = _weights(3)
    into, out = max(1, round(n / steps)), max(1, round(m / steps))
    u, r, o = normal(into, width), normal(width, width), normal(width, out)

    def fun(x: jax.Array) -> jax.Array:
        def step(state: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(z @ u + state @ r)
            return state, state @ o

        return lax.scan(step, jnp.zeros(width, jnp.float32), x.reshape(steps, into))[1].reshape(-1)

    return fun, normal(steps * into, scale=1)


def runge_kutta(n: int, m: int, steps: int = 20, width: int = 64, *, powers: bool = False) -> Problem:
    """Encode, integrate an ODE by RK4 under scan, decode; with `powers` the cube is written as one."""
    normal = _weights(4)
    p, a, q = normal(n, width), normal(width, width), normal(width, m)

    def field(u: jax.Array) -> jax.Array:
        return jnp.tanh(u @ a) - 0.5 * (u**3 if powers else u * u * u)

    def fun(x: jax.Array) -> jax.Array:
        def step(u: jax.Array, _: None) -> tuple[jax.Array, None]:
            k1 = field(u)
            k2 = field(u + 0.025 * k1)
            k3 = field(u + 0.025 * k2)
            k4 = field(u + 0.05 * k3)
            return u + 0.05 / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return lax.scan(step, jnp.tanh(x @ p), None, length=steps)[0] @ q

    return fun, normal(n, scale=1)


def matrix_between(n: int, m: int) -> Problem:
    """Elementwise, a matrix, elementwise, and a factor that reads every input."""
    normal = _weights(5)
    a = normal(m, n, scale=n)
    return lambda x: jnp.tanh(a @ jnp.sin(x)) * jnp.exp(-jnp.mean(x**2)), normal(n, scale=1)


def outer_product(n: int, m: int) -> Problem:
    """Sums over an outer product: dense, elementwise, then a reduction."""
    normal = _weights(6)
    a = normal(m, n, scale=1)
    return lambda x: jnp.sum(jnp.tanh(a * x[None, :]) * jnp.exp(-(x[None, :] ** 2)), 1), normal(n, scale=1)


def elementwise(n: int) -> Problem:
    """No two inputs meet."""
    return lambda x: jnp.sin(x) * jnp.exp(-(x**2)), _weights(7)(n, scale=1)


def stencil(side: int) -> Problem:
    """Five-point nonlinear diffusion on a periodic grid."""

    def fun(x: jax.Array) -> jax.Array:
        u = x.reshape(side, side)
        laplacian = sum(jnp.roll(u, shift, axis) for shift in (-1, 1) for axis in (0, 1)) - 4 * u
        return (u + 0.1 * laplacian * jnp.exp(-(u**2))).reshape(-1)

    return fun, _weights(8)(side * side, scale=1)


def visibilities() -> Problem:
    """Phases of 10 sources on 128 baselines and 16 channels: 20 inputs, 20,480 outputs."""
    normal = _weights(9)
    uvw, freq = normal(128, 3, scale=1), jnp.linspace(0.8, 1.7, 16, dtype=jnp.float32)

    def fun(lm: jax.Array) -> jax.Array:
        east, north = lm[:, 0, None, None], lm[:, 1, None, None]
        up = jnp.sqrt(1.0 - east**2 - north**2) - 1.0
        u, v, w = (uvw[None, :, i, None] for i in range(3))
        return (u * east + v * north + w * up) * freq

    return fun, normal(10, 2, scale=100)


FAMILIES: dict[str, Callable[[int, int], Problem]] = {
    "dense": lambda n, m: dense(n, 128, 128, 128, m),
    "convolution": convolution,
    "recurrence": recurrence,
    "runge_kutta": runge_kutta,
    "matrix_between": matrix_between,
    "outer_product": outer_product,
}

NAMED: dict[str, Callable[[], Any]] = {
    "tall_8_2048": functools.partial(dense, 8, 128, 128, 128, 2048),
    "tall_16_1024": functools.partial(dense, 16, 128, 128, 128, 1024),
    "tall_32_512": functools.partial(dense, 32, 128, 128, 128, 512),
    "mlp_256": functools.partial(dense, 256, 256, 256),
    "mlp_deep_256": functools.partial(dense, 256, 256, 256, 256, 256, 256),
    "rk4_256": functools.partial(runge_kutta, 256, 256, powers=True),
    "elementwise_1000": functools.partial(elementwise, 1000),
    "elementwise_8": functools.partial(elementwise, 8),
    "stencil_32": functools.partial(stencil, 32),
    "visibilities": visibilities,
    "dense_4096": functools.partial(dense, 4096, 4096, 4096),
}

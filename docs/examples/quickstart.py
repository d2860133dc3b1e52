"""Watch a small network learn, through one linearization per diagnostic step; then ask how close it is to a mistake.

A two-layer tanh network learns the 1,797 handwritten digits that ship with scikit-learn. Every few steps the outputs of
the current mini-batch are linearized once, at the current parameters, and everything in a table row comes from that one
linearization:

- what the optimizer's update should do to the outputs (one directional derivative), against what it did;
- how much of that the linear picture missed;
- how far the outputs move per unit of movement in each layer (16 random directions a layer).

The images go in as an argument that is not differentiated (`argnums=0` means "the parameters only"), so a new
mini-batch costs no new trace and no new compilation.

After training, the Jacobian of the ten class scores with respect to the 64 pixels says, for ten digits that the network
has not seen, which other class is closest, and how far the pixels have to move to get there. linjac prints how it
computes that Jacobian, and why.

Run it from the root of the repository: `python docs/examples/quickstart.py`.
"""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits

import linjac

HIDDEN = 64
BATCH = 256
HELD_OUT = 360
DIRECTIONS = 16  # random directions for each layer

HEADER = """\
                  held-out    change of the outputs             outputs moved per unit in
    step    loss  accuracy     predicted     actual    error  hidden layer   output layer"""

NEIGHBOR_HEADER = """\
   digit  read as   closest   lead over it   distance   lead there"""


class Row(NamedTuple):
    """One line of the table. Sizes are root mean squares over examples and classes."""

    step: int
    loss: float
    accuracy: float  # on the held-out digits
    predicted: float  # size of J @ update
    actual: float  # size of outputs(params + update) - outputs(params)
    error: float  # size of their difference, relative to `actual`
    movement: dict[str, float]  # for each layer, size of J @ direction over random directions of length one


class Neighbor(NamedTuple):
    """The class that an image is closest to, beside the one it is read as. The lead is the difference in score."""

    digit: int
    read_as: int
    closest: int
    lead: float
    distance: float  # length of the change of the pixels that makes the two scores equal in the linear picture
    there: float  # the lead that the network itself gives after that change


optimizer = optax.adam(1e-2)


# --- the model and its training step: plain JAX and optax, nothing of linjac -----------------------------------------


def init_params(key):
    """Two dense layers: 64 pixels -> HIDDEN -> 10 classes."""
    hidden_key, output_key = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(hidden_key, (64, HIDDEN)) / 8.0, "b": jnp.zeros(HIDDEN)},
        "output": {"w": jax.random.normal(output_key, (HIDDEN, 10)) / HIDDEN**0.5, "b": jnp.zeros(10)},
    }


@jax.jit
def outputs(params, images):
    """The logits of each example: shape (examples, 10)."""
    features = jnp.tanh(images @ params["hidden"]["w"] + params["hidden"]["b"][None, :])
    return features @ params["output"]["w"] + params["output"]["b"][None, :]


def loss_fn(params, images, labels):
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, images), labels).mean()


@jax.jit
def propose_update(params, opt_state, images, labels):
    """The loss, the update that the optimizer wants to add to the parameters, and its next state."""
    loss, gradient = jax.value_and_grad(loss_fn)(params, images, labels)
    update, opt_state = optimizer.update(gradient, opt_state, params)
    return loss, update, opt_state


@jax.jit
def accuracy(params, images, labels):
    """The share of images whose largest logit is at the label."""
    return jnp.mean(jnp.argmax(outputs(params, images), axis=-1) == labels)


# --- the diagnostics: one linearization, many questions --------------------------------------------------------------


def diagnose(params, update, images, key):
    """Ask one linearization of the outputs about the update and about each layer.

    Returns the last four fields of a `Row`.
    """
    value, linear_fn = linjac.linearize_many(outputs, params, images, argnums=0)

    predicted = linear_fn(update)  # J @ update: the same shape as the outputs
    actual = outputs(optax.apply_updates(params, update), images) - value
    error = rms(actual - predicted) / rms(actual)

    movement = {}
    for layer, layer_key in zip(params, jax.random.split(key, len(params)), strict=True):
        directions = unit_directions(params, layer, layer_key)
        movement[layer] = rms(linear_fn.many(directions))  # (DIRECTIONS, examples, 10), from the same linearization
    return rms(predicted), rms(actual), error, movement


def unit_directions(params, layer, key):
    """Random directions of length one that move `layer` only.

    The tree is that of `params`; each leaf has a leading axis of length DIRECTIONS, one entry for each direction.
    """
    flat, unravel = ravel_pytree(params[layer])
    moves = jax.random.normal(key, (DIRECTIONS, flat.size))
    moves = moves / jnp.linalg.norm(moves, axis=1, keepdims=True)
    still = jax.tree.map(lambda leaf: jnp.zeros((DIRECTIONS, *leaf.shape)), params)
    return still | {layer: jax.vmap(unravel)(moves)}


def rms(array):
    """Root mean square."""
    return float(jnp.sqrt(jnp.mean(array**2)))


# --- one Jacobian: what the scores of an image depend on -------------------------------------------------------------


def scores(params, image):
    """The logits of one image: 64 pixels -> 10 scores."""
    return outputs(params, image[None])[0]


def nearest_neighbor(params, image, label):
    """The class that takes the smallest change of the pixels to reach, and what that change does.

    To first order the lead of the class on top over class k changes by (J[top] - J[k]) @ change: it is gone after a
    change of length lead / |J[top] - J[k]| against that difference of two rows.
    """
    value, jacobian = linjac.value_and_jacobian(scores, argnums=1)(params, image)  # (10,) and (10, 64)
    top = jnp.argmax(value)
    leads, slopes = value[top] - value, jacobian[top] - jacobian
    distances = leads / jnp.linalg.norm(slopes, axis=1).clip(1e-30)
    closest = jnp.argmin(distances.at[top].set(jnp.inf))
    change = -distances[closest] * slopes[closest] / jnp.linalg.norm(slopes[closest])
    moved = scores(params, image + change)
    return Neighbor(
        digit=label,
        read_as=top,
        closest=closest,
        lead=leads[closest],
        distance=distances[closest],
        there=moved[top] - moved[closest],
    )


def look_at(params, images, labels):
    """Print how the Jacobian is computed, and a row for one image of each class; return the rows."""
    print("\nThe Jacobian of the 10 scores of a digit with respect to its 64 pixels, as linjac plans it:\n")
    print(linjac.plan_jacobian(scores, argnums=1)(params, images[0]))

    print("\nWhich other class is closest to a held-out digit, and how far do its pixels (0 to 1) move to get there?\n")
    print(NEIGHBOR_HEADER)
    first = [np.flatnonzero(labels == digit)[0] for digit in range(10)]
    found = jax.vmap(nearest_neighbor, in_axes=(None, 0, 0))(params, images[first], labels[first])  # ten Jacobians
    columns = [np.asarray(column).tolist() for column in found]
    neighbors = [Neighbor(*row) for row in zip(*columns, strict=True)]
    for row in neighbors:
        print(f"{row.digit:8d}{row.read_as:9d}{row.closest:10d}{row.lead:15.2f}{row.distance:11.2f}{row.there:13.2f}")
    print("\nBy the linear picture the lead there is 0. Below 0 the network reads the other class.")
    return neighbors


# --- the run ---------------------------------------------------------------------------------------------------------


def load_data():
    """Digits with pixels scaled to [0, 1], shuffled, as ((images, labels) to learn, (images, labels) held out)."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16.0).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])


def format_row(row):
    """The row as it stands under HEADER."""
    return (
        f"{row.step:8d}{row.loss:8.3f}{row.accuracy:10.1%}{row.predicted:14.4f}{row.actual:11.4f}{row.error:9.1%}"
        f"{row.movement['hidden']:14.4f}{row.movement['output']:15.4f}"
    )


def main(steps=300, every=25):
    """Train for `steps` steps, with a row of diagnostics every `every` steps; then look at a few digits.

    Returns the rows of both tables.
    """
    started = time.perf_counter()
    (images, labels), held_out = load_data()
    print(f"{len(images) + HELD_OUT} digits, {HELD_OUT} of them held out; JAX {jax.__version__}\n", flush=True)
    print(HEADER, flush=True)

    init_key, probe_key = jax.random.split(jax.random.key(0))
    params = init_params(init_key)
    opt_state = optimizer.init(params)
    shuffle = np.random.default_rng(1)

    rows = []
    for step in range(steps + 1):
        pick = shuffle.choice(len(images), BATCH, replace=False)
        loss, update, opt_state = propose_update(params, opt_state, images[pick], labels[pick])
        if step % every == 0:
            diagnosis = diagnose(params, update, images[pick], jax.random.fold_in(probe_key, step))
            rows.append(Row(step, float(loss), float(accuracy(params, *held_out)), *diagnosis))
            print(format_row(rows[-1]), flush=True)
        params = optax.apply_updates(params, update)

    neighbors = look_at(params, *held_out)
    seconds = time.perf_counter() - started
    print(f"\n{len(rows)} linearizations and {len(neighbors)} Jacobians in a run of {seconds:.1f} s.", flush=True)
    return rows, neighbors


if __name__ == "__main__":
    main()

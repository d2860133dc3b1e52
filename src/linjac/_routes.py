"""The criteria that take other routes to a product: jit, vmap, chunks, recomputation, another backend.

The yardstick is the single product of the linearization, which `_criteria` has compared with plain JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linjac._criteria import Case, moving
from linjac._linearize import linearize_many
from linjac._probe import Probe, SkipError, Verdict, merged
from linjac._program import first_line
from linjac._report import Difference
from linjac._subject import Flat
from linjac._tolerances import compare

BATCH = 7  # directions of a batch: 3 and 4 do not divide it
CHUNKS = (1, 3, 4)


def need_trace(case: Case) -> None:
    """SkipError what cannot be traced."""
    jaxpr = case.subject.jaxpr
    if not hasattr(jaxpr, "eqns"):
        raise SkipError(f"fun cannot be traced, and runs op by op: {first_line(jaxpr)}")


def jitted_apply(case: Case) -> Verdict:
    """The linearization passed into `jax.jit`."""
    case.probe.need_elements()
    run = jax.jit(lambda linear_fn, *tangents: linear_fn(*tangents))
    push = lambda vector: moving(run(case.linear_fn, *case.subject.trees(vector)))  # noqa: E731
    return Verdict(case.probe.pushed(push, case.push, count=2))


def jitted_whole(case: Case) -> Verdict:
    """The function linearized inside `jax.jit`."""
    case.probe.need_elements()
    need_trace(case)
    subject = case.subject

    @jax.jit
    def run(point: Flat, tangents: tuple[Any, ...]) -> Any:
        linear_fn = linearize_many(subject.fun, *subject.arguments(point), **settings(case))[1]
        return linear_fn(*tangents)

    push = lambda vector: moving(run(subject.point, subject.trees(vector)))  # noqa: E731
    return Verdict(case.probe.pushed(push, case.push, count=2))


def settings(case: Case) -> dict[str, Any]:
    """The options with which the subject was linearized."""
    return {"argnums": case.subject.positions, "has_aux": case.subject.has_aux}


def mapped(case: Case) -> Verdict:
    """The linearization under `jax.vmap` against a loop."""
    case.probe.need_elements()
    vectors = [case.probe.draw(case.subject.inputs) for _ in range(3)]
    batch = case.subject.trees(_stacked(vectors))
    got = _if_mapped(lambda: moving(jax.vmap(lambda tangents: case.linear_fn(*tangents))(batch)))
    return Verdict(merged(_rows(case.probe, got, [case.push(vector) for vector in vectors], "out")[0]))


def _if_mapped(run: Callable[[], Flat]) -> Flat:
    """Run what needs a rule for `jax.vmap`, or skip."""
    try:
        return run()
    except (NotImplementedError, ValueError) as err:
        if not any(word in str(err).lower() for word in ("vmap", "batching")):
            raise
        raise SkipError(f"fun cannot be mapped: {first_line(err)}") from None


def chunked(case: Case) -> Verdict:
    """`many` in chunks against single products."""
    case.probe.need_elements()
    vectors = [case.probe.draw(case.subject.inputs) for _ in range(BATCH)]
    batch = case.subject.trees(_stacked(vectors))
    run = lambda size: moving(case.linear_fn.many(*batch, chunk_size=size))  # noqa: E731
    return in_chunks(case.probe, run, [case.push(vector) for vector in vectors], "out")


def transposed_chunked(case: Case) -> Verdict:
    """`transpose_many` in chunks against single products."""
    case.probe.need_elements()
    case.probe.need_reverse()
    vectors = [case.probe.draw(case.subject.outputs) for _ in range(BATCH)]
    batch = case.subject.cotangent(_stacked(vectors))
    run = lambda size: moving(case.linear_fn.transpose_many(batch, chunk_size=size))  # noqa: E731
    return in_chunks(case.probe, run, [case.pull(vector) for vector in vectors], "in")


def in_chunks(probe: Probe, run: Callable[[int], Flat], want: Sequence[Flat], side: str) -> Verdict:
    """Rows of a batch in chunks of several sizes against single ones."""
    found: list[Difference] = []
    words: list[str] = []
    for size in CHUNKS:
        bad, rows = _rows(probe, _if_mapped(functools.partial(run, size)), want, side)
        found += bad
        if rows:
            words.append(f"directions {', '.join(map(str, rows))} of {len(want)} with chunk_size={size}")
    shown = "; ".join(words) or f"{len(want)} directions in chunks of {', '.join(map(str, CHUNKS))}"
    return Verdict(merged(found), shown)


def _stacked(vectors: Sequence[Flat]) -> Flat:
    return [jnp.asarray(np.stack([np.asarray(leaf) for leaf in leaves])) for leaves in zip(*vectors, strict=True)]


def _rows(probe: Probe, got: Flat, want: Sequence[Flat], side: str) -> tuple[list[Difference], list[int]]:
    """Differences of a batch from single products, and the rows that differ."""
    out = side == "out"
    names = probe.subject.outputs.names if out else probe.subject.inputs.names
    nothing: list[str | None] = [None] * len(names)
    found: list[Difference] = []
    rows: list[int] = []
    for row, single in enumerate(want):
        mine = [leaf[row] for leaf in got]
        allowed = probe.allowed_out if out else probe.allowed_in
        bad = compare(mine, single, allowed, names if out else nothing, nothing if out else names)
        found += bad
        rows += [row] if bad else []
    return found, rows


def recomputed(case: Case) -> Verdict:
    """Products that recompute against stored ones."""
    case.probe.need_elements()
    need_trace(case)
    subject = case.subject
    again = linearize_many(subject.fun, *subject.args, strategy="recompute", **settings(case))[1]
    other = case._replace(linear_fn=again)
    found = case.probe.pushed(other.push, case.push, count=2)
    if subject.no_reverse is None:
        found += case.probe.pulled(other.pull, case.pull, count=2)
    return Verdict(merged(found))


def on_cpu(probe: Probe, product: Callable[[Flat], Sequence[Any]]) -> Verdict:
    """A product against `jax.jvp` on the CPU."""
    if jax.default_backend() == "cpu":
        raise SkipError("the default backend is the CPU")
    probe.need_elements()
    cpu = jax.devices("cpu")[0]

    def there(vector: Flat) -> Flat:
        with jax.default_device(cpu):
            point = jax.device_put(probe.subject.point, cpu)
            return [np.asarray(leaf) for leaf in probe.subject.jvp(jax.device_put(vector, cpu), point)]

    try:
        there(probe.forward[-1].vector)
    except ValueError as err:
        raise SkipError(f"fun cannot be run on the CPU: {first_line(err)}") from None
    return Verdict(probe.pushed(product, functools.partial(there), count=2))

"""Directions at a point, and what plain JAX says along them: the yardstick of every criterion.

It keeps the products of `jax.jvp` and `jax.vjp`, how much they change when the point moves by one rounding, and finds
the leaf to blame for a difference along a random direction. This module must not know linearizations.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from linjac._doubled import Doubled
from linjac._program import first_line
from linjac._report import FAILED, PASSED, SKIPPED, Criterion, Difference
from linjac._subject import Flat, Leaves, Subject, basis, cast, normal, spread
from linjac._tolerances import SHARE, Tolerances, compare, largest, wide
from linjac._tracing import uncounted

PERTURBED = 2  # points one rounding away


class SkipError(Exception):
    """A criterion that cannot be had here, with the reason."""


class Verdict(NamedTuple):
    """What a criterion found: nothing, where it passed."""

    differences: Sequence[Difference] = ()
    detail: str = ""
    failed: bool = False  # without a difference to show


def decide(stage: str, name: str, run: Callable[[], Verdict]) -> Criterion:
    """Run one criterion; an exception in it is a failure like any other."""
    try:
        with np.errstate(all="ignore"), uncounted():
            found = run()
    except SkipError as reason:
        return Criterion(name, stage, SKIPPED, str(reason))
    except Exception as err:
        return Criterion(name, stage, FAILED, f"raised {type(err).__name__}: {first_line(err)}")
    failed = found.failed or bool(found.differences)
    return Criterion(name, stage, FAILED if failed else PASSED, found.detail, tuple(found.differences))


def merged(differences: Sequence[Difference]) -> list[Difference]:
    """The worst difference of each pair of leaves, the worst first."""
    found: dict[Any, Difference] = {}
    for difference in differences:
        place = (difference.output, difference.input)
        if place not in found or _excess(difference) > _excess(found[place]):
            found[place] = difference
    return sorted(found.values(), key=_excess, reverse=True)


def _excess(difference: Difference) -> float:
    return difference.error / max(difference.allowed, np.finfo(float).tiny)


class Direction(NamedTuple):
    """A vector on one side of the map; `leaf` where it is a unit vector."""

    vector: Flat
    leaf: int | None = None


type Product = Callable[[Flat], Sequence[Any]]


def only(vector: Sequence[Any], leaf: int) -> Flat:
    """The vector, zero in all leaves but one."""
    return [x if k == leaf else x * 0 for k, x in enumerate(vector)]


class Probe:
    """Directions on both sides of the derivative of a subject, with their products by plain JAX."""

    def __init__(self, subject: Subject, rng: np.random.Generator, directions: int, limits: Tolerances) -> None:
        self.subject, self.limits, self.rng = subject, limits, rng
        self.doubled = Doubled(subject)
        self.forward = self._directions(subject.inputs, directions)
        self.reverse = self._directions(subject.outputs, directions)

    def _directions(self, side: Leaves, count: int) -> list[Direction]:
        if not side.size:
            return []
        units = [Direction(*basis(side.types, index)[:2]) for index in spread(side.size, count)]
        return [*units, *(Direction(self.draw(side)) for _ in range(count))]

    def draw(self, side: Leaves) -> Flat:
        """A random vector."""
        return cast(normal(self.rng, side.types), side.types)

    # what plain JAX says ----------------------------------------------------------------------------------------------
    @functools.cached_property
    def pushes(self) -> list[Flat]:
        """J v for each forward direction."""
        return [self.subject.jvp(direction.vector) for direction in self.forward]

    @functools.cached_property
    def pulls(self) -> list[Flat]:
        """Jᵀ c for each reverse direction."""
        return [self.subject.vjp(direction.vector) for direction in self.reverse]

    def need_reverse(self) -> None:
        """SkipError what needs a reverse direction where JAX has none."""
        if self.subject.no_reverse is not None:
            raise SkipError(f"fun has no reverse direction: {first_line(self.subject.no_reverse)}")

    def need_elements(self) -> None:
        """SkipError what has nothing to compare."""
        if not (self.subject.inputs.size and self.subject.outputs.size):
            raise SkipError("the Jacobian has no elements")

    # tolerances -------------------------------------------------------------------------------------------------------
    def _around(self, run: Callable[[Flat, Flat], Sequence[Any]], vector: Flat) -> Flat:
        """How much each element of a result changes when point and vector move by one rounding."""
        there = run(self.subject.point, vector)
        others = (run(self._nudged(self.subject.point), self._nudged(vector)) for _ in range(PERTURBED))
        return apart((other, there) for other in others)

    def _rounded(self, exact: Callable[[Flat], Sequence[Any]], vectors: Sequence[Flat], known: Sequence[Flat]) -> Flat:
        """How far each element of results is from the same in double precision, where that can be had.

        That shows the roundings inside the function, of which compiled code makes fewer, or others.

        Returns:
            The largest distance of each element, one array a leaf.
        """
        if self.doubled.already or isinstance(self.doubled.subject, str):
            return [np.zeros(np.shape(leaf)) for leaf in known[0]]
        return apart((exact(vector), there) for vector, there in zip(vectors, known, strict=True))

    def _nudged(self, leaves: Sequence[Any]) -> Flat:
        eps = self.limits.eps
        return [(x * (1 + eps * self.rng.choice((-1.0, 1.0), x.shape))).astype(x.dtype) for x in map(wide, leaves)]

    @functools.cached_property
    def noise_of_value(self) -> Flat:
        """What one rounding of the point, or those inside the function, change in each element of the value."""
        point, types = self.subject.point, self.subject.inputs.types
        moved = self._around(lambda point, _: self.subject.call(*cast(point, types)), [])
        return _larger(moved, self._rounded(self.doubled.call, [list(map(wide, point))], [self.subject.call(*point)]))

    @functools.cached_property
    def noise_out(self) -> Flat:
        """The same in products along random directions."""
        types = self.subject.inputs.types
        if not self.forward:
            return [np.zeros(aval.shape) for aval in self.subject.outputs.types]
        run = lambda point, vector: self.subject.jvp(cast(vector, types), cast(point, types))  # noqa: E731
        return _larger(
            self._around(run, self.forward[-1].vector),
            self._rounded(self.doubled.push, *_random_ones(self.forward, self.pushes)),
        )

    @functools.cached_property
    def noise_in(self) -> Flat:
        """The same in transposed products, for each element of the inputs."""
        inputs, outputs = self.subject.inputs.types, self.subject.outputs.types
        if not self.reverse or self.subject.no_reverse is not None:
            return [np.zeros(aval.shape) for aval in inputs]
        run = lambda point, vector: self.subject.vjp(cast(vector, outputs), cast(point, inputs))  # noqa: E731
        return _larger(
            self._around(run, self.reverse[-1].vector),
            self._rounded(self.doubled.pull, *_random_ones(self.reverse, self.pulls)),
        )

    @functools.cached_property
    def size_out(self) -> list[float]:
        """The largest element of each output leaf along any direction."""
        return [max((largest(push[k]) for push in self.pushes), default=0.0) for k in self._numbers("out")]

    @functools.cached_property
    def size_in(self) -> list[float]:
        """The largest element of each input leaf over all transposed products."""
        pulls = [] if self.subject.no_reverse is not None else self.pulls
        return [max((largest(pull[k]) for pull in pulls), default=0.0) for k in self._numbers("in")]

    def _numbers(self, side: str) -> range:
        return range(len(self.subject.outputs.types if side == "out" else self.subject.inputs.types))

    def allowed_value(self, leaf: int, want: Any) -> Any:
        """The largest difference in each element of a leaf of the value."""
        return self.limits.allowed(want, self.noise_of_value[leaf])

    def allowed_out(self, leaf: int, want: Any) -> Any:
        """The largest difference in each element of an output leaf of a product."""
        return self.limits.allowed(want, self.noise_out[leaf], self.size_out[leaf], SHARE)

    def allowed_in(self, leaf: int, want: Any) -> Any:
        """The largest difference in each element of an input leaf of a transposed product."""
        return self.limits.allowed(want, self.noise_in[leaf], self.size_in[leaf], SHARE)

    # comparisons ------------------------------------------------------------------------------------------------------
    def pushed(
        self, product: Product, wanted: Product | None = None, count: int | None = None, *, finite: bool = False
    ) -> list[Difference]:
        """Where a product differs from `jax.jvp` (or another product) along the last `count` directions.

        With `finite`, elements that are not finite on either side are left to another criterion.

        Returns:
            The worst difference of each pair of leaves.
        """
        return self._along(True, product, wanted, count, finite)

    def pulled(
        self, product: Product, wanted: Product | None = None, count: int | None = None, *, finite: bool = False
    ) -> list[Difference]:
        """The same for a transposed product and `jax.vjp`."""
        return self._along(False, product, wanted, count, finite)

    def _along(
        self, forward: bool, product: Product, wanted: Product | None, count: int | None, finite: bool
    ) -> list[Difference]:
        subject = self.subject
        names = subject.outputs.names, subject.inputs.names
        far, near = names if forward else names[::-1]
        directions, known = (self.forward, self.pushes) if forward else (self.reverse, self.pulls)
        allowed = self.allowed_out if forward else self.allowed_in
        plain = wanted or (subject.jvp if forward else subject.vjp)
        sides = masked if finite else _both

        def differ(vector: Flat, want: Any = None, name: str | None = None) -> list[Difference]:
            got, want = sides(product(vector), plain(vector) if want is None else want)
            one = [name] * len(far)
            return compare(got, want, allowed, *((far, one) if forward else (one, far)))

        found: list[Difference] = []
        start = 0 if count is None else max(0, len(directions) - count)
        for direction, there in list(zip(directions, known, strict=True))[start:]:
            name = None if direction.leaf is None else near[direction.leaf]
            bad = differ(direction.vector, there if wanted is None else None, name)
            if bad and name is None:
                found += self.blamed(differ, direction.vector, near, "input" if forward else "output", bad)
                break
            found += bad
        return merged(found)

    def blamed(
        self,
        differ: Callable[[Flat], list[Difference]],
        vector: Flat,
        names: Sequence[str],
        side: str,
        whole: list[Difference],
    ) -> list[Difference]:
        """The differences leaf by leaf of the vector; `whole` where no leaf alone shows one."""
        if len(names) == 1:
            return [dataclasses.replace(difference, **{side: names[0]}) for difference in whole]
        found: list[Difference] = []
        for k, name in enumerate(names):
            found += [dataclasses.replace(bad, **{side: name}) for bad in differ(only(vector, k))]
        return found or whole


def _random_ones(directions: Sequence[Direction], products: Sequence[Flat]) -> tuple[list[Flat], list[Flat]]:
    """The vectors that are no unit vectors, and their products."""
    rows = [(d.vector, product) for d, product in zip(directions, products, strict=True) if d.leaf is None]
    return [vector for vector, _ in rows], [product for _, product in rows]


def apart(pairs: Iterable[tuple[Sequence[Any], Sequence[Any]]]) -> Flat:
    """The largest difference of each element, over pairs of results."""
    changes = [[np.abs(wide(a) - wide(b)) for a, b in zip(*pair, strict=True)] for pair in pairs]
    return [np.max([np.where(np.isfinite(x), x, 0.0) for x in column], axis=0) for column in zip(*changes, strict=True)]


def _larger(some: Flat, others: Flat) -> Flat:
    return [noise_of(np.maximum(*pair)) for pair in zip(some, others, strict=True)]


def noise_of(changes: Any) -> Any:
    """The noise of each element: what was seen there, or in half of the leaf.

    One element at a kink, which a rounding takes to the other side, so excuses itself and none beside it.

    Returns:
        An array like the changes.
    """
    flat = np.sort(changes, axis=None)
    return np.maximum(changes, flat[(flat.size - 1) // 2]) if flat.size else changes


def masked(got: Sequence[Any], want: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Both sides, with zeros where either is not finite."""
    pairs = [(wide(a), wide(b)) for a, b in zip(got, want, strict=True)]
    keep = [np.isfinite(a) & np.isfinite(b) for a, b in pairs]
    sides = [[np.where(mask, pair[i], 0.0) for pair, mask in zip(pairs, keep, strict=True)] for i in (0, 1)]
    return sides[0], sides[1]


def _both(got: Sequence[Any], want: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return got, want

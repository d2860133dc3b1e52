"""The criteria of a linearization that look at one product at a time, op by op: from its structure to finite values.

Each is a function of a `Case` that returns a `Verdict`. Other routes to the same product are in `_routes`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.dtypes import float0

from linjac._linearization import Linearization
from linjac._probe import Probe, SkipError, Verdict, merged
from linjac._program import first_line
from linjac._report import Difference
from linjac._subject import Flat, Leaves, Subject
from linjac._tolerances import SHARE, compare, norm, wide, worst
from linjac._tree import is_inexact, is_none, key_paths, short, type_of

_LOUD = 1e-2  # share of the largest element from which a change by one rounding is a kink


class Case(NamedTuple):
    """A linearization under check."""

    probe: Probe
    value: Any  # what linearize_many returned
    linear_fn: Linearization

    @property
    def subject(self) -> Subject:
        """The function at the point."""
        return self.probe.subject

    def push(self, vector: Flat) -> Flat:
        """J v by the linearization."""
        return moving(self.linear_fn(*self.subject.trees(vector)))

    def pull(self, vector: Flat) -> Flat:
        """Jᵀ c by the linearization."""
        return moving(self.linear_fn.transpose(self.subject.cotangent(vector)))


def moving(tree: Any) -> Flat:
    """The inexact leaves of a result, as arrays (a function of Python floats may return one)."""
    leaves = [leaf for leaf in jax.tree_util.tree_leaves(tree) if getattr(leaf, "dtype", None) != float0]
    return [jax.numpy.asarray(leaf) for leaf in leaves if is_inexact(type_of(leaf))]


# structure ------------------------------------------------------------------------------------------------------------
def structure(case: Case) -> Verdict:
    """The tree of the value, of the tangents and of the cotangents."""
    subject, linear_fn = case.subject, case.linear_fn
    wanted = jax.eval_shape(lambda: subject.value)
    bad = misplaced(case.value, wanted, "output")
    chosen = tuple(subject.args[i] for i in subject.positions)
    into = linear_fn.in_structure()
    if jax.tree_util.tree_structure(into) != jax.tree_util.tree_structure(_structs(chosen)):
        single = chosen[0] if len(chosen) == 1 else None
        if single is None or jax.tree_util.tree_structure(into) != jax.tree_util.tree_structure(_structs(single)):
            bad.append("the tangents have another structure than the point")
    return Verdict(_places(bad), "; ".join(bad[:5]), bool(bad))


def _structs(tree: Any) -> Any:
    def struct(leaf: Any) -> Any:
        aval = type_of(leaf)
        return leaf if aval is not None and is_inexact(aval) else None

    return jax.tree_util.tree_map(struct, tree)


def misplaced(got: Any, want: Any, root: str) -> list[str]:
    """The leaves that only one of two trees has."""
    leaves = [jax.tree_util.tree_flatten(tree, is_leaf=is_none) for tree in (got, want)]
    if leaves[0][1] == leaves[1][1]:
        return []
    mine, theirs = (key_paths(tree, root) for tree in (got, want))
    bad = [f"{name}: missing" for name in theirs if name not in mine]
    bad += [f"{name}: not in what fun returns" for name in mine if name not in theirs]
    return bad or [f"{root}: expected {leaves[1][1]}, got {leaves[0][1]}"]


def _places(bad: Sequence[str]) -> list[Difference]:
    nan = float("nan")
    return [Difference(line.partition(":")[0], None, None, float("inf"), 0.0, nan, nan) for line in bad if ":" in line]


def types(case: Case) -> Verdict:
    """J is (m, n); value and products have the shapes and dtypes of the leaves."""
    subject, probe = case.subject, case.probe
    bad: list[str] = []
    size = (subject.outputs.size, subject.inputs.size)
    if case.linear_fn.shape != size:
        bad.append(f"shape: expected {size} (rows are outputs, columns are inputs), got {case.linear_fn.shape}")
    bad += _unlike(moving(case.value), subject.outputs)
    if probe.forward and not bad:
        bad += _unlike(case.push(probe.forward[-1].vector), subject.outputs)
    if probe.reverse and not bad and subject.no_reverse is None:
        bad += _unlike(case.pull(probe.reverse[-1].vector), subject.inputs)
    return Verdict(_places([line for line in bad if not line.startswith("shape")]), "; ".join(bad[:5]), bool(bad))


def _unlike(got: Sequence[Any], side: Leaves) -> list[str]:
    if len(got) != len(side.types):
        return [f"leaves: expected {len(side.types)}, got {len(got)}"]
    rows = zip(side.names, got, side.types, strict=True)
    return [
        f"{name}: expected {short(aval)}, got {short(leaf)}"
        for name, leaf, aval in rows
        if leaf.shape != aval.shape or leaf.dtype != aval.dtype
    ]


# value and products ---------------------------------------------------------------------------------------------------
def point(case: Case) -> Verdict:
    """The linearization is at these primals."""
    case.linear_fn.check_point(*case.subject.args)
    return Verdict()


def value(case: Case) -> Verdict:
    """The value against a call of the function as it is now."""
    names, want = case.subject.outputs.names, moving(case.subject.value)
    got = moving(case.value)
    return Verdict(compare(got, want, case.probe.allowed_value, names, [None] * len(names)))


def products(case: Case) -> Verdict:
    """Stored products against `jax.jvp`."""
    case.probe.need_elements()
    obstacle = case.subject.no_forward
    detail = f"{len(case.probe.forward)} directions"
    if obstacle is not None:
        case.probe.need_reverse()
        detail += f", against the transpose of jax.vjp: jax.jvp is impossible ({first_line(obstacle)})"
    return Verdict(case.probe.pushed(case.push), detail)


def transposed(case: Case) -> Verdict:
    """Transposed products against `jax.vjp`."""
    case.probe.need_elements()
    case.probe.need_reverse()
    return Verdict(case.probe.pulled(case.pull), f"{len(case.probe.reverse)} directions")


# linearity ------------------------------------------------------------------------------------------------------------
def linearity(case: Case) -> Verdict:
    """L(0) = 0, L(-v) = -L(v), L(u + v) = L(u) + L(v)."""
    probe, subject = case.probe, case.subject
    probe.need_elements()
    u, v = probe.draw(subject.inputs), probe.draw(subject.inputs)
    inputs, outputs = subject.inputs.names, subject.outputs.names
    laws = {"L(0) = 0": _at_zero, "L(-v) = -L(v)": _negated, "L(u + v) = L(u) + L(v)": _added}
    broken: dict[str, list[Difference]] = {}
    for law, test in laws.items():

        def differ(w: Flat, test: Any = test) -> list[Difference]:
            got, want, size = test(case, w, u)
            allowed = lambda k, _: probe.allowed_out(k, size[k])  # noqa: E731
            return compare(got, want, allowed, outputs, [None] * len(outputs))

        bad = differ(v)
        if bad:
            broken[law] = bad if law == "L(0) = 0" else probe.blamed(differ, v, inputs, "input", bad)
    detail = "" if not broken else f"broken: {', '.join(broken)}"
    return Verdict(merged([bad for row in broken.values() for bad in row]), detail)


type _Law = tuple[list[Any], list[Any], list[Any]]  # got, expected, the size of the terms


def _at_zero(case: Case, v: Flat, _: Flat) -> _Law:
    there = case.push(v)
    got = [_finite_at(a, b) for a, b in zip(case.push([x * 0 for x in v]), there, strict=True)]
    return got, [np.zeros(np.shape(leaf)) for leaf in got], there


def _negated(case: Case, v: Flat, _: Flat) -> _Law:
    there = case.push(v)
    return case.push([-x for x in v]), [-wide(leaf) for leaf in there], there


def _added(case: Case, v: Flat, u: Flat) -> _Law:
    first, second = ([wide(leaf) for leaf in case.push(w)] for w in (u, v))
    total = [wide(leaf) for leaf in case.push([a + b for a, b in zip(u, v, strict=True)])]
    want = [a + b for a, b in zip(first, second, strict=True)]
    got = [_finite_at(a, b) for a, b in zip(total, want, strict=True)]
    want = [_finite_at(a, a) for a in want]
    return got, want, [np.abs(a) + np.abs(b) for a, b in zip(first, second, strict=True)]


def _finite_at(leaf: Any, there: Any) -> Any:
    """The leaf, zero where another is not finite: that is another criterion's concern."""
    return np.where(np.isfinite(wide(there)), wide(leaf), 0.0)


# finite values and the two directions ---------------------------------------------------------------------------------
def finite_forward(case: Case) -> Verdict:
    """The value and the products are finite."""
    outputs, inputs = case.subject.outputs.names, case.subject.inputs.names
    found = nonfinite(moving(case.subject.value), outputs, [None] * len(outputs))
    for direction in case.probe.forward:
        name = None if direction.leaf is None else inputs[direction.leaf]
        if name is None and found:
            break
        found += nonfinite(case.push(direction.vector), outputs, [name] * len(outputs))
    return Verdict(merged(found))


def finite_reverse(case: Case) -> Verdict:
    """The transposed products are finite."""
    case.probe.need_elements()
    case.probe.need_reverse()
    outputs, inputs = case.subject.outputs.names, case.subject.inputs.names
    found: list[Difference] = []
    for direction in case.probe.reverse:
        name = None if direction.leaf is None else outputs[direction.leaf]
        if name is None and found:
            break
        found += nonfinite(case.pull(direction.vector), [name] * len(inputs), inputs)
    return Verdict(merged(found))


def nonfinite(leaves: Sequence[Any], outputs: Sequence[str | None], inputs: Sequence[str | None]) -> list[Difference]:
    """One difference for each leaf that holds NaN or infinity, at the first such element."""
    found: list[Difference] = []
    for leaf, output, into in zip(leaves, outputs, inputs, strict=True):
        bad = ~np.isfinite(wide(leaf))
        if bad.any():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))
            rest = norm(np.where(bad, 0.0, wide(leaf)))
            found.append(Difference(output, into, index, float("inf"), 0.0, rest, norm(wide(leaf))))
    return found


def adjoint(case: Case) -> Verdict:
    """⟨J v, c⟩ = ⟨v, Jᵀ c⟩, real parts, as JAX transposes without conjugation."""
    probe, subject = case.probe, case.subject
    probe.need_elements()
    probe.need_reverse()
    names = [(i, k) for i in range(len(subject.outputs.names)) for k in range(len(subject.inputs.names))]
    v = _calm(probe.draw(subject.inputs), probe.noise_in, probe.size_in)
    c = _calm(probe.draw(subject.outputs), probe.noise_out, probe.size_out)
    found: list[Difference] = []
    left, right = [wide(leaf) for leaf in case.push(v)], [wide(leaf) for leaf in case.pull(c)]
    if _identity(probe, v, c, left, right, None, None):
        for i, k in names:
            one, other = _only(v, k), _only(c, i)
            sides = [wide(leaf) for leaf in case.push(one)], [wide(leaf) for leaf in case.pull(other)]
            found += _identity(probe, one, other, *sides, subject.outputs.names[i], subject.inputs.names[k])
        found = found or _identity(probe, v, c, left, right, None, None)
    return Verdict(merged(found))


def _calm(vector: Flat, noise: Flat, sizes: Sequence[float]) -> Flat:
    """The vector without the elements at kinks, whose noise would hide the rest; as it is where all are noisy."""
    loud = [n > _LOUD * size for n, size in zip(noise, sizes, strict=True)]
    if all(map(np.all, loud)):
        return vector
    return [jax.numpy.where(mask, 0, x).astype(x.dtype) for mask, x in zip(loud, vector, strict=True)]


def _only(vector: Flat, leaf: int) -> Flat:
    return [x if k == leaf else x * 0 for k, x in enumerate(vector)]


def _identity(
    probe: Probe, v: Flat, c: Flat, left: Flat, right: Flat, output: str | None, into: str | None
) -> list[Difference]:
    with np.errstate(all="ignore"):
        terms = [(wide(a) * b).real for a, b in zip(c, left, strict=True)]
        others = [(wide(a) * b).real for a, b in zip(v, right, strict=True)]
        sums = [float(sum(np.sum(term) for term in row)) for row in (terms, others)]
        size = float(sum(np.sum(np.abs(term)) for term in (*terms, *others)))
    if not np.isfinite(size):
        raise SkipError("a product is not finite")
    noise = sum(float(np.sum(np.abs(wide(a)) * n)) for a, n in zip(c, probe.noise_out, strict=True))
    noise += sum(float(np.sum(np.abs(wide(a)) * n)) for a, n in zip(v, probe.noise_in, strict=True))
    limit = probe.limits.rtol * size + probe.limits.atol
    limit += 0.0 if probe.limits.given else min(noise, SHARE * size)
    bad = worst(np.asarray(sums[0]), np.asarray(sums[1]), limit, output, into)
    return [] if bad is None else [bad]

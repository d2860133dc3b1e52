"""The criteria of a Jacobian: its tree and orientation, its blocks against products and other modes, holomorphy.

Each is a method of `Blockwise` that returns a `Verdict`. Where the Jacobian came from (linjac, or the user) does not
matter here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linjac._criteria import moving, nonfinite
from linjac._errors import ModeError
from linjac._jacobian import jacobian, value_and_jacobian
from linjac._probe import Probe, SkipError, Verdict, merged
from linjac._program import first_line
from linjac._report import Difference
from linjac._routes import CHUNKS
from linjac._subject import Flat, Subject
from linjac._tolerances import SHARE, compare, largest, wide, worst
from linjac._tree import is_complex, is_inexact, promoted, short, size_of, type_of

TRANSPOSE = "this is the transpose: rows are outputs, columns are inputs"

type Blocks = list[list[Any]]  # one row for each output leaf, one block for each input leaf


class Blockwise:
    """A Jacobian under check. `options` are those of `linjac.jacobian`; `given` is a user's own Jacobian, or None."""

    def __init__(self, probe: Probe, mode: str, single: bool, options: dict[str, Any], given: Any) -> None:
        self.probe, self.mode, self.options, self.given = probe, mode, options, given
        self.single = single
        self.ours = self.compute(mode)  # refuses here what linjac refuses

    @property
    def subject(self) -> Subject:
        """The function at the point."""
        return self.probe.subject

    # the Jacobian -----------------------------------------------------------------------------------------------------
    def compute(self, mode: str, chunk_size: int | None = None) -> Any:
        """The tree of blocks in one mode."""
        chunk_size = self.options["chunk_size"] if chunk_size is None else chunk_size
        found = self._made(mode, chunk_size)(*self.subject.args)
        return found[0] if self.subject.has_aux else found

    def _made(self, mode: str, chunk_size: int | None) -> Callable[..., Any]:
        options: dict[str, Any] = {**self.options, "chunk_size": chunk_size, "has_aux": self.subject.has_aux}
        argnums = self.subject.positions[0] if self.single else self.subject.positions
        return jacobian(self.subject.fun, argnums, mode=mode, **options)

    @functools.cached_property
    def modes(self) -> dict[str, Blocks | ModeError]:
        """The blocks in each mode, or why there are none."""
        found: dict[str, Blocks | ModeError] = {}
        for mode in ("fwd", "rev"):
            try:
                found[mode] = self.split(self.compute(mode))
            except ModeError as err:
                found[mode] = err
        return found

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The blocks under check."""
        return self.split(self.ours if self.given is None else self.given)

    def split(self, tree: Any) -> Blocks:
        """The blocks of a tree, or of one (m, n) matrix."""
        leaves, wide_ = moving(tree), len(self.subject.inputs.types)
        if self._is_matrix(tree):
            return self._cut(np.asarray(tree))
        return [leaves[i : i + wide_] for i in range(0, len(leaves), wide_)] if wide_ else [[] for _ in self._outer()]

    def _is_matrix(self, tree: Any) -> bool:
        many = len(self.subject.inputs.types) * len(self.subject.outputs.types) > 1
        size = (self.subject.outputs.size, self.subject.inputs.size)
        return many and hasattr(tree, "shape") and tuple(tree.shape) in (size, size[::-1])

    def _cut(self, matrix: Any) -> Blocks:
        outs, into = self.subject.outputs.types, self.subject.inputs.types
        ends = [np.cumsum([size_of(aval) for aval in side])[:-1] for side in (outs, into)]
        rows = np.split(matrix, ends[0], axis=0)
        return [
            [
                part.reshape(out.shape + aval.shape)
                for part, aval in zip(np.split(row, ends[1], axis=1), into, strict=True)
            ]
            for row, out in zip(rows, outs, strict=True)
        ]

    # structure --------------------------------------------------------------------------------------------------------
    def structure(self) -> Verdict:
        """Outputs outside, then the differentiated arguments, then their leaves."""
        tree = self.ours if self.given is None else self.given
        if self._is_matrix(tree):
            return Verdict(detail="one (outputs, inputs) matrix")
        want = [f"jacobian{out}{into}" for out in self._outer() for into in self._inner()]
        got = ["jacobian" + jax.tree_util.keystr(path) for path in _moving_paths(tree)]
        if got == want:
            return Verdict()
        if sorted(got) == sorted(f"jacobian{into}{out}" for out in self._outer() for into in self._inner()):
            return Verdict(detail=f"{TRANSPOSE} (inputs are outside, outputs inside)", failed=True)
        bad = [f"{name}: missing" for name in want if name not in got]
        bad += [f"{name}: not in the Jacobian of fun" for name in got if name not in want]
        return Verdict(detail="; ".join(bad[:5]), failed=True)

    def _outer(self) -> list[str]:
        return [name.removeprefix("output") for name in self.subject.outputs.names]

    def _inner(self) -> list[str]:
        chosen = tuple(self.subject.args[i] for i in self.subject.positions)
        return [jax.tree_util.keystr(path) for path in _moving_paths(chosen[0] if self.single else chosen)]

    def types(self) -> Verdict:
        """A block has the shape of its output, then of its input, and the promotion of both dtypes."""
        tree = self.ours if self.given is None else self.given
        subject = self.subject
        size = (subject.outputs.size, subject.inputs.size)
        if self._is_matrix(tree) and tuple(tree.shape) != size:
            return Verdict(detail=f"{TRANSPOSE}: expected {size}, got {tuple(tree.shape)}", failed=True)
        bad: list[str] = []
        places: list[Difference] = []
        turned = True
        for row, output, out in zip(self.blocks, subject.outputs.names, subject.outputs.types, strict=True):
            for block, name, into in zip(row, subject.inputs.names, subject.inputs.types, strict=True):
                want = jax.ShapeDtypeStruct(out.shape + into.shape, promoted([out, into]))
                if tuple(block.shape) == want.shape and self._same_kind(block.dtype, want.dtype):
                    continue
                turned = turned and tuple(block.shape) == into.shape + out.shape
                bad.append(f"{output} with respect to {name}: expected {short(want)}, got {short(block)}")
                places.append(Difference(output, name, None, float("inf"), 0.0, float("nan"), float("nan")))
        words = "; ".join(bad[:5])
        return Verdict(places, f"{TRANSPOSE}: {words}" if bad and turned else words)

    def _same_kind(self, got: Any, want: Any) -> bool:
        """A user's Jacobian may be in a longer dtype."""
        if self.given is None:
            return got == want
        same = np.issubdtype(got, np.complexfloating) == np.issubdtype(want, np.complexfloating)
        return same and np.dtype(got).itemsize >= np.dtype(want).itemsize

    # blocks -----------------------------------------------------------------------------------------------------------
    def value(self) -> Verdict:
        """The value that comes with a Jacobian against a call of the function as it is now."""
        options: dict[str, Any] = {**self.options, "has_aux": self.subject.has_aux}
        argnums = self.subject.positions[0] if self.single else self.subject.positions
        got = value_and_jacobian(self.subject.fun, argnums, mode=self.mode, **options)(*self.subject.args)[0]
        got, names = got[0] if self.subject.has_aux else got, self.subject.outputs.names
        want = moving(self.subject.value)
        return Verdict(compare(moving(got), want, self.probe.allowed_value, names, [None] * len(names)))

    def against(self, other: Blocks, mine: Blocks | None = None) -> list[Difference]:
        """Where the blocks differ from others."""
        found: list[Difference] = []
        outputs, inputs = self.subject.outputs.names, self.subject.inputs.names
        for i, (row, wanted) in enumerate(zip(self.blocks if mine is None else mine, other, strict=True)):
            size = max(map(largest, wanted), default=0.0)
            for k, (block, want) in enumerate(zip(row, wanted, strict=True)):
                noise = self.probe.noise_out[i]
                noise = noise.reshape(noise.shape + (1,) * (np.ndim(want) - noise.ndim))
                limit = self.probe.limits.allowed(want, noise, size, SHARE)
                bad = worst(block, want, limit, outputs[i], inputs[k])
                found += [] if bad is None else [bad]
        return merged(found)

    def given_against_ours(self) -> Verdict:
        """A user's Jacobian against linjac's, block by block."""
        self.probe.need_elements()
        ours = self.split(self.ours)
        found = self.against(ours)
        if found and not self.against(ours, self._turned()):
            return Verdict(found, TRANSPOSE)
        return Verdict(found)

    def _turned(self) -> Blocks:
        """The transpose of blocks that are square, or of the whole where that is square; else the blocks."""
        subject = self.subject
        shapes = [[out.shape + into.shape for into in subject.inputs.types] for out in subject.outputs.types]
        flat = [[(size_of(out), size_of(into)) for into in subject.inputs.types] for out in subject.outputs.types]
        if all(m == n for row in flat for m, n in row):
            return [
                [np.reshape(np.reshape(wide(block), size).T, shape) for block, size, shape in zip(*rows, strict=True)]
                for rows in zip(self.blocks, flat, shapes, strict=True)
            ]
        if subject.outputs.size != subject.inputs.size:
            return self.blocks
        rows = [
            np.concatenate([np.reshape(wide(block), size) for block, size in zip(*pair, strict=True)], axis=1)
            for pair in zip(self.blocks, flat, strict=True)
        ]
        return self._cut(np.concatenate(rows).T)

    # products ---------------------------------------------------------------------------------------------------------
    def push(self, vector: Sequence[Any]) -> list[Any]:
        """J v from the blocks."""
        rows = zip(self.blocks, self.subject.outputs.types, strict=True)
        return [
            _real_if(out, sum(_dot(block, wide(v)) for block, v in zip(row, vector, strict=True))) for row, out in rows
        ]

    def pull(self, vector: Sequence[Any]) -> list[Any]:
        """Jᵀ c from the blocks."""
        columns = zip(zip(*self.blocks, strict=True), self.subject.inputs.types, strict=True)
        return [
            _real_if(into, sum(_dot_front(wide(c), block) for block, c in zip(column, vector, strict=True)))
            for column, into in columns
        ]

    def products(self) -> Verdict:
        """J v from the blocks against `jax.jvp`."""
        self._need_linear()
        return Verdict(self.probe.pushed(self.push, finite=True), f"{len(self.probe.forward)} directions")

    def transposed(self) -> Verdict:
        """Jᵀ c from the blocks against `jax.vjp`."""
        self._need_linear()
        self.probe.need_reverse()
        return Verdict(self.probe.pulled(self.pull, finite=True), f"{len(self.probe.reverse)} directions")

    def _need_linear(self) -> None:
        self.probe.need_elements()
        if self.options["holomorphic"] and self._bends:
            raise SkipError("fun is not holomorphic, so no one matrix gives its products")

    def linear(self, run: Callable[..., Verdict], *args: Any) -> Verdict:
        """A criterion that needs one matrix."""
        self._need_linear()
        return run(*args)

    # holomorphy -------------------------------------------------------------------------------------------------------
    def holomorphic(self) -> Verdict:
        """J(iv) = i J v, with the function's own derivative along v and iv."""
        if not self.options["holomorphic"]:
            raise SkipError("not promised: holomorphic=False")
        self.probe.need_elements()
        return Verdict(self._bends, "" if not self._bends else "fun is not holomorphic")

    @functools.cached_property
    def _bends(self) -> list[Difference]:
        inputs, outputs = self.subject.inputs.names, self.subject.outputs.names
        vector = self.probe.draw(self.subject.inputs)

        def differ(v: Flat) -> list[Difference]:
            got = self.subject.jvp([(1j * x).astype(x.dtype) for x in v])
            want = [1j * wide(leaf) for leaf in self.subject.jvp(v)]
            return compare(got, want, self.probe.allowed_out, outputs, [None] * len(outputs))

        bad = differ(vector)
        return merged(self.probe.blamed(differ, vector, inputs, "input", bad)) if bad else []

    # finite values and other routes -----------------------------------------------------------------------------------
    def finite(self, mode: str) -> Verdict:
        """No NaN and no infinity in the blocks of a mode."""
        self.probe.need_elements()
        found = self.blocks if mode == "given" else self._of(mode)
        return Verdict(self._nonfinite(found))

    def _nonfinite(self, blocks: Blocks) -> list[Difference]:
        inputs = self.subject.inputs.names
        rows = zip(blocks, self.subject.outputs.names, strict=True)
        return merged([bad for row, name in rows for bad in nonfinite(row, [name] * len(inputs), inputs)])

    def _of(self, mode: str) -> Blocks:
        found = self.modes[mode]
        if isinstance(found, ModeError):
            raise SkipError(_reason(found))
        return found

    def other(self) -> Verdict:
        """The modes that are possible against each other."""
        self._need_linear()
        done = {mode: found for mode, found in self.modes.items() if not isinstance(found, ModeError)}
        if len(done) < 2:
            mode, reason = next((m, f) for m, f in self.modes.items() if isinstance(f, ModeError))
            raise SkipError(f"mode={mode!r} is impossible: {_reason(reason)}")
        first, second = ("rev", "fwd") if self.mode == "rev" else ("fwd", "rev")
        return Verdict(self.against(done[second], done[first]), f"mode={first!r} against mode={second!r}")

    def _need_trace(self) -> None:
        self.probe.need_elements()
        if not hasattr(self.subject.jaxpr, "eqns"):
            raise SkipError(f"fun cannot be traced, and runs op by op: {first_line(self.subject.jaxpr)}")

    def _function(self) -> Callable[..., Any]:
        run = self._made(self.mode, self.options["chunk_size"])
        subject = self.subject

        def blocks(*leaves: Any) -> list[Any]:
            found = run(*subject.arguments(leaves))
            return moving(found[0] if subject.has_aux else found)

        return blocks

    def jitted(self) -> Verdict:
        """The Jacobian inside `jax.jit`."""
        self._need_trace()
        got = jax.jit(self._function())(*self.subject.point)
        return Verdict(self.against(self.split(self.ours), self.split(got)))

    def mapped(self) -> Verdict:
        """The Jacobian under `jax.vmap` at two copies of the point."""
        self._need_trace()
        batch = [jnp.stack([leaf, leaf]) for leaf in self.subject.point]
        try:
            got = jax.vmap(self._function())(*batch)
        except (NotImplementedError, ValueError, ModeError) as err:
            raise SkipError(f"fun cannot be mapped: {first_line(err)}") from None
        ours = self.split(self.ours)
        return Verdict(merged([bad for i in range(2) for bad in self.against(ours, self.split([x[i] for x in got]))]))

    def chunked(self) -> Verdict:
        """The Jacobian in chunks of several sizes."""
        self.probe.need_elements()
        ours = self.split(self.ours)
        found: list[Difference] = []
        words: list[str] = []
        for size in CHUNKS:
            bad = self.against(ours, self.split(self.compute(self.mode, size)))
            found += bad
            words += [f"chunk_size={size}"] if bad else []
        return Verdict(merged(found), ", ".join(words) or f"chunks of {', '.join(map(str, CHUNKS))}")


def _reason(err: Exception) -> str:
    lines = str(err).splitlines()
    return lines[1].strip() if len(lines) > 1 else first_line(err)


def _moving_paths(tree: Any) -> list[Any]:
    """The key paths of the inexact leaves."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    types = [(path, type_of(leaf)) for path, leaf in paths]
    return [path for path, aval in types if aval is not None and is_inexact(aval)]


def _dot(block: Any, vector: Any) -> Any:
    return np.tensordot(wide(block), vector, vector.ndim)


def _dot_front(vector: Any, block: Any) -> Any:
    return np.tensordot(vector, wide(block), vector.ndim)


def _real_if(aval: Any, leaf: Any) -> Any:
    return leaf if is_complex(aval) else np.real(leaf)

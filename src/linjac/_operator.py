"""The operator face of a linearization: what lineax, scipy, matfree and `jax.scipy.sparse.linalg` ask of a linear map.

Flat vectors are the concatenated leaves that move, in the order of the tree. There is no operator algebra here, and
nothing that knows how a product is computed.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linjac import _watch
from linjac._errors import TangentError, compose
from linjac._space import Space
from linjac._tree import is_complex, promoted, short, size_of, type_of


class Operator(abc.ABC):
    """`shape`, `dtype`, and products with one tree and with flat vectors."""

    __slots__ = ()

    # what a linearization provides: products of flat leaves
    @abc.abstractmethod
    def __call__(self, *tangents: Any) -> Any:
        """J v."""

    @abc.abstractmethod
    def _spaces(self) -> tuple[Space, Space]:
        """Inputs and outputs."""

    @abc.abstractmethod
    def _is_single(self) -> bool:
        """Whether one argument is differentiated."""

    @abc.abstractmethod
    def _product(self, direction: str, who: str, flat: list[Any]) -> list[Any]:
        """One product."""

    @abc.abstractmethod
    def _products(self, direction: str, who: str, batch: list[Any], count: int) -> list[Any]:
        """A batch of products."""

    @abc.abstractmethod
    def _watched(
        self, entry: str, run: Callable[..., Any], args: tuple[Any, ...], given: Any = None, direction: str = ""
    ) -> Any:
        """Call `run(*args)` and tell the active monitors; see `_watch`."""

    @abc.abstractmethod
    def as_matrix(self) -> jax.Array:
        """The dense matrix."""

    # the operator -----------------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, int]:
        """(m, n): number of outputs, number of inputs; leaves that cannot move do not count."""
        inputs, outputs = self._spaces()
        return outputs.size, inputs.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the matrix: the standard promotion of the dtypes of all input and output leaves."""
        inputs, outputs = self._spaces()
        return promoted([*outputs.avals, *inputs.avals])

    def in_structure(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the argument of `mv`: of the one differentiated argument, or a tuple.

        Returns:
            A tree with None at leaves that cannot move.
        """
        space = self._spaces()[0]
        trees = space.unflatten("linear_fn.in_structure", _structs(space))
        return trees[0] if self._is_single() else trees

    def out_structure(self) -> Any:
        """`jax.ShapeDtypeStruct`s of the result of `mv`; None stands at integer outputs."""
        space = self._spaces()[1]
        return space.unflatten("linear_fn.out_structure", _structs(space))

    def mv(self, vector: Any) -> Any:
        """J v with `v` shaped like `in_structure()`: one argument, a tuple where several are differentiated."""
        return self(vector) if self._is_single() else self(*vector)

    def matvec(self, vector: Any) -> jax.Array:
        """J v for a flat (n,) or (n, 1) vector; it is cast to the dtypes of the leaves, as in a matrix product."""
        if _watch.active:
            return self._watched("linear_fn.matvec", self._matvec, (vector,), direction="forward")
        return self._matvec(vector)

    def _matvec(self, vector: Any) -> jax.Array:
        inputs, outputs = self._spaces()
        flat = _split("linear_fn.matvec", inputs, vector)
        return _like(vector, _join(outputs, self._product("forward", "linear_fn.matvec", flat), ()))

    def rmatvec(self, vector: Any) -> jax.Array:
        """Jᴴ c, the adjoint (conjugate transpose), for a flat (m,) or (m, 1) vector."""
        if _watch.active:
            return self._watched("linear_fn.rmatvec", self._rmatvec, (vector,), direction="reverse")
        return self._rmatvec(vector)

    def _rmatvec(self, vector: Any) -> jax.Array:
        inputs, outputs = self._spaces()
        flat = [leaf.conj() for leaf in _split("linear_fn.rmatvec", outputs, vector)]
        return _like(vector, _join(inputs, self._product("reverse", "linear_fn.rmatvec", flat), ()).conj())

    def matmat(self, matrix: Any) -> jax.Array:
        """J V for an (n, k) matrix: one direction a column."""
        if _watch.active:
            return self._watched("linear_fn.matmat", self._matmat, (matrix,))
        return self._matmat(matrix)

    def _matmat(self, matrix: Any) -> jax.Array:
        inputs, outputs = self._spaces()
        batch, count = _split_columns("linear_fn.matmat", inputs, matrix)
        return _join(outputs, self._products("forward", "linear_fn.matmat", batch, count), (count,)).T

    def rmatmat(self, matrix: Any) -> jax.Array:
        """Jᴴ C for an (m, k) matrix: one cotangent a column."""
        if _watch.active:
            return self._watched("linear_fn.rmatmat", self._rmatmat, (matrix,))
        return self._rmatmat(matrix)

    def _rmatmat(self, matrix: Any) -> jax.Array:
        inputs, outputs = self._spaces()
        batch, count = _split_columns("linear_fn.rmatmat", outputs, matrix)
        rows = self._products("reverse", "linear_fn.rmatmat", [leaf.conj() for leaf in batch], count)
        return _join(inputs, rows, (count,)).conj().T


def _structs(space: Space) -> list[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in space.avals]


def _split(who: str, space: Space, vector: Any) -> list[Any]:
    """The leaves of a flat vector."""
    array = _as_array(who, vector)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (space.size,):
        line = f"expected ({space.size},), got {short(vector)}"
        raise TangentError(compose(who, "wrong shape", [line]), kind="shape")
    return _cut(who, space, array)


def _split_columns(who: str, space: Space, matrix: Any) -> tuple[list[Any], int]:
    """The batch of leaves of the columns of a matrix, and their number."""
    array = _as_array(who, matrix)
    if array.ndim != 2 or array.shape[0] != space.size:
        line = f"expected ({space.size}, k), got {short(matrix)}"
        raise TangentError(compose(who, "wrong shape", [line]), kind="shape")
    return _cut(who, space, array.T), array.shape[1]


def _as_array(who: str, value: Any) -> jax.Array:
    if type_of(value) is None:
        raise TangentError(compose(who, "not an array", [f"got {short(value)}"]), kind="no array")
    return jnp.asarray(value)


def _cut(who: str, space: Space, array: jax.Array) -> list[Any]:
    if is_complex(array) and not all(map(is_complex, space.avals)):
        raise TangentError(compose(who, "a complex vector for real leaves", [f"got {short(array)}"]), kind="dtype")
    leaves: list[Any] = []
    start = 0
    for aval in space.avals:
        piece = array[..., start : start + size_of(aval)]
        leaves.append(piece.reshape((*array.shape[:-1], *aval.shape)).astype(aval.dtype))
        start += size_of(aval)
    return leaves


def _join(space: Space, leaves: Sequence[Any], batch: tuple[int, ...]) -> jax.Array:
    dtype = promoted(space.avals)
    if not leaves:
        return jnp.zeros((*batch, 0), dtype)
    return jnp.concatenate([leaf.reshape((*batch, -1)).astype(dtype) for leaf in leaves], axis=-1)


def _like(vector: Any, flat: jax.Array) -> jax.Array:
    """A column where the operand was one."""
    return flat[:, None] if np.ndim(vector) == 2 else flat

"""What a function and its derivative give for one case, in memory and as the entries of a file.

Arrays are kept in full, or as figures that cannot give them back. How two of them are compared is not known here.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac._described import UnreadableError, check_dtype, describe, plain, typed
from linjac._errors import PerformanceWarning
from linjac._fingerprint import FIGURES, can_reverse, figures, fingerprint, names, places, primal_of, products
from linjac._linearize import linearize_many
from linjac._tracing import uncounted

type Keep = Callable[[np.ndarray], str]

RESULT = {
    "name": str,
    "dtype": str,
    "shape": [int],
    "data": (str, None),
    "figures": [str],
    "places": (str, None),
    "sha256": (str, None),
}
BLOCK = {"output": str, "input": str, "dtype": str, "figures": [str], "odd": [int]}
OBSERVED = {
    "tree": object,
    "value": [RESULT],
    "forward": [[RESULT]],
    "reverse": ([[RESULT]], None),
    "jacobian": {"shape": [int], "how": ("fwd", "rev", "sampled"), "blocks": [BLOCK]},
}


class Result(NamedTuple):
    """One array: its name and type, and its entries, or figures of them, or their hash."""

    name: str
    dtype: str  # for a PRNG key its implementation
    shape: tuple[int, ...]
    array: np.ndarray | None
    figures: tuple[float, ...] = ()
    places: str | None = None  # hash of where NaN and infinities are; None where there are none
    sha256: str | None = None


class Observed(NamedTuple):
    """What one case gave."""

    tree: Any  # the structure of the output, as `describe` has it
    value: list[Result]
    forward: list[list[Result]]  # J v along the fixed directions
    reverse: list[list[Result]] | None  # Jᵀ c; None where there is no reverse direction
    jacobian: dict[str, Any]
    jaxpr: Any = None  # of the function, where it was traced; not kept in a file


class Refusal(NamedTuple):
    """The error that a case gave."""

    classes: tuple[str, ...]  # the class of the error, and what it derives from
    message: str  # its first line


def qualified(kind: type) -> str:
    """The name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def refusal_of(err: Exception) -> Refusal:
    """An error in words."""
    lines = str(err).strip().splitlines()
    return Refusal(tuple(map(qualified, type(err).__mro__)), lines[0] if lines else "")


# running --------------------------------------------------------------------------------------------------------------
def observe(
    fun: Callable[..., Any], primals: tuple[Any, ...], argnums: Any, has_aux: bool, how: str | None = None
) -> Observed:
    """Run one case; whatever the function raises passes through."""
    with uncounted(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # this is not about speed
        output, linear_fn, *_ = linearize_many(fun, *primals, argnums=argnums, has_aux=has_aux)
        found = describe(output, "output")
        ends = names(linear_fn, "inputs"), names(linear_fn, "outputs")
        forward = [_results(ends[1], flat) for flat in products(linear_fn, "forward")]
        reverse = None
        if can_reverse(linear_fn):
            reverse = [_results(ends[0], flat) for flat in products(linear_fn, "reverse")]
        jacobian = fingerprint(linear_fn, how if how != "rev" or reverse is not None else None)
    value = [_result(item.name, item.value) for item in found.leaves]
    return Observed(found.tree, value, forward, reverse, jacobian, primal_of(linear_fn))


def _results(names: Sequence[str], arrays: Sequence[Any]) -> list[Result]:
    return [_result(name, array) for name, array in zip(names, arrays, strict=True)]


def _result(name: str, value: Any) -> Result:
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        data = np.asarray(jax.random.key_data(value))
        return Result(name, f"key {jax.random.key_impl(value)}", tuple(value.shape), data)
    array = np.asarray(value)
    return Result(name, str(array.dtype), array.shape, array)


# to a file and back ---------------------------------------------------------------------------------------------------
def types_of(seen: Observed) -> list[Any]:
    """The types of everything that floats in a case."""
    vectors = [seen.value, *seen.forward, *(seen.reverse or [])]
    results = [result for vector in vectors for result in vector if not is_exact(result)]
    return [jax.ShapeDtypeStruct(result.shape, np.dtype(result.dtype)) for result in results]


def is_exact(result: Result) -> bool:
    """Whether the entries have to be equal bit for bit: integers, bools and keys."""
    return result.dtype.startswith("key ") or not jnp.issubdtype(np.dtype(result.dtype), np.inexact)


def reduced(result: Result) -> Result:
    """The figures of an array instead of its entries; the hash of one that has to be equal."""
    assert result.array is not None
    if is_exact(result):
        return result._replace(array=None, sha256=_sha256(result.array))
    where = places(result.array)
    mark = None if where is None else _sha256(where)
    return result._replace(array=None, figures=tuple(figures(result.array)), places=mark)


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(plain(array).tobytes()).hexdigest()


def pack(seen: Observed, keep: Keep | None) -> dict[str, Any]:
    """As JSON; the arrays go to `keep`, or are reduced to figures."""
    jacobian = {**seen.jacobian, "blocks": [{**b, "figures": _hex(b["figures"])} for b in seen.jacobian["blocks"]]}
    return {
        "tree": seen.tree,
        "value": [_pack(result, keep) for result in seen.value],
        "forward": [[_pack(result, keep) for result in vector] for vector in seen.forward],
        "reverse": None if seen.reverse is None else [[_pack(r, keep) for r in vector] for vector in seen.reverse],
        "jacobian": jacobian,
    }


def _pack(result: Result, keep: Keep | None) -> dict[str, Any]:
    data = None
    if keep is None:
        result = reduced(result)
    else:
        assert result.array is not None
        data = keep(plain(result.array))
    entry = result._asdict()
    del entry["array"]
    return {**entry, "shape": list(result.shape), "figures": _hex(result.figures), "data": data}


def _hex(numbers: Sequence[float]) -> list[str]:
    return [float(number).hex() for number in numbers]


def unpack(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> Observed:
    """From the JSON that `OBSERVED` describes."""
    jacobian = entry["jacobian"]
    blocks = [{**block, "figures": list(_floats(block["figures"]))} for block in jacobian["blocks"]]
    for block in blocks:
        if len(block["figures"]) != FIGURES or len(block["odd"]) != 3:
            raise UnreadableError("a block of the Jacobian has the wrong number of figures")
    reverse = entry["reverse"]
    return Observed(
        entry["tree"],
        [_unpack(result, arrays) for result in entry["value"]],
        [[_unpack(result, arrays) for result in vector] for vector in entry["forward"]],
        None if reverse is None else [[_unpack(result, arrays) for result in vector] for vector in reverse],
        {**jacobian, "blocks": blocks},
    )


def _unpack(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> Result:
    name, dtype, shape = entry["name"], entry["dtype"], tuple(entry["shape"])
    array, key = None, dtype.startswith("key ")
    if not key:
        check_dtype(dtype)
    if entry["data"] is not None:
        if entry["data"] not in arrays:
            raise UnreadableError(f"{name[:80]!r} has no array")
        array = typed(arrays[entry["data"]], "uint32" if key else dtype)
        if array.shape != shape and not (key and array.shape[: len(shape)] == shape):
            raise UnreadableError(f"{name[:80]!r} has another shape than its array")
    result = Result(name, dtype, shape, array, _floats(entry["figures"]), entry["places"], entry["sha256"])
    if array is None and (result.sha256 is None if is_exact(result) else len(result.figures) != FIGURES):
        raise UnreadableError(f"{name[:80]!r} has neither entries nor figures")
    return result


def _floats(words: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(map(float.fromhex, words))
    except (ValueError, OverflowError):
        raise UnreadableError("a figure is no number") from None

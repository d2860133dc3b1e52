"""Baselines: what a function and its derivative gave once, kept in a file, and compared with what they give now."""

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import jax
import numpy as np

from linjac import _archive
from linjac._cases import Case, Refused, check_cases, match_cases
from linjac._compare import compare_case
from linjac._described import LEAF, UnreadableError, assemble, check_tree, join_digests, restore, store
from linjac._environment import Environment, environment
from linjac._errors import VerificationError, compose
from linjac._observe import OBSERVED, Keep, observe, pack, qualified, refusal_of, types_of, unpack
from linjac._options import check_argnums, check_callable, check_flag, settled_argnums
from linjac._report import FAILED, PASSED, SKIPPED, STAGES, CheckReport, Criterion
from linjac._tolerances import Tolerances, check_tolerance, tolerances
from linjac._tree import short_dtype

FORMAT, VERSION = "linjac baseline", 1
_RECORD, _CHECK = "testing.record_baseline", "testing.check_baseline"

_ENVIRONMENT = {
    **dict.fromkeys(("linjac", "jax", "jaxlib", "python", "machine", "backend", "device"), str),
    "devices": int,
    "processes": int,
    "flags": [[str]],
}
_CASE = {
    "name": str,
    "digest": str,
    "tree": object,
    "leaves": [LEAF],
    "refused": ({"error": str, "raised": str, "message": (str, None), "sha256": str}, None),
    "observed": (OBSERVED, None),
    "tolerances": ({"rtol": str, "atol": str, "eps": str, "source": str, "given": bool}, None),
}
_BODY = {
    "fun": str,
    "inputs": ("stored", "hashed"),
    "argnums": (int, [int], None),
    "has_aux": bool,
    "environment": _ENVIRONMENT,
    "cases": [_CASE],
}


# recording ------------------------------------------------------------------------------------------------------------
def record_baseline(
    fun: Callable[..., Any],
    cases: Mapping[str, tuple[Any, ...] | Refused],
    path: str | os.PathLike[str],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    store_inputs: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Record what `fun` and its derivative give at a few points, in one file, for `check_baseline` later.

    For each case: the value f(x), J v and Jᵀ c along two fixed directions each, and for every block of J its Frobenius
    norm and two projections; with dtypes, key paths, tolerances and the environment. Aux is not recorded. J itself is
    never made: its columns or rows are swept a few at a time, min(m, n) products for J of shape (m, n), and beyond 4
    million entries it is sampled, by one product for each input leaf. A case costs one call of `fun`, four products
    and that sweep.

    The file is a `.npz` without pickles. It is written whole or not at all: an error leaves the old file as it was.

    Args:
        fun: The function, as for `linjac.linearize_many`.
        cases: From a name to a tuple of primals, or to `Refused((...), error=...)` for a case that has to be refused.
            Leaves are arrays of any dtype, PRNG keys, numbers, texts and None.
        path: The file.
        argnums: The positions to differentiate; None for all.
        has_aux: Whether `fun` returns a pair (value, aux).
        store_inputs: False keeps neither inputs nor results: hashes (SHA-256) of the inputs, norms and projections of
            the results. `check_baseline` is then given the same cases. Needed where inputs hold containers of a class
            of your own, or functions, which no file can give back.
        rtol: Tolerance of later checks, relative to the largest element of a leaf; by default from the dtypes.
        atol: Absolute tolerance of later checks.

    Raises:
        TypeError: An option or a leaf of a case cannot be recorded; every such leaf is named.
        ValueError: An option has a wrong value, or two cases have the same inputs.
        VerificationError: A `Refused` case is not refused, or with another error.
        OSError: The file cannot be written; `FileNotFoundError` where the folder of `path` does not exist.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from linjac import testing
        >>> path = os.path.join(tempfile.mkdtemp(), "sin.npz")
        >>> testing.record_baseline(jnp.sin, {"ones": (jnp.ones(3),), "zeros": (jnp.zeros(3),)}, path)
        >>> bool(testing.check_baseline(jnp.sin, path)), bool(testing.check_baseline(jnp.cos, path))
        (True, False)
    """
    check_callable(_RECORD, fun)
    check_flag(_RECORD, "has_aux", has_aux)
    check_flag(_RECORD, "store_inputs", store_inputs)
    limits = check_tolerance(_RECORD, "rtol", rtol), check_tolerance(_RECORD, "atol", atol)
    path = _check_path(_RECORD, path)
    given = check_cases(_RECORD, cases, foreign=not store_inputs)
    argnums = settled_argnums(argnums)
    for case in given:
        check_argnums(_RECORD, argnums, len(case.primals))
    arrays: dict[str, np.ndarray] = {}

    def keep(array: np.ndarray) -> str:
        arrays[f"a{len(arrays)}"] = array
        return f"a{len(arrays) - 1}"

    body = {
        "fun": _name_of(fun),
        "inputs": "stored" if store_inputs else "hashed",
        "argnums": _plain_argnums(argnums),
        "has_aux": bool(has_aux),
        "environment": {**asdict(environment()), "flags": [list(pair) for pair in environment().flags]},
        "cases": [_record(fun, case, argnums, has_aux, limits, keep if store_inputs else None) for case in given],
    }
    _archive.write(path, FORMAT, VERSION, body, arrays)


def _record(
    fun: Callable[..., Any],
    case: Case,
    argnums: Any,
    has_aux: bool,
    limits: tuple[float | None, float | None],
    keep: Keep | None,
) -> dict[str, Any]:
    """Run one case and put it into JSON."""
    entry = {
        "name": case.name,
        "digest": case.digest,
        "tree": case.described.tree,
        "leaves": [store(item, keep) for item in case.described.leaves],
        "refused": None,
        "observed": None,
        "tolerances": None,
    }
    if case.error is not None:
        return {**entry, "refused": _record_refusal(fun, case, argnums, has_aux, keep is not None)}
    try:
        seen = observe(fun, case.primals, argnums, has_aux)
    except Exception as err:
        err.add_note(f"linjac.{_RECORD}: raised by case {case.name!r}; nothing was written")
        raise
    chosen = tolerances(*limits, types_of(seen), seen.jaxpr)
    numbers = {name: float(getattr(chosen, name)).hex() for name in ("rtol", "atol", "eps")}
    return {
        **entry,
        "observed": pack(seen, keep),
        "tolerances": {**numbers, "source": chosen.source, "given": chosen.given},
    }


def _record_refusal(fun: Callable[..., Any], case: Case, argnums: Any, has_aux: bool, in_words: bool) -> dict[str, Any]:
    assert case.error is not None
    wanted = case.error
    try:
        observe(fun, case.primals, argnums, has_aux)
    except Exception as err:
        seen = refusal_of(err)
        if not isinstance(err, wanted):
            what = f"case {case.name!r} has to be refused with {wanted.__name__}, and raises {type(err).__name__}"
            raise VerificationError(compose(_RECORD, what, remedy="nothing was written")) from err
        return {
            "error": qualified(wanted),
            "raised": seen.classes[0],
            "message": seen.message if in_words else None,
            "sha256": _hash(seen.message),
        }
    what = f"case {case.name!r} has to be refused with {wanted.__name__}, and is accepted"
    raise VerificationError(compose(_RECORD, what, remedy="nothing was written"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _name_of(fun: Callable[..., Any]) -> str:
    inner = fun
    while hasattr(inner, "func"):
        inner = cast(Any, inner).func
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _plain_argnums(argnums: Any) -> Any:
    if argnums is None:
        return None
    if isinstance(argnums, Iterable):
        return [operator.index(item) for item in cast(Any, argnums)]
    return operator.index(argnums)


def _check_path(who: str, path: Any) -> str:
    try:
        name = os.fspath(path)
    except TypeError:
        name = None
    if not isinstance(name, str):
        raise TypeError(compose(who, f"path must be a str or a path, got {type(path).__name__}"))
    if who == _RECORD and not os.path.isdir(os.path.dirname(os.path.abspath(name))):
        raise FileNotFoundError(compose(who, f"there is no folder for {name!r}"))
    return name


# checking -------------------------------------------------------------------------------------------------------------
def check_baseline(
    fun: Callable[..., Any],
    path: str | os.PathLike[str],
    *,
    cases: Mapping[str, tuple[Any, ...] | Refused] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    """Run the cases of a baseline again, and compare leaf by leaf with what was recorded.

    Use it after a change of JAX, of the backend, of precision or of code. Fails where the structure, a shape or a
    dtype is another, where a number is farther off than the tolerance, where a NaN or an infinity is somewhere else,
    and where a case that was refused is accepted or raises another class of error. What differs in the environment is
    listed, and not judged. Costs what recording cost.

    Args:
        fun: The function, as it is now.
        path: A file of `record_baseline`. Nothing in it is executed, and a damaged one is refused.
        cases: The inputs, needed where the file holds only their hashes; recognised by hash, under any names and in
            any order. Given for a file that holds inputs, they have to be the same.
        rtol: Tolerance relative to the largest element of a leaf, in place of the recorded one.
        atol: Absolute tolerance, in place of the recorded one.

    Returns:
        A report with a criterion for each case and stage; true where nothing failed.

    Raises:
        VerificationError: The file is not a baseline, damaged, or written by a newer linjac.
        OSError: The file cannot be opened; `FileNotFoundError` where there is none.
        ValueError: `cases` are not the recorded ones, or are needed and missing.
        TypeError: An option has the wrong type.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from linjac import testing
        >>> path = os.path.join(tempfile.mkdtemp(), "square.npz")
        >>> testing.record_baseline(lambda x: x * x, {"one": (jnp.ones(3),)}, path)
        >>> report = testing.check_baseline(lambda x: 1.01 * x * x, path)
        >>> print(report.where, report.failed[0].differences[0])
        value output at [0]: error 0.01, allowed 1e-05 (norms: expected 1.73205, got 1.74937)
    """
    check_callable(_CHECK, fun)
    limits = check_tolerance(_CHECK, "rtol", rtol), check_tolerance(_CHECK, "atol", atol)
    path = _check_path(_CHECK, path)
    given = None if cases is None else check_cases(_CHECK, cases, foreign=True)
    body, arrays = _archive.read(_CHECK, path, FORMAT, VERSION)
    try:
        recorded, inputs = _load(path, body, arrays)
    except UnreadableError as err:
        _archive.refuse(_CHECK, path, str(err))
    if given is not None:
        points = match_cases(_CHECK, recorded, given)
    elif inputs is None:
        what = f"{os.path.basename(path)!r} holds the hashes of its inputs, not the inputs"
        raise ValueError(compose(_CHECK, what, remedy="pass cases: the inputs that were recorded"))
    else:
        points = inputs
    criteria = [_compare_environment(body["environment"])]
    used: list[Tolerances] = []
    for entry, primals in zip(recorded, points, strict=True):
        limit = _limits(entry["tolerances"], limits)
        used += [] if limit is None else [limit]
        criteria += _check(fun, entry, primals, body["argnums"], body["has_aux"], limit)
    coarse = max(used, key=lambda limit: limit.rtol, default=Tolerances(0.0, 0.0, 0.0, "every case is refused", True))
    ladder = ("environment", *STAGES)
    title = f"check_baseline({_name_of(fun)}, {os.path.basename(path)!r}), {len(recorded)} cases"
    ordered = tuple(sorted(criteria, key=lambda criterion: ladder.index(criterion.stage)))
    source = coarse.source if coarse.given else f"{coarse.source}, as recorded"
    return CheckReport(title, ordered, coarse.rtol, coarse.atol, source, environment())


def _limits(recorded: Mapping[str, Any] | None, given: tuple[float | None, float | None]) -> Tolerances | None:
    """The tolerances of one case: recorded, or given now."""
    if recorded is None:
        return None
    rtol, atol = given
    if rtol is None and atol is None:
        return Tolerances(recorded["rtol"], recorded["atol"], recorded["eps"], recorded["source"], recorded["given"])
    wide, near = recorded["rtol"] if rtol is None else rtol, recorded["atol"] if atol is None else atol
    return Tolerances(wide, near, recorded["eps"], "given", True)


def _compare_environment(recorded: Mapping[str, Any]) -> Criterion:
    flags = tuple((name, value) for name, value in recorded["flags"])
    plain: dict[str, Any] = {**recorded, "flags": flags}
    before = Environment(**plain)
    lines = before.differences(environment())
    name = "the environment of the recording"
    return Criterion(name, "environment", SKIPPED if lines else PASSED, "; ".join(lines) or "the same")


def _check(
    fun: Callable[..., Any],
    entry: Mapping[str, Any],
    primals: tuple[Any, ...],
    argnums: Any,
    has_aux: bool,
    limit: Tolerances | None,
) -> list[Criterion]:
    """The criteria of one case."""
    name = f"case {entry['name']!r}: "
    lost = _narrowed(primals)
    if lost:
        detail = "; ".join(lost) + " (jax_enable_x64 is off)"
        return [Criterion(f"{name}inputs", "shapes and dtypes", FAILED, detail)]
    refused = entry["refused"]
    try:
        how = None if refused is not None else entry["observed"].jacobian["how"]
        now = observe(fun, primals, argnums, has_aux, how)
    except Exception as err:
        if refused is not None:
            return [_refusal(name, refused, err)]
        seen = refusal_of(err)
        detail = f"raises {type(err).__name__}: {seen.message}"
        return [Criterion(f"{name}is accepted", "value", FAILED, detail)]
    if refused is not None:
        kind = refused["error"].rpartition(".")[2]
        return [Criterion(f"{name}is refused with {kind}", "value", FAILED, "it is accepted now")]
    assert limit is not None
    return compare_case(entry["name"], entry["observed"], now, limit)


def _narrowed(primals: tuple[Any, ...]) -> list[str]:
    """Inputs that JAX would cut down to fewer bits than were recorded."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(primals)
    return [
        f"primals{jax.tree_util.keystr(path)}: recorded {short_dtype(leaf.dtype)}, which cannot be had now"
        for path, leaf in leaves
        if isinstance(leaf, np.ndarray) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    ]


def _refusal(name: str, recorded: Mapping[str, Any], err: Exception) -> Criterion:
    kind = recorded["error"].rpartition(".")[2]
    seen = refusal_of(err)
    name = f"{name}is refused with {kind}"
    if recorded["error"] not in seen.classes:
        return Criterion(name, "value", FAILED, f"raises {type(err).__name__} now")
    if _hash(seen.message) == recorded["sha256"]:
        return Criterion(name, "value", PASSED)
    was = "" if recorded["message"] is None else f", was {recorded['message']!r}, is {seen.message!r}"
    return Criterion(name, "value", PASSED, f"with another message{was}")


# the file -------------------------------------------------------------------------------------------------------------
def _load(
    path: str, body: Any, arrays: dict[str, np.ndarray]
) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]] | None]:
    """The recorded cases and their inputs (None where there are only hashes), validated."""
    _archive.check(_CHECK, path, body, _BODY, "body")
    if any(len(pair) != 2 for pair in body["environment"]["flags"]):
        raise UnreadableError("the settings of the environment are malformed")
    stored = body["inputs"] == "stored"
    cases: list[dict[str, Any]] = []
    inputs: list[tuple[Any, ...]] = []
    for entry in body["cases"]:
        check_tree(entry["tree"], len(entry["leaves"]))
        digests = [leaf["sha256"] for leaf in entry["leaves"]]
        if entry["tree"][0] != "tuple" or join_digests(entry["tree"], digests) != entry["digest"]:
            raise UnreadableError(f"case {entry['name'][:80]!r} is not what its hash says")
        if stored:
            leaves = [restore(leaf, arrays).value for leaf in entry["leaves"]]
            inputs.append(assemble(entry["tree"], leaves))
        if (entry["refused"] is None) == (entry["observed"] is None):
            raise UnreadableError(f"case {entry['name'][:80]!r} is neither observed nor refused")
        if (entry["tolerances"] is None) != (entry["observed"] is None):
            raise UnreadableError(f"case {entry['name'][:80]!r} has no tolerances")
        cases.append(_load_case(entry, arrays))
    return cases, inputs if stored else None


def _load_case(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if entry["observed"] is None:
        return entry
    limit = entry["tolerances"]
    try:
        numbers = {name: float.fromhex(limit[name]) for name in ("rtol", "atol", "eps")}
    except (ValueError, OverflowError):
        raise UnreadableError("a tolerance is no number") from None
    if not all(0 <= number < float("inf") for number in numbers.values()):
        raise UnreadableError("a tolerance is negative or not finite")
    check_tree(entry["observed"]["tree"], len(entry["observed"]["value"]))
    return {**entry, "observed": unpack(entry["observed"], arrays), "tolerances": {**limit, **numbers}}


record_baseline.__module__ = check_baseline.__module__ = "linjac.testing"

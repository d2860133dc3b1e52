"""The cases of a baseline: checked when they are given, recognised by hash when they are given again.

This module must not know files, nor run any function.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax

from linjac._described import Described, describe, digest, digest_of, trouble
from linjac._errors import compose
from linjac._tree import short


@dataclass(frozen=True, repr=False)
class Refused:
    """A case of a baseline that has to be refused: the function raises this error at these primals.

    Attributes:
        primals: The arguments, a tuple.
        error: The class of the error, or one that it derives from.

    Example:
        >>> import jax.numpy as jnp
        >>> from linjac import testing
        >>> testing.Refused((jnp.ones(3),), error=TypeError)
        Refused((f32[3]), error=TypeError)
    """

    __module__ = "linjac.testing"

    primals: tuple[Any, ...]
    error: type[Exception] = Exception

    def __post_init__(self) -> None:
        """Refuse what cannot be a case."""
        who = "testing.Refused"
        if not isinstance(cast(Any, self.primals), tuple):
            what = f"primals must be a tuple, got {short(self.primals)}"
            raise TypeError(compose(who, what, remedy="write (x,) for one argument"))
        kind: Any = self.error
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            shown = kind.__name__ if isinstance(kind, type) else type(kind).__name__
            raise TypeError(compose(who, f"error must be a class of exceptions, got {shown}"))

    def __repr__(self) -> str:
        """Types, never values."""
        return f"Refused(({', '.join(map(short, self.primals))}), error={self.error.__name__})"


class Case(NamedTuple):
    """One case as it was given."""

    name: str
    primals: tuple[Any, ...]  # as a file would give them back: without weak types
    error: type[Exception] | None
    described: Described
    digest: str


def check_cases(who: str, cases: Any, *, foreign: bool) -> list[Case]:
    """The cases, with every leaf that cannot be recorded refused by name; `foreign` allows classes and functions."""
    if not isinstance(cases, Mapping):
        what = f"cases must map names to tuples of primals, got {type(cases).__name__}"
        raise TypeError(compose(who, what))
    given = cast(Mapping[Any, Any], cases)
    if not given:
        raise ValueError(compose(who, "there are no cases"))
    bad = [f"{name!r}" if isinstance(name, str) else type(name).__name__ for name in given if not _is_name(name)]
    if bad:
        raise TypeError(compose(who, "the name of a case must be a text that is not empty", bad))
    bad = [f"cases[{name!r}]: {short(case)}" for name, case in given.items() if not isinstance(case, tuple | Refused)]
    if bad:
        what = "a case must be a tuple of primals, or testing.Refused"
        raise TypeError(compose(who, what, bad, "write (x,) for one argument"))
    found = [(name, case.primals if isinstance(case, Refused) else case, case) for name, case in given.items()]
    described = [describe(primals, f"cases[{name!r}]") for name, primals, _ in found]
    bad = [line for one in described for line in trouble(one)]
    if bad:
        raise TypeError(compose(who, "these leaves cannot be recorded", bad))
    if not foreign:
        _refuse_foreign(who, described)
    done = [
        Case(name, _plain(primals, one), case.error if isinstance(case, Refused) else None, one, digest_of(one))
        for (name, primals, case), one in zip(found, described, strict=True)
    ]
    _refuse_twins(who, done)
    return done


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name)


def _plain(primals: tuple[Any, ...], described: Described) -> tuple[Any, ...]:
    treedef = jax.tree_util.tree_structure(primals)
    return jax.tree_util.tree_unflatten(treedef, [item.value for item in described.leaves])


def _refuse_foreign(who: str, described: Sequence[Described]) -> None:
    bad = [f"{line}, a container" for one in described for line in one.foreign]
    bad += [f"{item.name}: a function" for one in described for item in one.leaves if item.kind == "callable"]
    if bad:
        what = "a file cannot give these inputs back"
        remedy = "pass store_inputs=False, and the same cases to check_baseline"
        raise TypeError(compose(who, what, bad, remedy))


def _refuse_twins(who: str, cases: Sequence[Case]) -> None:
    first: dict[str, str] = {}
    for case in cases:
        if case.digest in first:
            raise ValueError(compose(who, f"cases {first[case.digest]!r} and {case.name!r} have the same inputs"))
        first[case.digest] = case.name


# again ----------------------------------------------------------------------------------------------------------------
def match_cases(who: str, recorded: Sequence[Mapping[str, Any]], given: Sequence[Case]) -> list[tuple[Any, ...]]:
    """The primals for each recorded case, found by hash, in the order of the file."""
    by_hash = {case.digest: case for case in given}
    known = {entry["digest"] for entry in recorded}
    missing = [entry for entry in recorded if entry["digest"] not in by_hash]
    unknown = {case.name: case for case in given if case.digest not in known}
    lines: list[str] = []
    for entry in missing:
        twin = unknown.pop(entry["name"], None)
        if twin is None:
            lines.append(f"{entry['name']!r}: recorded, and not among the cases")
        else:
            lines.append(f"{entry['name']!r}: not the inputs that were recorded ({_change(entry, twin)})")
    lines += [f"{name!r}: not recorded" for name in unknown]
    if lines:
        what = "the cases are not those of the baseline"
        raise ValueError(compose(who, what, lines, "pass the inputs that were recorded, all of them and no others"))
    return [by_hash[entry["digest"]].primals for entry in recorded]


def _change(entry: Mapping[str, Any], case: Case) -> str:
    """The first leaf in which a case differs from the recorded one of its name."""
    leaves = {leaf["name"].partition("]")[2]: leaf for leaf in entry["leaves"]}
    for item in case.described.leaves:
        path = item.name.partition("]")[2]
        if path not in leaves:
            return f"primals{path} is new"
        if leaves.pop(path)["sha256"] != digest(item):
            return f"primals{path} differs, now {short(item.value)}"
    return f"primals{next(iter(leaves))} is missing" if leaves else "the containers differ"

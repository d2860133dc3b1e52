"""What a function sees from outside, and whether that is still the same.

A traced program is valid while everything its function reads is what it was: closure cells, the globals that its code
names, its defaults, the attributes of a bound `self`, the functions of its own package that it calls, and the
leaves of dicts, lists and tuples reached that way. Identity is what counts, so a check costs no array
comparison: about 50 ns for each name. Integers inside containers are left out: they are counters more often than not.

A guard must not keep anything alive: it holds identities, and weak references that say when one of them has died.
"""

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_CONTAINERS = (dict, list, tuple)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), types.CodeType)
_ABSENT = object()
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy"})


def _package(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__", "")).partition(".")[0]


def _names(code: types.CodeType) -> Iterator[str]:
    """Every global or attribute name in a code object and in those nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class _Sites:
    """The places to look at: cells, (namespace, names) pairs, functions and owners."""

    def __init__(self) -> None:
        self.cells: list[types.CellType] = []
        self.namespaces: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self.functions: dict[int, weakref.ref[types.FunctionType]] = {}
        self.owners: list[weakref.ref[Any]] = []

    def watch(self, namespace: dict[str, Any], names: Iterator[str] | list[str]) -> list[Any]:
        """Add the names that exist in a namespace; returns what they are bound to."""
        _, watched = self.namespaces.setdefault(id(namespace), (namespace, {}))
        found = [name for name in names if name in namespace]
        watched.update(dict.fromkeys(found))
        return [namespace[name] for name in found]

    def add(self, function: types.FunctionType, home: str) -> None:
        """Add a function and, through it, the functions of its own package that it reaches."""
        if id(function) in self.functions:
            return
        self.functions[id(function)] = weakref.ref(function)
        names = list(dict.fromkeys(_names(function.__code__)))
        seen = self.watch(function.__globals__, names)
        for value in seen:
            if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _LIBRARIES:
                seen = seen + self.watch(value.__dict__, names)
        for cell in function.__closure__ or ():
            self.cells.append(cell)
            content = _content(cell)
            if isinstance(content, types.FunctionType) and _package(content) not in _LIBRARIES:
                self.add(content, _package(content))
        for value in seen:
            if isinstance(value, types.FunctionType) and _package(value) == home:
                self.add(value, home)

    def add_owner(self, owner: Any) -> None:
        """Add the attributes of an object and the methods of its class."""
        self.owners.append(weakref.ref(owner))
        for value in vars(type(owner)).values():
            if isinstance(value, types.FunctionType):
                self.add(value, _package(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet, or emptied
        return _ABSENT


def _leaves(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """What is inside plain dicts, lists and tuples, however deep; integers left out."""
    for value in values:
        if isinstance(value, _CONTAINERS):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _leaves(value.values() if isinstance(value, dict) else value, seen)
        elif type(value) is not int:
            yield value


_rules = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Guard:
    """A snapshot of what one function sees; `holds()` compares it with what there is now."""

    def __init__(self, function: Callable[..., Any], owner: object = None) -> None:
        sites = _Sites()
        self._stale = False
        method = function if isinstance(function, types.FunctionType) else vars(type(function)).get("__call__")
        if isinstance(method, types.FunctionType):
            sites.add(method, _package(method))
        for holder in (owner, None if method is function else function):
            if holder is not None and hasattr(holder, "__dict__") and not isinstance(holder, type):
                sites.add_owner(holder)
        self._cells = sites.cells
        self._namespaces = [(namespace.get, tuple(names)) for namespace, names in sites.namespaces.values() if names]
        self._functions = list(sites.functions.values())
        self._owners = sites.owners
        self._containers: tuple[int, ...] = ()
        values = self._values()
        self._containers = tuple(i for i, value in enumerate(values) if isinstance(value, _CONTAINERS))
        values += self._inside(values)
        self._keep = [self._hold(value) for value in values]
        self._identities = list(map(id, values))

    def holds(self) -> bool:
        """True while every value is the very object it was."""
        if self._stale:
            return False
        try:
            values = self._values()
        except (AttributeError, TypeError):  # a watched function or owner is gone
            return False
        if self._containers:
            values += self._inside(values)
        return self._identities == list(map(id, values))

    def _values(self) -> list[Any]:
        try:
            values: list[Any] = [cell.cell_contents for cell in self._cells]
        except ValueError:
            values = [_content(cell) for cell in self._cells]
        for get, names in self._namespaces:
            values += map(get, names)
        for function in self._functions:
            values += _rules(function())
        for owner in self._owners:
            values += vars(owner()).values()
        return values

    def _inside(self, values: list[Any]) -> list[Any]:
        """The leaves of the watched containers, in a fixed order."""
        inside = [values[i] for i in self._containers if i < len(values)]
        return list(_leaves((value for value in inside if isinstance(value, _CONTAINERS)), set()))

    def _hold(self, value: Any) -> Any:
        """Something that keeps this identity meaningful without keeping the object alive."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, _CONTAINERS):  # their leaves are watched one by one
            return None
        try:
            return weakref.ref(value, functools.partial(_mark_stale, weakref.ref(self)))
        except TypeError:
            return value


def _mark_stale(guard: weakref.ref[Guard], _: object) -> None:
    """A watched object died, so its identity may be reused: the snapshot holds no longer."""
    alive = guard()
    if alive is not None:
        alive._stale = True  # pyright: ignore[reportPrivateUsage]

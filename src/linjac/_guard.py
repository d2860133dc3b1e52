"""What a function sees from outside, and whether that is still the same.

A traced program is valid while everything its function reads is what it was: closure cells, the globals that its code
names, its defaults, the attributes of a bound `self` and of its class, the functions that it reaches in one of these
ways, and the leaves of dicts, lists, tuples and mutable pytrees (the modules of flax.nnx) found there. Identity is what
counts, so a check costs no array comparison: about 50 ns for each name. Integers inside containers are left out: they
are counters more often than not.

A guard must not keep anything alive: it holds identities, and weak references that say when one of them has died.
"""

import builtins
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

_CONTAINERS = (dict, list, tuple)
_PLAIN = (int, float, complex, str, bytes, bool, type(None), types.CodeType)
_ABSENT = object()
_LIBRARIES = frozenset({"jax", "jaxlib", "numpy", "linjac", "builtins", "functools"})


def _package(value: Any) -> str:
    """The top-level package that a function, class or module comes from."""
    name = value.__globals__.get("__name__", "") if isinstance(value, types.FunctionType) else value.__module__
    return str(name).partition(".")[0]


_KINDS = {
    "LOAD_GLOBAL": "global",
    "LOAD_NAME": "global",
    "LOAD_FROM_DICT_OR_GLOBALS": "global",
    "IMPORT_NAME": "module",
}


def _names(code: types.CodeType) -> Iterator[tuple[str, str]]:
    """Every name in a code object and in those nested in it, and whether it is a global, a module or an attribute."""
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            yield str(instruction.argval), _KINDS.get(instruction.opname, "attribute")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet, or emptied
        return _ABSENT


def _mro(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if _package(base) not in _LIBRARIES]


class _Sites:
    """The places to look at. Each is a function without arguments that lists what is there now."""

    def __init__(self) -> None:
        self.reads: list[Callable[[], Iterable[Any]]] = []
        self.home = ""
        self._seen: set[int] = set()
        self._trees: set[int] = set()
        self._kinds: list[type] = []
        self._names: dict[str, None] = {}

    def add(self, value: Any) -> None:
        """Add whatever a callable (or an object that is called) reads."""
        if isinstance(value, functools.partial):
            self.add(value.func)
            self.add_all(_leaves([value.args, value.keywords], set()))
        elif isinstance(value, types.MethodType):
            self.add_owner(value.__self__)
            self.add(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add_all([value.fget])
        elif isinstance(value, type):
            self.add_kind(value)
        elif type(value).__name__ in ("custom_jvp", "custom_vjp"):  # the user's primal and rules are attributes
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.reads.append(functools.partial(_attributes, weakref.ref(value), ()))
                self.add_all(vars(value).values())
        elif value is not None and callable(value) and _package(type(value)) not in _LIBRARIES:
            self.add_owner(value)

    def add_all(self, values: Iterable[Any]) -> None:
        """Add those of some values that can be called."""
        for value in values:
            if callable(value) or isinstance(value, staticmethod | classmethod | property):
                self.add(value)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if _package(function) in _LIBRARIES:  # jax.vmap(f), jax.grad(f): a wrapper
            self.add_all([getattr(function, "__wrapped__", None)])
            return
        self.home = self.home or _package(function)
        self.reads.append(functools.partial(_rules, weakref.ref(function)))
        found = dict.fromkeys(_names(function.__code__))
        names = [name for name, kind in found if kind == "attribute"]
        self._names.update(dict.fromkeys(names))
        if function.__closure__:
            self.reads.append(functools.partial(_cells, weakref.ref(function)))
            inside = _leaves(list(map(_content, function.__closure__)), set())
            self.add_all(inside)
            self._add_trees(inside)
        pending = self._watch(function.__globals__, [name for name, kind in found if kind == "global"])
        pending += [sys.modules[name] for name, kind in found if kind == "module" and name in sys.modules]
        self._add_values(pending, names)
        self.add_all(_leaves([function.__defaults__ or ()], set()))
        self.add_all((function.__kwdefaults__ or {}).values())
        for kind in self._kinds:
            self._add_attributes(kind, names)

    def _watch(self, namespace: dict[str, Any], names: list[str]) -> list[Any]:
        found = tuple(name for name in names if name in namespace or hasattr(builtins, name))
        if found:
            self.reads.append(functools.partial(map, namespace.get, found))
        return [namespace[name] for name in found if name in namespace]

    def _add_values(self, pending: list[Any], names: list[str]) -> None:
        for value in pending:  # grows: a module's attributes, named in the same code
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in _LIBRARIES and id(value) not in self._seen:
                    self._seen.add(id(value))
                    pending += self._watch(value.__dict__, names)
            elif _is_mutable_tree(value):
                self._add_trees([value])
                self.add_all([value] if _package(type(value)) == self.home else [])
            elif isinstance(value, type):
                self.add_all([value] if _package(value) == self.home else [])
            elif isinstance(value, types.FunctionType | functools.partial | types.MethodType | dict | list | tuple):
                inside = _leaves([value], set())
                self.add_all(leaf for leaf in inside if not isinstance(leaf, types.FunctionType) or self._near(leaf))
            elif type(value).__name__ in ("custom_jvp", "custom_vjp") or _package(type(value)) == self.home:
                self.add_all([value])

    def _add_trees(self, values: Iterable[Any]) -> None:
        """Watch the leaves of pytrees that can be changed in place, such as the modules of flax.nnx."""
        for value in values:
            if id(value) in self._trees or not _is_mutable_tree(value):
                continue
            self._trees.add(id(value))
            self.reads.append(functools.partial(_tree_leaves, weakref.ref(value)))

    def _near(self, function: types.FunctionType) -> bool:
        return _package(function) == self.home or _package(function) in _LIBRARIES

    def add_owner(self, owner: Any) -> None:
        """Add the attributes of an object, and of its class as far as its methods name them."""
        if isinstance(owner, type):
            self.add_kind(owner)
            return
        if id(owner) in self._seen or _package(type(owner)) in _LIBRARIES:
            return
        self._seen.add(id(owner))
        slots = [name for base in _mro(type(owner)) for name in _slot_names(base)]
        try:
            reference = weakref.ref(owner)
        except TypeError:
            reference = functools.partial(_identity, owner)
        self.reads.append(functools.partial(_attributes, reference, tuple(slots)))
        self.add_kind(type(owner))
        inside = _attributes(reference, tuple(slots))
        self.add_all(inside)
        self._add_trees(inside)

    def add_kind(self, kind: type) -> None:
        """Add a class: its `__call__`, and the attributes that the functions seen so far name."""
        if kind in self._kinds or _package(kind) in _LIBRARIES:
            return
        self._kinds.append(kind)
        self._add_attributes(kind, ["__call__", *self._names])

    def _add_attributes(self, kind: type, names: list[str]) -> None:
        bases = _mro(kind)
        found = tuple(name for name in names if any(name in vars(base) for base in bases))
        for base in bases if found else ():  # in every base: an override may come later
            self.home = self.home or _package(base)
            self.reads.append(functools.partial(_class_attributes, weakref.ref(base), found))
            self.add_all([vars(base)[name] for name in found if name in vars(base)])


def _slot_names(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]


def _is_mutable_tree(value: Any) -> bool:
    """Whether a value is an object of a registered pytree class that does not forbid changes."""
    if isinstance(value, type | types.FunctionType | types.ModuleType | functools.partial) or not _is_weak(value):
        return False
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    return not frozen and not jax.tree_util.all_leaves([value])


def _is_weak(value: Any) -> bool:
    return hasattr(type(value), "__weakref__")


# what is there now ----------------------------------------------------------------------------------------------------
def _identity(value: Any) -> Any:
    return value


def _rules(reference: Callable[[], Any]) -> Iterable[Any]:
    function = reference()
    keyword = function.__kwdefaults__
    return (function.__code__, *(function.__defaults__ or ()), *(keyword.values() if keyword else ()))


def _cells(reference: Callable[[], Any]) -> Iterable[Any]:
    cells = reference().__closure__
    try:
        return [cell.cell_contents for cell in cells]
    except ValueError:
        return [_content(cell) for cell in cells]


def _attributes(reference: Callable[[], Any], slots: tuple[str, ...]) -> list[Any]:
    owner = reference()
    values = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    return values + [getattr(owner, name, _ABSENT) for name in slots]


def _tree_leaves(reference: Callable[[], Any]) -> Iterable[Any]:
    return jax.tree_util.tree_leaves(reference())


def _class_attributes(reference: Callable[[], Any], names: tuple[str, ...]) -> Iterable[Any]:
    return map(vars(reference()).get, names)


def _leaves(values: Iterable[Any], seen: set[int]) -> list[Any]:
    """What is inside plain dicts, lists and tuples, however deep; integers left out."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if isinstance(value, _CONTAINERS):
            if id(value) not in seen:
                seen.add(id(value))
                found += _leaves(value.values() if isinstance(value, dict) else value, seen)
        elif kind is not int:
            found.append(value)
    return found


def _look(container: Any, seen: set[int], found: list[Any], places: list[int]) -> None:
    """Add what `_leaves` finds in one container, and where: keys of dicts, and positions of what is nested."""
    if id(container) in seen:
        return
    seen.add(id(container))
    keyed = isinstance(container, dict)
    for place, value in container.items() if keyed else enumerate(container):
        if isinstance(value, _CONTAINERS):
            before = len(found)
            _look(value, seen, found, places)
            if len(found) > before:  # what holds counters alone has no place
                places.append(hash(place))
        elif type(value) is not int:
            found.append(value)
            if keyed:
                places.append(hash(place))


class Guard:
    """A snapshot of what some callables see; `holds()` compares it with what there is now."""

    def __init__(self, *callables: Any) -> None:
        sites = _Sites()
        self._stale = False
        for value in callables:
            sites.add(value)
        self._reads = sites.reads
        self._containers: tuple[int, ...] = ()
        values = self._values()
        self._containers = tuple(i for i, value in enumerate(values) if isinstance(value, _CONTAINERS))
        self._places = self._look_inside(values)
        self._keep = [self._hold(value) for value in values]
        self._identities = list(map(id, values))

    def holds(self) -> bool:
        """True while every value is the very object it was."""
        if self._stale:
            return False
        try:
            values = self._values()
        except (AttributeError, TypeError):  # a watched function, class or owner is gone
            return False
        if self._containers and self._look_inside(values) != self._places:
            return False
        return self._identities == list(map(id, values))

    def _values(self) -> list[Any]:
        values: list[Any] = []
        for read in self._reads:
            values += read()
        return values

    def _look_inside(self, values: list[Any]) -> list[int]:
        """Add the leaves of the watched containers to the values, in a fixed order; returns where they are."""
        inside = [values[i] for i in self._containers if i < len(values)]
        places: list[int] = []
        seen: set[int] = set()
        for value in inside:
            if isinstance(value, _CONTAINERS):
                _look(value, seen, values, places)
        return places

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

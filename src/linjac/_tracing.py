"""Trace a function once for each signature, and keep the program for as long as the function lives.

The cache holds functions weakly. An entry is valid while its guard holds (see `_guard`); a program within it is found
by JAX's own trace cache, whose jaxpr is the same object for the same types in the same context (precision, x64, mesh,
named axes). What a function captures from an enclosing trace is read anew at every call.
"""

import collections
import contextlib
import contextvars
import functools
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from linjac import _watch
from linjac._arguments import TRACED, Call, Layout, Target
from linjac._constants import surface
from linjac._errors import PerformanceWarning, compose
from linjac._guard import Guard
from linjac._program import Outputs, TracedProgram, alive, describe_outputs, first_line, needs_values
from linjac._tree import (
    PyTreeDef,
    align,
    in_trace,
    inside_transformation,
    is_inexact,
    is_none,
    key_paths,
    rebuild,
    short,
    type_of,
    varying_axes,
)

RETRACES = 4  # traces of one code location at one signature before the warning
SIGNATURES = 64  # programs kept for one function

_PACKAGE = os.path.dirname(__file__) + os.sep


class Output(NamedTuple):
    """What a traced function returned, beside arrays."""

    value: Outputs
    aux: PyTreeDef
    aux_statics: tuple[Any, ...]  # one entry a leaf: its value, or TRACED

    def rebuild_value(self, who: str, outs: Sequence[Any]) -> Any:
        """The value of one call from its flat outputs; None where it was not computed."""
        if not outs and self.value.total:
            return None
        leaves = [None if number is None else outs[number] for number in self.value.numbers]
        return rebuild(who, self.value.treedef, leaves)

    def rebuild_aux(self, outs: Sequence[Any]) -> Any:
        """The aux of one call from its flat outputs."""
        leaves = iter(outs[self.value.total :])
        statics = [next(leaves) if static is TRACED else static for static in self.aux_statics]
        return jax.tree_util.tree_unflatten(self.aux, statics)


class _Static:
    """A pytree without leaves: carries an `Output` out of a trace."""

    def __init__(self, output: Output) -> None:
        self.output = output


jax.tree_util.register_pytree_node(_Static, lambda node: ((), node), lambda node, _: node)


class _Mark:
    """A pytree without leaves: the name of one context."""


jax.tree_util.register_pytree_node(_Mark, lambda node: ((), node), lambda node, _: node)
_marked = jax.jit(_Mark)


def _context() -> _Mark:
    """An object that is the same where JAX's own caches say that the context is: precision, x64, mesh, named axes."""
    with jax.ensure_compile_time_eval():
        return _marked()


class Traced(NamedTuple):
    """A program with the data of one call."""

    program: TracedProgram
    output: Output
    constants: list[Any]
    point: list[Any]


def warn(text: str) -> None:
    """A PerformanceWarning that points at the first line outside linjac."""
    warnings.warn(text, PerformanceWarning, stacklevel=2, skip_file_prefixes=(_PACKAGE,))


# one signature --------------------------------------------------------------------------------------------------------
def call_flat(who: str, fun: Callable[..., Any], layout: Layout, has_aux: bool, leaves: Sequence[Any]) -> Any:
    """Call the function on flat traced leaves: flat outputs (aux arrays last) and an `Output`."""
    args, kwargs = layout.unflatten(leaves)
    value = fun(*args, **kwargs)
    aux = None
    if has_aux:
        if not (isinstance(value, tuple | list) and len(value) == 2):
            what = f"has_aux=True needs fun to return a pair (value, aux), got {short(value)}"
            raise TypeError(compose(who, what))
        value, aux = value
    outs = [None if leaf is None else _as_array(leaf) for leaf in jax.tree.leaves(value, is_leaf=is_none)]
    if any(out is _NO_ARRAY for out in outs):
        given = zip(key_paths(value, "output"), jax.tree.leaves(value, is_leaf=is_none), strict=True)
        bad = [f"{name}: {short(leaf)}" for name, leaf in given if leaf is not None and type_of(leaf) is None]
        raise TypeError(compose(who, "fun returned something that is no array", bad, "return it as aux (has_aux=True)"))
    aux_leaves, aux_tree = jax.tree_util.tree_flatten(aux)
    aux_leaves = [jnp.asarray(leaf) if _is_numeric(leaf) else leaf for leaf in aux_leaves]  # arrays are never shared
    statics = tuple(TRACED if isinstance(leaf, jax.Array) else leaf for leaf in aux_leaves)
    output = Output(describe_outputs(value), aux_tree, statics)
    arrays = [leaf for leaf in aux_leaves if isinstance(leaf, jax.Array)]
    return [out for out in outs if out is not None] + arrays, _Static(output)


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and type_of(leaf) is not None


_NO_ARRAY = object()


def _as_array(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    return _NO_ARRAY if type_of(leaf) is None else jnp.asarray(leaf)


class _Record(NamedTuple):
    """One traced program, kept under the jaxpr that JAX's trace cache returned."""

    jaxpr: Any
    program: TracedProgram
    output: Output
    constants: list[Any] | None  # None: captured from an enclosing trace, read anew at every call
    added: list[Any]  # constants beyond those of the trace


class _Signature:
    """One function with one layout of its arguments: traces once for each set of types and context."""

    def __init__(self, who: str, target: Target, layout: Layout, has_aux: bool) -> None:
        anchor, owner = _weak(target.anchor), _weak(target.owner)
        is_tree = target.is_tree

        def flat(*leaves: Any) -> Any:
            fun = Target(anchor(), owner(), is_tree).bind()
            return call_flat(who, fun, layout, has_aux, leaves)

        self.who = who
        self.jitted = jax.jit(flat)
        self.has_aux = has_aux
        self.records: dict[int, _Record] = {}
        self.known: dict[Any, Traced] = {}  # by context and types: what is found without asking JAX for its jaxpr
        self.by_value: dict[Any, str] = {}  # by types, the error that said that fun needs values: op by op from then on
        self.warned = False
        self.guard: Guard | None = None
        self.counted: set[Any] = set()  # the kind of each trace
        self.lock = threading.RLock()  # one thread traces, the others find what it traced

    def recall(self, call: Call) -> Traced | None:
        """The program for this call where it was traced before; None inside a trace, and for the first of its kind.

        It costs 4 us where `trace` costs 10, and 0.1 us a leaf where that costs 5 (tests/benchmarks/bench_sweeps.py).
        """
        if in_trace(call.traced):
            return None
        known = self.known.get(_key(call))
        return None if known is None else known._replace(point=call.traced)

    def remember(self, call: Call, traced: Traced) -> None:
        """Keep a program for `recall`, unless it belongs to an enclosing trace or JAX does not cache (disable_jit)."""
        key = _key(call)
        if not in_trace(call.traced, traced.constants) and None not in key and key[0] is _context():
            self.known[key] = traced._replace(point=[])

    def trace(self, call: Call) -> Traced:
        """The program for this call, from the cache or new."""
        point = call.traced if not in_trace(call.traced) else align(call.traced)[0]
        traced = self.jitted.trace(*point)
        record = self.records.get(id(traced.jaxpr))
        if record is not None and record.constants is not None and record.jaxpr is traced.jaxpr:
            return Traced(record.program, record.output, record.constants, point)
        captured = list(traced.closure_convert()[0])
        if any(map(varying_axes, captured)):  # inside shard_map: the point has to vary where a captured value does
            point = align(point, captured)[0]
            traced = self.jitted.trace(*point)
            captured = list(traced.closure_convert()[0])
        jaxpr = traced.jaxpr
        record = self.records.get(id(jaxpr))
        if record is None or record.jaxpr is not jaxpr:
            output: Output = traced.out_info[1].output
            _refuse_refs(self.who, captured)
            record, constants = _build(self.who, call._replace(traced=point), jaxpr, output, captured)
            _watch.traced(*_subject(call.target))
            self._watch(call)
            if not in_trace(record.added):
                self.records[id(jaxpr)] = record
        else:
            everything = [*record.added, *captured]
            constants = [everything[i] for i in record.program.distinct]
        return Traced(record.program, record.output, constants, point)

    def _watch(self, call: Call) -> None:
        """Guard what was just traced: after the trace, which may itself have written to what it reads."""
        statics = [leaf for leaf in call.layout.statics if callable(leaf)]
        self.guard = Guard(*call.target.watched(), *statics)
        if _kind(call) not in self.counted:
            self.counted.add(_kind(call))
            _count(call, has_aux=self.has_aux)


def _key(call: Call) -> tuple[Any, ...]:
    """Context and types of a call; a type that stands for an argument (abstract) is None."""
    return (_context(), *[getattr(leaf, "aval", None) for leaf in call.traced])


def _refuse_refs(who: str, captured: Sequence[Any]) -> None:
    if any(isinstance(value, jax.Ref) for value in captured):
        what = "fun reads or writes a mutable Ref from outside, which has no derivative"
        raise TypeError(compose(who, what, remedy="pass the value in as an argument, and return what it should become"))


def _refuse_wide(who: str, types: Sequence[Any]) -> None:
    """Arrays of 64 bits made elsewhere, where JAX makes no others of them: seeds and point would not fit."""
    if jax.config.jax_enable_x64:
        return
    wide = [aval for aval in types if is_inexact(aval) and jax.dtypes.canonicalize_dtype(aval.dtype) != aval.dtype]
    if wide:
        bad = [f"{short(aval)}" for aval in wide]
        what = "arguments have 64 bits while jax_enable_x64 is off"
        raise TypeError(compose(who, what, bad, "turn jax_enable_x64 on, or cast them to 32 bits"))


def _build(who: str, call: Call, jaxpr: Any, output: Output, captured: list[Any]) -> tuple[_Record, list[Any]]:
    """Trace the linear program of a new signature."""
    _refuse_wide(who, [var.aval for var in jaxpr.invars])
    opened, hidden = surface(jaxpr.replace(consts=None), [*captured, *call.traced])
    constants = [*hidden, *captured]
    program = TracedProgram(call, opened, constants, output.value)
    added = program.linearize(constants, call.traced)
    added, hidden, captured = map(_arrays, (added, hidden, captured))
    everything = [*added, *hidden, *captured]
    constants = [everything[i] for i in program.distinct]
    record = _Record(jaxpr, program, output, None if in_trace(captured) else constants, [*added, *hidden])
    return record, constants


def _arrays(constants: Sequence[Any]) -> list[Any]:
    if in_trace(constants):
        return list(constants)
    with jax.ensure_compile_time_eval():
        return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in constants]


# the cache ------------------------------------------------------------------------------------------------------------
def _weak(value: Any) -> Callable[[], Any]:
    """A weak reference where the object allows it (None and a few builtins do not)."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_identity, value)


def _identity(value: Any) -> Any:
    return value


class _Entry:
    """What is known of one function: its signatures."""

    def __init__(self) -> None:
        self.signatures: collections.OrderedDict[Any, _Signature] = collections.OrderedDict()
        self.lock = threading.RLock()

    def signature(self, who: str, call: Call, has_aux: bool) -> _Signature:
        """The signature of a call, found or made; one whose guard fails is made anew."""
        key = (call.key, has_aux)
        try:
            found = self.signatures.get(key)
        except (TypeError, ValueError) as err:
            raise _incomparable(who, err) from err
        if found is not None and (found.guard is None or found.guard.holds()):
            return found
        with self.lock:
            found = self.signatures.get(key)
            if found is None or (found.guard is not None and not found.guard.holds()):
                if _watch.active or _watch.here.state.call:
                    self.admit(who, call, found)
                found = self.signatures[key] = _Signature(who, call.target, call.layout, has_aux)
            while len(self.signatures) > SIGNATURES:
                self.signatures.popitem(last=False)
            return found

    def admit(self, who: str, call: Call, replaced: _Signature | None = None) -> None:
        """Tell the active monitors that a new signature is about to be traced; they may refuse it."""
        known = sum(len(signature.counted) for signature in self.signatures.values() if signature is not replaced)
        _watch.admit_signature(who, *_subject(call.target), known)


def _incomparable(who: str, err: Exception) -> TypeError:
    what = "a class among the arguments has metadata that cannot be compared or hashed"
    said = f"{type(err).__name__}: {first_line(err)}"
    return TypeError(compose(who, what, [said], "register its arrays as data, not as metadata (static fields)"))


_lock = threading.RLock()
_entries: dict[tuple[int, int], tuple[Callable[[], Any], Callable[[], Any], _Entry]] = {}


def _entry(target: Target) -> _Entry:
    key = (id(target.anchor), id(target.owner))
    found = _entries.get(key)
    if found is not None and found[0]() is target.anchor and found[1]() is target.owner:
        return found[2]
    entry = _Entry()
    try:
        anchor: Callable[[], Any] = weakref.ref(target.anchor, functools.partial(_forget, key))
        owner: Callable[[], Any] = (
            weakref.ref(target.owner, functools.partial(_forget, key)) if target.owner is not None else _nothing
        )
    except TypeError:
        return entry  # cannot be held weakly: not kept
    with _lock:
        found = _entries.get(key)
        if found is not None and found[0]() is target.anchor and found[1]() is target.owner:
            return found[2]
        _entries[key] = (anchor, owner, entry)
    return entry


def _nothing() -> None:
    return None


def _forget(key: tuple[int, int], reference: Any) -> None:
    found = _entries.get(key)
    if found is not None and reference in (found[0], found[1]):
        _entries.pop(key, None)


# repeated retraces ----------------------------------------------------------------------------------------------------
_traces: collections.Counter[Any] = collections.Counter()
_REMEMBERED = 100_000
_uncounted = contextvars.ContextVar("_uncounted", default=False)


@contextlib.contextmanager
def uncounted() -> Generator[None]:
    """Traces made here do not count towards the warning: those of a check, which is there to trace anew."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


def _code(target: Target) -> Any:
    """The code object of a function, or of the class of a callable object."""
    if hasattr(target.anchor, "__wrapped__"):  # jax.grad(f), jax.vmap(f): the user's own function
        return getattr(inspect.unwrap(target.anchor), "__code__", None)
    kind = target.anchor if isinstance(target.anchor, type) else type(target.anchor)
    return getattr(target.anchor, "__code__", None) or getattr(vars(kind).get("__call__"), "__code__", None)


def _subject(target: Target) -> tuple[str, Any]:
    """The name of a function, and what is the same for all that are made at its place in the code."""
    name, code = _watch.name_of(target.anchor), _code(target)
    return name, name if code is None else (code.co_filename, code.co_firstlineno, name)


def _types(call: Call) -> tuple[Any, ...]:
    return tuple((leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in call.traced)


def _kind(call: Call) -> tuple[Any, ...]:
    """What one trace of a signature serves: types and context."""
    return _types(call), _context()


def _place(code: Any) -> str:
    return f"{code.co_filename}:{code.co_firstlineno}"


def _count(call: Call, *, has_aux: bool) -> None:
    """Count the traces of one code location at one signature; warn, once, when they repeat."""
    code = _code(call.target)
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in call.traced)
    if code is None or abstract or _uncounted.get() or in_trace(call.traced) or inside_transformation():
        return
    tree, argnums, statics = call.key
    anchor = call.target.anchor  # what wraps the code, and the context, make another function of it
    wrapped = (type(anchor), hash(getattr(anchor, "__code__", None)), has_aux)
    loose = tuple((place, kind, None if kind is int or callable(leaf) else leaf) for place, kind, leaf in statics)
    key = (code.co_filename, code.co_firstlineno, hash(code), wrapped, hash((tree, argnums, loose, _kind(call))))
    with _lock:
        if len(_traces) > _REMEMBERED:
            _traces.clear()
        _traces[key] += 1
        repeated = _traces[key] == RETRACES
    if repeated:
        warn(
            f"linjac: {code.co_name} at {_place(code)} was traced {RETRACES} times at one signature, and is compiled "
            "anew each time: the function is made anew, or something that it closes over, or a Python int among its "
            "arguments, changes between calls. Define it once, and pass what changes as an array outside argnums"
        )


class ByValue(NamedTuple):
    """The answer for a function that needs values in Python: it has to run op by op."""

    signature: _Signature
    code: Any
    error: str

    def warn(self) -> None:
        """Say so, once for each signature; called after the op-by-op run, which may fail like the function itself.

        Not where the user asked JAX for that (`jax.disable_jit`).
        """
        if not self.signature.warned and not jax.config.jax_disable_jit:
            self.signature.warned = True
            where = "fun" if self.code is None else f"{self.code.co_name} at {_place(self.code)}"
            warn(
                f"linjac: {where} needs the value of an array in Python ({self.error}), so it runs op by op, "
                "which is slow. Use jax.lax.cond, jax.lax.while_loop or jnp.where, or pass jit=False to accept it"
            )


def refuse_types(who: str, call: Call, root: str) -> None:
    """A function that needs values cannot be traced with types alone."""
    bad = call.types_given(root)
    if bad:
        what = "fun needs the values of its arguments in Python, and these are types"
        raise TypeError(compose(who, what, bad, "pass arrays"))


def trace(who: str, call: Call, *, has_aux: bool = False) -> Traced | ByValue:
    """The program of a call with its data."""
    entry = _entry(call.target)
    signature = entry.signature(who, call, has_aux)
    known = signature.recall(call)
    if known is not None:
        return known
    code = _code(call.target)
    met = signature.by_value.get(_types(call)) if signature.by_value else None
    if met is not None:
        return ByValue(signature, code, met)
    try:
        with signature.lock:
            known = signature.recall(call)  # another thread may have traced it meanwhile
            if known is not None:
                return known
            if (_watch.active or _watch.here.state.call) and _kind(call) not in signature.counted:
                entry.admit(who, call)
            traced = alive(who, signature.trace, call)
            signature.remember(call, traced)
    except Exception as err:
        if not needs_values(err):
            raise
        if not in_trace(call.traced):  # there it is for an enclosing transformation to know values, or not
            signature.by_value[_types(call)] = type(err).__name__
            signature.counted.add(_kind(call))
        return ByValue(signature, code, type(err).__name__)
    return traced

"""What one monitor counts, and what it refuses: rows by entry point and function, histograms, and the flags that wait.

It is told of calls by `_watch` and gives copies. It must not know how a monitor is turned on, nor programs or plans.
"""

import bisect
import collections
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from linjac import _watch
from linjac._errors import LimitError, MemoryBudgetError, ModeError, PointError, TangentError, compose
from linjac._tree import in_trace, is_inexact, short
from linjac._watch import Call, Work

BOUNDS = (*(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)  # seconds
ROWS = 1000  # pairs of entry point and function that are told apart, and functions
KINDS = 100  # errors, or lists of shapes, that are told apart within one pair
OTHERS = "(others)"
NOTED = 64  # calls that wait to be summed up at most
PENDING = 64  # non-finite flags that wait on the device at most
LEAVES = 8  # types shown of one call

_REMEDIES = {
    "max_directions": "give fewer directions in a call, or raise the limit",
    "max_result_bytes": "ask for less in a call (fewer directions, products instead of a Jacobian), or raise the limit",
    "max_signatures": "bring inputs to a few shapes (pad them), pass what changes as an array, define functions once, "
    "or raise the limit",
}


# a call, whether it was refused and its kind of error, its types, its flags
type _Noted = tuple[Call, tuple[bool, str] | None, str | None, list[Any] | None]


class Asked(NamedTuple):
    """What a monitor counts beyond what is always counted."""

    completion: bool
    non_finite: bool
    shapes: bool


class Counts:
    """The counts of one monitor, with its limits by name."""

    def __init__(self, limits: Mapping[str, int | None], asked: Asked) -> None:
        self.asked = asked
        self.completion, self._non_finite, self._shapes = asked
        self.limited = any(limit is not None for limit in limits.values())
        self._max_directions = limits["max_directions"]
        self._max_result_bytes = limits["max_result_bytes"]
        self._max_signatures = limits["max_signatures"]
        self._lock = threading.RLock()  # around every count: a call is in a copy whole, or not at all
        self._fetching = threading.RLock()  # around what waits for a device
        self._log: collections.deque[_Noted] = collections.deque()  # calls not yet in the rows
        self._rows: dict[tuple[str, str], _Row] = {}
        self._functions: dict[str, _Function] = {}
        self._outside: dict[str, _Function] = {}
        self._traces: collections.Counter[Any] = collections.Counter()  # by place in the code
        self._pending: collections.deque[tuple[_Row, list[Any]]] = collections.deque()

    def clear(self) -> None:
        """Begin from zero."""
        with self._fetching, self._lock:
            for counted in (self._log, self._rows, self._functions, self._outside, self._traces, self._pending):
                counted.clear()

    def copy(self) -> dict[str, Any]:
        """All of it, as dicts and lists."""
        with self._fetching:
            with self._lock:
                self._sum()
                rows = dict(sorted(self._rows.items()))
                counted = {id(row): row.counts(self.asked) for row in rows.values()}
                functions = {name: function.counts() for name, function in sorted(self._functions.items())}
                outside = {name: function.compiled() for name, function in sorted(self._outside.items())}
                taken = list(self._pending)
                self._pending.clear()
            for row, bad, failure in self._answer(taken):  # the flags of the calls that were copied
                counted[id(row)]["non_finite"] += bad
                if failure:
                    _increase(counted[id(row)]["failed"], failure)
        entries = [{"entry": key[0], "function": key[1], **counted[id(row)]} for key, row in rows.items()]
        totals = _totals(entries, list(functions.values()))
        return {"entries": entries, "functions": functions, "outside": outside, "totals": totals}

    # limits: asked before the work ------------------------------------------------------------------------------------
    def admit(self, entry: str, work: Work) -> None:
        """Refuse work beyond a limit."""
        directions, _, _, result_bytes = work
        limit = self._max_directions
        if limit is not None and directions > limit:
            raise _beyond(entry, "max_directions", limit, directions)
        limit = self._max_result_bytes
        if limit is not None and result_bytes > limit:
            raise _beyond(entry, "max_result_bytes", limit, result_bytes)

    def admit_signature(self, entry: str, function: str, place: Any, known: int) -> None:
        """Refuse one more trace of a function beyond the limit."""
        limit = self._max_signatures
        if limit is None:
            return
        wanted = max(known, self._traces[place]) + 1
        if wanted > limit:
            raise _beyond(entry, "max_signatures", limit, wanted, f" of {function}")

    # what happens -----------------------------------------------------------------------------------------------------
    def finished(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Note one call; those noted are summed up some at a time, which costs each of them less."""
        fault = None if error is None else (_is_refusal(error), _kind(error))
        shapes = _described(call.given) if self._shapes else None
        flags = None
        if self._non_finite and error is None and not call.traced:
            flags = _watch.muted(_flags, call.look(result) if call.look else result)
        self._log.append((call, fault, shapes, flags))
        if len(self._log) >= NOTED:
            with self._lock:
                self._sum()
            if len(self._pending) > PENDING:
                self._fetch(PENDING // 2)

    def traced(self, function: str, place: Any, again: bool) -> None:
        """Count one trace of a function."""
        with self._lock:
            if len(self._traces) < 10 * ROWS or place in self._traces:
                self._traces[place] += 1
            counted = _function(self._functions, function)
            counted.traces += 1
            counted.retraces += again

    def compiled(self, call: Call | None, name: str, seconds: float) -> None:
        """Count one program compiled, in a call or outside any."""
        with self._lock:
            counted = _function(self._outside, name) if call is None else _function(self._functions, call.function)
            counted.compiles += 1
            counted.seconds += seconds

    def _sum(self) -> None:
        """Take what was noted into the rows; under the lock."""
        for _ in range(len(self._log)):
            call, fault, shapes, flags = self._log.popleft()
            key = (call.entry, call.function)
            row = self._rows.get(key) or self._new_row(*key)
            row.add(call, fault, self.completion)
            if shapes is not None:
                _increase(row.shapes, shapes)
            if flags:
                self._pending.append((row, flags))

    def _new_row(self, entry: str, function: str) -> "_Row":
        return self._rows.setdefault((entry, function if len(self._rows) < ROWS else OTHERS), _Row())

    def _fetch(self, left: int) -> None:
        """Fetch the flags that wait on the device, but for the newest `left`."""
        with self._fetching:
            with self._lock:
                taken = [self._pending.popleft() for _ in range(len(self._pending) - left)]
            self._answer(taken)

    def _answer(self, taken: list[tuple["_Row", list[Any]]]) -> list[tuple["_Row", bool, str]]:
        answers = [(row, *_answer(flags)) for row, flags in taken]
        with self._lock:
            for row, bad, failure in answers:
                row.non_finite += bad
                if failure:
                    _increase(row.failed, failure)
        return answers


def _beyond(entry: str, name: str, allowed: int, wanted: int, whose: str = "") -> LimitError:
    what = f"the call is beyond a limit of an active linjac.Monitor: {name}{whose}"
    return LimitError(compose(entry, what, [f"allowed {allowed:,}, wanted {wanted:,}"], _REMEDIES[name]))


# counts ---------------------------------------------------------------------------------------------------------------
class _Histogram:
    """Seconds by bucket."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def copy(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "sum": self.sum}


class _Row:
    """What is counted for one entry point and one function."""

    def __init__(self) -> None:
        self.calls = self.traced_calls = self.directions = self.sweeps = self.chunks = self.non_finite = 0
        self.dispatch, self.completion = _Histogram(), _Histogram()
        self.refused: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.shapes: dict[str, int] = {}

    def add(self, call: Call, fault: tuple[bool, str] | None, completion: bool) -> None:
        """One call; `fault` is whether linjac refused it, and the kind of error."""
        if call.traced:
            self.traced_calls += 1
        else:
            self.calls += 1
        if fault is not None:
            _increase(self.refused if fault[0] else self.failed, fault[1])
            return
        if call.traced:
            return
        if call.work is not None:
            directions, sweeps, chunks, _ = call.work
            self.directions += directions
            self.sweeps += sweeps
            self.chunks += chunks
        self.dispatch.add(call.dispatch)
        if completion:
            self.completion.add(call.completion)

    def counts(self, asked: Asked) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "traced_calls": self.traced_calls,
            "directions": self.directions,
            "sweeps": self.sweeps,
            "chunks": self.chunks,
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "dispatch": self.dispatch.copy(),
            "completion": self.completion.copy() if asked.completion else None,
            "non_finite": self.non_finite if asked.non_finite else None,
            "shapes": dict(self.shapes) if asked.shapes else None,
        }


class _Function:
    """What is counted for one function."""

    def __init__(self) -> None:
        self.traces = self.retraces = self.compiles = 0
        self.seconds = 0.0

    def compiled(self) -> dict[str, Any]:
        return {"compiles": self.compiles, "compile_seconds": self.seconds}

    def counts(self) -> dict[str, Any]:
        return {"traces": self.traces, "retraces": self.retraces, **self.compiled()}


def _function(functions: dict[str, _Function], name: str) -> _Function:
    if name not in functions and len(functions) >= ROWS:
        name = OTHERS
    return functions.setdefault(name, _Function())


def _increase(counts: dict[str, int], kind: str) -> None:
    if kind not in counts and len(counts) >= KINDS:
        kind = OTHERS
    counts[kind] = counts.get(kind, 0) + 1


def _totals(entries: list[dict[str, Any]], functions: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {name: sum(row[name] for row in entries) for name in ("calls", "traced_calls", *_WORK)}
    totals |= {name: sum(sum(row[name].values()) for row in entries) for name in ("refused", "failed")}
    totals["non_finite"] = sum(row["non_finite"] or 0 for row in entries)
    return totals | {name: sum(row[name] for row in functions) for name in ("traces", "retraces", "compiles")}


_WORK = ("directions", "sweeps", "chunks")


# what is told of a call -----------------------------------------------------------------------------------------------
_REFUSALS = frozenset({TypeError, ValueError, LimitError, MemoryBudgetError, ModeError, PointError, TangentError})


def _is_refusal(error: BaseException) -> bool:
    """Whether linjac raised it: an error of its own, or a builtin one with a message that `compose` made."""
    if type(error) not in _REFUSALS:
        return False
    return bool(error.args) and isinstance(error.args[0], str) and error.args[0].startswith("linjac.")


def _kind(error: BaseException) -> str:
    """The class of an error, and for a tangent what is wrong with it."""
    kind = getattr(error, "kind", "") if _is_refusal(error) else ""
    return f"{type(error).__name__}: {kind}" if kind else type(error).__name__


def _described(given: Any) -> str:
    """The types of the arguments that are arrays or numbers, never a value."""
    leaves = jax.tree_util.tree_leaves(given)
    more = [f"and {len(leaves) - LEAVES} more"] if len(leaves) > LEAVES else []
    return ", ".join([*map(short, leaves[:LEAVES]), *more])


@jax.jit
def _any_non_finite(leaves: list[Any]) -> jax.Array:
    return ~jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _flags(result: Any) -> list[Any]:
    """One scalar on the device that says whether a result has a NaN or an infinity; several if it is on several."""
    leaves = [leaf for leaf in jax.tree_util.tree_leaves(result) if isinstance(leaf, jax.Array) and is_inexact(leaf)]
    if not leaves or in_trace(leaves):
        return []
    try:
        return [_any_non_finite(leaves)]
    except ValueError:  # op by op, the leaves of one result may be on different devices
        return [_any_non_finite([leaf]) for leaf in leaves]


def _answer(flags: list[Any]) -> tuple[bool, str]:
    """Whether any is set; else the name of the error that computing the result met."""
    try:
        return any(map(bool, flags)), ""
    except Exception as err:
        return False, type(err).__name__

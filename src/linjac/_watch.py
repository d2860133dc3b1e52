"""Which monitors are on, and what the public call that a thread is in does: one tuple to look at, and a few hooks.

A public function asks `active` first; while it is empty nothing else is done. Where a monitor is on, what it would
call itself is called by `watched`. What is known only within (directions, bytes, a trace to come) is told to `admit`,
`admit_signature` and `traced`, where a monitor may refuse: while one is on, or was when the call began
(`here.state.call`). A call made inside another belongs to it, but its limits hold. This module must not know programs,
plans or what a monitor keeps.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax

from linjac._errors import LimitError
from linjac._tree import inside_transformation

_REMEMBERED = 10_000  # functions known to have been traced


# What a call is about to do: directions asked for, sweeps pushed or pulled to get them, runs of a compiled body, bytes
# of the result. A plain tuple, since one is made at every call.
type Work = tuple[int, int, int, int]


@runtime_checkable
class Watcher(Protocol):
    """What is told about every call while it is among the active."""

    completion: bool  # whether it wants to know when the result is there
    limited: bool  # whether it may refuse work

    def admit(self, entry: str, work: Work) -> None:
        """Raise where the work is beyond a limit."""

    def admit_signature(self, entry: str, function: str, place: Any, known: int) -> None:
        """Raise where one more trace of a function is beyond a limit; `known` are the signatures it has."""

    def traced(self, function: str, place: Any, again: bool) -> None:
        """A function has been traced, `again` if not for the first time in this process."""

    def compiled(self, call: "Call | None", name: str, seconds: float) -> None:
        """A program has been compiled, in a call or outside any; `name` is JAX's."""

    def finished(self, call: "Call", result: Any, error: BaseException | None) -> None:
        """The outermost call of a thread is over."""


class Call:
    """One public call on its way."""

    __slots__ = ("completion", "dispatch", "entry", "function", "given", "look", "traced", "watchers", "work")

    def __init__(self, entry: str, function: str, given: Any, look: Callable[[Any], Any] | None) -> None:
        self.entry, self.function = entry, function
        self.given = given  # the caller's arguments, to describe their types
        self.look = look  # from the result to what was computed
        self.watchers = active
        self.work: Work | None = None
        self.traced = False  # in an enclosing jit, vmap or grad
        self.dispatch = self.completion = 0.0  # seconds


# which monitors are on ------------------------------------------------------------------------------------------------
active: tuple[Watcher, ...] = ()
_lock = threading.RLock()


def add(watcher: Watcher) -> bool:
    """Turn a monitor on; returns whether it is the only one."""
    global active
    with _lock:
        active = (*active, watcher)
        return len(active) == 1


def remove(watcher: Watcher) -> bool:
    """Turn a monitor off; returns whether it was the last one."""
    global active
    with _lock:
        active = tuple(other for other in active if other is not watcher)
        return not active


# the call that this thread is in --------------------------------------------------------------------------------------
class _State:
    """What one thread is in."""

    __slots__ = ("call", "muted")

    def __init__(self) -> None:
        self.call: Call | None = None
        self.muted = False  # a monitor's own computation runs


class _Here(threading.local):
    def __init__(self) -> None:
        self.state = _State()


here = _Here()


def watched(
    entry: str,
    function: str,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    given: Any = None,
    look: Callable[[Any], Any] | None = None,
    work: Work | None = None,
) -> Any:
    """Call `run(*args)` and tell the active monitors about it."""
    # function: the name of the user's; given: the arguments to describe, by default args;
    # look: finds in the result what was computed; work: what is known beforehand
    state = here.state
    outer = state.call
    call = state.call = Call(entry, function, args if given is None else given, look)
    watchers = call.watchers
    start = time.perf_counter()
    try:
        if work is not None:
            call.work = work
            for watcher in watchers:
                if watcher.limited:
                    watcher.admit(entry, work)
        result = run(*args)
        call.dispatch = time.perf_counter() - start
        call.traced = inside_transformation()
        for watcher in watchers:
            if watcher.completion and not call.traced:
                jax.block_until_ready(result)
                call.completion = time.perf_counter() - start
                break
    except BaseException as err:
        state.call = outer
        if outer is None:
            call.traced = inside_transformation()
            for watcher in watchers:
                watcher.finished(call, None, err)
            call.given = call.look = None
        raise
    state.call = outer
    if outer is None:
        for watcher in watchers:
            watcher.finished(call, result, None)
        call.given = call.look = None  # monitors may keep the call for a while: without anybody's data
    return result


def current() -> Call | None:
    """The innermost watched call of this thread."""
    return here.state.call


def _watchers() -> tuple[Watcher, ...]:
    call = here.state.call
    return active if call is None else call.watchers


def is_muted() -> bool:
    """Whether this thread runs a computation of a monitor's own."""
    return here.state.muted


def muted(run: Callable[..., Any], *args: Any) -> Any:
    """Run a monitor's own computation, which is not to be counted."""
    here.state.muted = True
    try:
        return run(*args)
    finally:
        here.state.muted = False


# what is known only within --------------------------------------------------------------------------------------------
def admit(work: Work, beside: int = 0) -> None:
    """Tell what the call is about to do, before it is done; a monitor may refuse it.

    `beside` are the bytes of what is returned beside the result of that work: a value, or aux.
    """
    call = here.state.call
    if call is None:
        return
    if beside:
        work = (*work[:3], work[3] + beside)
    call.work = work
    for watcher in call.watchers:
        if watcher.limited:
            watcher.admit(call.entry, work)


def would_refuse(work: Work) -> bool:
    """Whether a monitor would refuse this."""
    call = here.state.call
    if call is None:
        return False
    for watcher in call.watchers:
        try:
            watcher.admit(call.entry, work)
        except LimitError:
            return True
    return False


def admit_signature(who: str, function: str, place: Any, known: int) -> None:
    """Tell that a function is about to be traced at a new signature; a monitor may refuse it."""
    for watcher in _watchers():
        watcher.admit_signature(who, function, place, known)


_seen: dict[Any, None] = {}  # the places of the functions traced so far


def traced(function: str, place: Any) -> None:
    """Tell that a function has been traced."""
    with _lock:
        again = place in _seen
        if len(_seen) >= _REMEMBERED:
            _seen.clear()
        _seen[place] = None
    for watcher in _watchers():
        watcher.traced(function, place, again)


def name_of(fun: Any) -> str:
    """The name of a user's function; of its class where it has none."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    for name in (getattr(fun, "__qualname__", None), getattr(fun, "__name__", None)):
        if isinstance(name, str) and name:
            return name
    return type(fun).__qualname__

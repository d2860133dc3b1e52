"""Measure every possible mode of a Jacobian on the caller's own arguments: from options to a `ModeReport`.

Each candidate is compiled anew and called; what they return is compared; then they take turns. Programs compiled here
are dropped, and what `mode="measure"` has cached is left as it is. What the samples say is not known here.
"""

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from linjac._arguments import Call
from linjac._decide import decide
from linjac._environment import environment
from linjac._errors import SHOWN, compose
from linjac._jacobian import Differentiated, resolve_options
from linjac._mode_report import Agreement, ModeReport, Timing, clear_winner
from linjac._options import check_choice, check_chunk_size, check_count, check_flag, check_number
from linjac._plan import DIRECTION, JacobianPlan, Options
from linjac._program import Data, alive, first_line
from linjac._sweeps import work
from linjac._timing import LEAST, Thunk, agreed, calls_in_sample, in_turns, warm_seconds
from linjac._tracing import ByValue, Traced, uncounted
from linjac._tree import in_trace, inside_transformation, is_inexact, short

WHO = "measure_jacobian"
ROUNDS = 30
_CACHE_HIT = "/jax/compilation_cache/cache_hits"  # the event of JAX that a program was read from disk


# the public function --------------------------------------------------------------------------------------------------
def measure_jacobian(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    modes: str | Sequence[str] | None = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    chunk_size: int | Sequence[int | None] | None = None,
    memory_budget: int | None = None,
    layout: str = "blocks",
    rounds: int = ROUNDS,
    seconds: float = 10.0,
    rtol: float | None = None,
    yardsticks: bool = False,
) -> Callable[..., ModeReport]:
    """Time and memory of every possible mode of `linjac.jacobian` on these arguments, measured in turns.

    Each candidate is compiled anew and called a few times; then all take turns, in an order that is shuffled anew in
    every round, every call waited for. One is the winner where, for each other one, the median over rounds of the
    ratio of their times lies above 1 with its whole 95 % interval, and where all candidates return the same numbers.
    The function really runs, many times: so do its side effects. Nothing that was compiled here is kept, and the
    answer that `mode="measure"` caches is neither used nor changed: give `report.plan` as `mode` to use this one.

    What is timed is the compiled program, without the checks that `linjac.jacobian` makes at each call; JAX's switches
    for debugging (`disable_jit`, `debug_nans`, `debug_infs`) are off meanwhile. A function that branches in Python on
    values is measured op by op, and the report says so.

    Args:
        fun: The function.
        argnums: The positions to differentiate, as for `linjac.jacobian`.
        modes: `"fwd"`, `"rev"` or both; by default all that are possible.
        has_aux: Whether `fun` returns a pair (value, aux).
        holomorphic: Whether `fun` is promised to be holomorphic.
        allow_int: Whether integer arguments are allowed.
        chunk_size: Directions at a time; of a sequence each entry is a candidate, None standing for the default.
        memory_budget: Bytes of scratch for sweeps.
        layout: `"blocks"` or `"matrix"`.
        rounds: Rounds at most; with less than 6 there is no interval, and no winner.
        seconds: Seconds after which no new round begins, compilation not counted; 6 rounds are made in any case.
        rtol: How far two candidates may differ, relative to the largest element of a block; by default the square root
            of the machine epsilon of its dtype.
        yardsticks: Whether jitted `jax.jacfwd` and `jax.jacrev` take part.

    Returns:
        A function with the arguments of `fun` that returns a `linjac.ModeReport`.

    Raises:
        ModeError: No mode asked for can work; every obstacle is named.
        MemoryBudgetError: The result cannot fit the device; raised before anything is compiled.
        TypeError: An option or an argument does not fit, or it is called inside a trace.
        ValueError: An option is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> report = linjac.measure_jacobian(lambda x: x[:3] * x[3:], rounds=6)(jnp.arange(6.0))
        >>> sorted(timing.label for timing in report.candidates)
        ['fwd', 'rev']
        >>> report.disagreements
        ()
        >>> print(linjac.jacobian(lambda x: x[:3] * x[3:], mode=report.plan)(jnp.arange(6.0)).shape)
        (3, 6)
    """
    flags = (has_aux, holomorphic, allow_int, True)
    resolved = resolve_options(WHO, fun, argnums, "auto", layout, (None, memory_budget), flags)
    asked = _Asked(
        _check_modes(modes),
        _check_chunks(chunk_size),
        check_count(WHO, "rounds", rounds, str(ROUNDS)) or ROUNDS,
        check_number(WHO, "seconds", seconds, positive=True),
        None if rtol is None else check_number(WHO, "rtol", rtol),
        check_flag(WHO, "yardsticks", yardsticks),
    )
    differentiated = Differentiated(WHO, fun, argnums, resolved)

    @functools.wraps(fun)
    def measure_fun(*args: Any, **kwargs: Any) -> ModeReport:
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False), uncounted():
            return _report(asked, _ways(differentiated, args, kwargs))

    return measure_fun


class _Asked(NamedTuple):
    """The options of the measurement itself."""

    modes: tuple[str, ...] | None
    chunks: tuple[int | None, ...]
    rounds: int
    seconds: float
    rtol: float | None
    yardsticks: bool


def _check_modes(modes: Any) -> tuple[str, ...] | None:
    if modes is None:
        return None
    words = list(cast(Any, modes)) if isinstance(modes, Iterable) and not isinstance(modes, str) else [modes]
    if not words:
        raise ValueError(compose(WHO, "modes names no mode", remedy="leave it out to measure all that are possible"))
    return tuple(check_choice(WHO, "modes", word, DIRECTION) for word in words)


def _check_chunks(chunk_size: Any) -> tuple[int | None, ...]:
    several = isinstance(chunk_size, list | tuple | range) or getattr(chunk_size, "ndim", 0) == 1
    entries = list(cast(Any, chunk_size)) if several else [chunk_size]
    if not entries:
        raise ValueError(compose(WHO, "chunk_size names no candidate", remedy="leave it out for the default"))
    return tuple(check_chunk_size(WHO, entry) for entry in entries)


# how a candidate runs -------------------------------------------------------------------------------------------------
class _Runnable(NamedTuple):
    """A candidate that has been compiled."""

    run: Thunk
    seconds: float | None = None
    from_cache: bool = False
    scratch: int | None = None


class _Candidate(NamedTuple):
    label: str
    plan: JacobianPlan | None  # None for a yardstick
    compile: Callable[[], _Runnable]


def _compile(function: Callable[..., Any], *args: Any) -> _Runnable:
    """Compile a fresh program, timed; JAX's own event tells one that was read from its cache on disk."""
    hits: list[str] = []
    here = threading.get_ident()

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_HIT and threading.get_ident() == here:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        start = time.perf_counter()
        executable = jax.jit(function).lower(*args).compile()
        seconds = time.perf_counter() - start
    finally:
        jax.monitoring.unregister_event_listener(listen)
    figures: Any = executable.memory_analysis()
    scratch = None if figures is None else int(figures.temp_size_in_bytes)
    return _Runnable(functools.partial(alive, WHO, executable, *args), seconds, bool(hits), scratch)


class _Compiled:
    """The candidates of a traced function: one compiled program each."""

    compiled = True

    def __init__(self, options: Options, traced: Traced) -> None:
        self._options, self._traced = options, traced

    def plan(self, mode: str, chunk_size: int | None) -> JacobianPlan:
        """The plan that `linjac.jacobian` makes for these options."""
        data = Data(self._traced.point, self._traced.constants, [])
        wanted = self._options._replace(mode=mode, chunk_size=chunk_size)
        return decide(WHO, self._traced.program, data, wanted, None)

    def compile(self, plan: JacobianPlan) -> _Runnable:
        """Its program."""
        function = functools.partial(work, self._traced.program, plan.recipe, plan.layout, False)
        return _compile(function, self._traced.constants, self._traced.point)


class _ByValue:
    """The candidates of a function that branches in Python on values: op by op, linearization and sweeps."""

    compiled = False

    def __init__(self, differentiated: Differentiated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._differentiated, self._args, self._kwargs = differentiated, args, kwargs

    def _with(self, mode: str, chunk_size: int | None) -> Differentiated:
        whole = self._differentiated
        plan = whole.options.plan._replace(mode=mode, chunk_size=chunk_size)
        return Differentiated(WHO, whole.fun, whole.argnums, whole.options._replace(jit=False, plan=plan))

    def plan(self, mode: str, chunk_size: int | None) -> JacobianPlan:
        """The plan that `linjac.jacobian` makes for these options."""
        return self._with(mode, chunk_size).plan(self._args, self._kwargs)

    def compile(self, plan: JacobianPlan) -> _Runnable:
        """Nothing is compiled."""
        whole = self._with(plan.mode, plan.options.chunk_size)
        return _Runnable(lambda: whole.compute(self._args, self._kwargs).jacobian)


# the candidates -------------------------------------------------------------------------------------------------------
class _Ways(NamedTuple):
    """One call, ready to be measured."""

    title: str
    way: _Compiled | _ByValue
    yardsticks: Callable[[], list[_Candidate]]


def _ways(differentiated: Differentiated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Ways:
    call = differentiated.call(args, kwargs)
    _refuse_trace(call.traced)
    traced = differentiated.trace(call)
    if isinstance(traced, Traced):
        _refuse_trace(traced.constants)
        way = _Compiled(differentiated.options.plan, traced)
    else:
        way = _ByValue(differentiated, args, kwargs)
    if isinstance(traced, ByValue):
        traced.warn()
    name = getattr(differentiated.fun, "__name__", type(differentiated.fun).__name__)
    types = [short(leaf) for leaf in call.traced]
    title = f"{name}({', '.join([*types[:SHOWN], *['...'][: len(types) - SHOWN]])})"
    return _Ways(title, way, functools.partial(_yardsticks, differentiated, call))


def _refuse_trace(leaves: Sequence[Any]) -> None:
    if in_trace(leaves) or inside_transformation():
        what = "nothing can be measured inside a trace, where nothing runs"
        remedy = (
            "call it outside jax.jit, jax.vmap and jax.grad, and inside pass report.plan as mode to linjac.jacobian"
        )
        raise TypeError(compose(WHO, what, remedy=remedy))


def _candidates(asked: _Asked, way: _Compiled | _ByValue, by_size: JacobianPlan) -> list[_Candidate]:
    """One for each mode and chunk size that is possible; those that come to the same count once."""
    refused = dict(by_size.ruled_out)
    modes = asked.modes or (by_size.mode, *(mode for mode in DIRECTION if mode != by_size.mode))
    possible = [mode for mode in modes if mode not in refused] or list(modes[:1])  # the plan says why not
    plans: dict[Any, JacobianPlan] = {}
    for mode in possible:
        for chunk_size in asked.chunks:
            plan = way.plan(mode, chunk_size)
            plans.setdefault((mode, plan.recipe), plan)
    several = len(asked.chunks) > 1
    return [
        _Candidate(f"{plan.mode}, chunk {plan.chunk_size}" if several else plan.mode, plan, partial)
        for plan, partial in ((plan, functools.partial(way.compile, plan)) for plan in plans.values())
    ]


def _yardsticks(differentiated: Differentiated, call: Call) -> list[_Candidate]:
    """Jitted `jax.jacfwd` and `jax.jacrev`: what the function closes over is baked in, as it is for JAX."""
    options, layout, fun = differentiated.options, call.layout, call.target.bind()
    flags = {"has_aux": options.has_aux, "holomorphic": options.plan.holomorphic}

    def derivative(transform: Callable[..., Any], *leaves: Any) -> Any:
        args, kwargs = layout.unflatten(leaves)
        more = {"allow_int": True} if options.plan.allow_int and transform is jax.jacrev else {}
        found = transform(fun, layout.argnums, **flags, **more)(*args, **kwargs)
        return _moving(found[0] if options.has_aux else found)

    return [
        _Candidate(f"jax.{transform.__name__}", None, functools.partial(_compile, whole, *call.traced))
        for transform in (jax.jacfwd, jax.jacrev)
        for whole in (functools.partial(derivative, transform),)
    ]


def _moving(jacobian: Any) -> list[Any]:
    """The blocks, without those of integer arguments."""
    return [leaf for leaf in jax.tree.leaves(jacobian) if is_inexact(leaf)]


# the measurement ------------------------------------------------------------------------------------------------------
class _Seen(NamedTuple):
    """A candidate after its first calls."""

    candidate: _Candidate
    runnable: _Runnable
    result_bytes: int
    calls: int

    def timing(self, seconds: Sequence[float]) -> Timing:
        """With its samples."""
        label, plan, _ = self.candidate
        _, compile_seconds, from_cache, scratch = self.runnable
        return Timing(label, plan, compile_seconds, from_cache, scratch, self.result_bytes, self.calls, tuple(seconds))


class _Blocks:
    """The blocks of the first candidate, and how far those of the others are from them."""

    def __init__(self, plan: JacobianPlan, rtol: float | None) -> None:
        self._plan, self._rtol = plan, rtol
        self._first: list[Any] | None = None
        self.agreement: list[Agreement] = []

    def add(self, candidate: _Candidate, leaves: list[Any]) -> None:
        """Compare the results of a candidate; those of the first one are kept."""
        arrays = [_host(leaf) for leaf in leaves]
        if candidate.plan is not None and self._plan.layout == "matrix":
            arrays = self._split(arrays[0])
        if self._first is None:
            self._first = arrays
            return
        pairs = itertools.product(self._plan.row_leaves.names, self._plan.column_leaves.names)
        for (output, into), first, other in zip(pairs, self._first, arrays, strict=True):
            allowed = self._rtol if self._rtol is not None else float(jnp.finfo(first.dtype).eps) ** 0.5
            difference, same = _difference(first, other.reshape(first.shape))
            self.agreement.append(Agreement(candidate.label, output, into, difference, allowed, same))

    def _split(self, matrix: Any) -> list[Any]:
        sides = (self._plan.row_leaves, self._plan.column_leaves)
        heights, widths = ([math.prod(shape) for shape in side.shapes] for side in sides)
        rows = np.split(matrix, np.cumsum(heights)[:-1], axis=0)
        return [block for row in rows for block in np.split(row, np.cumsum(widths)[:-1], axis=1)]


def _host(leaf: Any) -> Any:
    """A numpy array, gathered where it is spread over several processes."""
    if getattr(leaf, "is_fully_addressable", True):
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _difference(first: Any, other: Any) -> tuple[float, bool]:
    """The largest difference relative to the largest element, and whether NaN and infinities are in the same places."""
    first, other = (array.astype(np.float32) if array.dtype.itemsize < 4 else array for array in (first, other))
    finite = np.isfinite(first) & np.isfinite(other)
    same = np.array_equal(first[~finite], other[~finite], equal_nan=True)
    first, other = first[finite], other[finite]
    scale = max(float(np.abs(array).max(initial=0.0)) for array in (first, other)) or 1.0
    return float(np.abs(first / scale - other / scale).max(initial=0.0)), bool(same)


class _Prepared(NamedTuple):
    """What is ready to be timed, what is not and why, and whether all return the same."""

    seen: list[_Seen]
    ruled_out: list[tuple[str, str]]
    agreement: list[Agreement]


def _prepare(candidates: Sequence[_Candidate], blocks: _Blocks) -> _Prepared:
    """Compile, call and compare the candidates one after the other, so that few results are held at once."""
    seen: list[_Seen] = []
    failed: list[tuple[str, Exception]] = []
    for candidate in candidates:
        try:
            runnable = candidate.compile()
            result = jax.block_until_ready(runnable.run())
        except Exception as err:  # out of memory, say; a yardstick may refuse the function
            if candidate.plan is not None and not isinstance(err, jax.errors.JaxRuntimeError):
                raise
            failed.append((candidate.label, err))
            continue
        leaves = _moving(result)
        blocks.add(candidate, leaves)
        size = sum(leaf.nbytes for leaf in leaves)
        del result, leaves
        seen.append(_Seen(candidate, runnable, size, calls_in_sample(warm_seconds(runnable.run))))
    if all(one.candidate.plan is None for one in seen):
        raise failed[0][1]
    ruled_out = [(label, f"{type(err).__name__}: {first_line(err)}") for label, err in failed]
    return _Prepared(seen, ruled_out, blocks.agreement)


def _report(asked: _Asked, ways: _Ways) -> ModeReport:
    """Prepare the candidates, let them take turns, and say who won."""
    by_size = ways.way.plan("auto", None)
    candidates = [*_candidates(asked, ways.way, by_size), *(ways.yardsticks() if asked.yardsticks else [])]
    seen, ruled_out, agreement = _prepare(candidates, _Blocks(by_size, asked.rtol))
    runs, calls = [one.runnable.run for one in seen], [one.calls for one in seen]
    times = in_turns(runs, calls, rounds=asked.rounds, seconds=asked.seconds, least=LEAST)
    timings = [one.timing(row) for one, row in zip(seen, times, strict=True)]
    mine = [(timing, timing.plan) for timing in timings if timing.plan is not None]
    winner = clear_winner([timing for timing, _ in mine], agreement)
    winner = agreed(-1 if winner is None else winner)
    in_mode_of_size = [plan for _, plan in mine if plan.mode == by_size.mode]
    return ModeReport(
        title=ways.title,
        m=by_size.m,
        n=by_size.n,
        candidates=tuple(timing for timing, _ in mine),
        yardsticks=tuple(timing for timing in timings if timing.plan is None),
        ruled_out=(*by_size.ruled_out, *ruled_out),
        agreement=tuple(agreement),
        tolerances="from the dtype" if asked.rtol is None else "given",
        winner=mine[winner][0].label if winner >= 0 else None,
        plan=mine[winner][1] if winner >= 0 else [*in_mode_of_size, mine[0][1]][0],
        compiled=ways.way.compiled,
        environment=environment(),
    )

"""`Monitor`: turned on and off, and its counts as a plain dict.

What a call is, and when it is told of, is in `_watch`; what is counted and refused in `_counts`. Compiles are learned
from `jax.monitoring`. Nothing here knows programs or plans.
"""

import threading
import time
from typing import Any, Self

import jax.monitoring

from linjac import _watch
from linjac._counts import BOUNDS, Asked, Counts
from linjac._errors import compose
from linjac._options import check_count, check_flag

COMPILED = "/jax/core/compile/backend_compile_duration"  # one event for each program that XLA compiles
NOTE = (
    "A call inside jax.jit, jax.vmap, jax.grad or another transformation is counted once, under traced_calls, when it "
    "is traced; how often the compiled function runs is not seen, nor its latency and non-finite results. Latency is "
    "the time until a call returns (dispatch) or until its result is there (completion); compiles count in it."
)


class Monitor:
    """Counts what linjac does in this process, in all threads, while it is on; and refuses calls beyond its limits.

    For each public entry point and each user's function: calls, directions, sweeps, chunks, latency, refused inputs
    and errors by kind; for each function its traces, retraces and compiles. Never values, and shapes only when asked.
    A call made inside another one counts as part of it. Several monitors may be on at once, and each counts every
    call. On, it costs about 4 us a call; off, nothing.

    It is a context manager, and a long-lived object with `start` and `stop`; it can be turned on again, and goes on
    counting where it was. Turned on twice, it counts once, until it has been turned off twice.

    Args:
        max_directions: Directions in one call at most: a batch, or the rows or columns of a Jacobian.
        max_result_bytes: Bytes that one call may return at most: products, a Jacobian, value and aux, and the residuals
            that a linearization stores.
        max_signatures: Signatures of one function at most, by what the cache holds of it and by how often a function
            of that place in the code was traced while this monitor was on. What is traced already is served on.
        completion: Whether to measure the time until the result is there too. It waits for each result, so that JAX
            no longer runs ahead.
        non_finite: Whether to count results with a NaN or an infinity, aux apart: one more small program for each
            call, whose answer is fetched later.
        shapes: Whether to count calls by the types of their arguments.

    Raises:
        TypeError: A limit is not an int, or an option not a bool.
        ValueError: A limit is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import linjac
        >>> with linjac.Monitor(max_directions=100) as monitor:
        ...     jac = linjac.jacobian(jnp.sin)(jnp.zeros(3))
        >>> row = monitor.snapshot()["entries"][0]
        >>> row["entry"], row["function"], row["calls"], row["directions"]
        ('jacobian', 'sin', 1, 3)
    """

    __module__ = "linjac"

    def __init__(
        self,
        *,
        max_directions: int | None = None,
        max_result_bytes: int | None = None,
        max_signatures: int | None = None,
        completion: bool = False,
        non_finite: bool = False,
        shapes: bool = False,
    ) -> None:
        limits = {
            "max_directions": max_directions,
            "max_result_bytes": max_result_bytes,
            "max_signatures": max_signatures,
        }
        options = {"completion": completion, "non_finite": non_finite, "shapes": shapes}
        self._limits = {name: check_count("Monitor", name, limit, "no limit") for name, limit in limits.items()}
        asked = Asked(**{name: check_flag("Monitor", name, option) for name, option in options.items()})
        self._counts = Counts(self._limits, asked)
        self._lock = threading.RLock()
        self._depth = 0
        self._seconds = 0.0
        self._since = time.perf_counter()

    # on and off -------------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Turn it on, for all threads.

        Returns:
            The monitor itself.
        """
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._since = time.perf_counter()
                _turn_on(self._counts)
        return self

    def stop(self) -> None:
        """Turn it off; the counts stay. A call that has begun is still counted, though not what it compiles afterwards.

        Raises:
            RuntimeError: It is not on.
        """
        with self._lock:
            if not self._depth:
                raise RuntimeError(compose("Monitor.stop", "the monitor is not on"))
            self._depth -= 1
            if not self._depth:
                self._seconds += time.perf_counter() - self._since
                _turn_off(self._counts)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # what was counted -------------------------------------------------------------------------------------------------
    def snapshot(self) -> dict[str, Any]:
        """All counts as a plain dict of dicts, lists, strings and numbers, ready for `json.dumps`.

        Counts only grow, until `reset`; each call is in it whole or not at all. Its keys:

        - `version`: 1, the form of this dict; `note`: what is not seen, in words.
        - `seconds`: how long the monitor has been on; `limits`: the three limits, None where there is none.
        - `bounds`: the upper bounds of the latency buckets, in seconds: 1, 2 and 5 times 1e-5 to 1, then 10.
        - `entries`: one dict for each `entry` (such as `"linear_fn.many"`) and `function` (the user's, by name), with
          `calls`, `traced_calls`, `directions` (asked for), `sweeps` (pushed or pulled for them), `chunks` (runs of a
          compiled body), `refused` and `failed` (counts by kind), `dispatch` and `completion` (`counts`: calls by
          bucket, one more than there are bounds; `sum`: seconds), `non_finite` and `shapes`. What was not asked for is
          None.
        - `functions`: by name, `traces`, `retraces` (those that were not the first), `compiles`, `compile_seconds`.
        - `outside`: by JAX's name, `compiles` and `compile_seconds` of programs compiled outside any call.
        - `totals`: the sums over `entries` and `functions`.

        Returns:
            The dict; a new one each time.
        """
        return {
            "version": 1,
            "note": NOTE,
            "seconds": self._seconds + (time.perf_counter() - self._since if self._depth else 0.0),
            "limits": dict(self._limits),
            "bounds": list(BOUNDS),
            **self._counts.copy(),
        }

    def reset(self) -> None:
        """Begin to count from zero, on or off; what counts towards `max_signatures` is forgotten too."""
        with self._lock:
            self._seconds, self._since = 0.0, time.perf_counter()
            self._counts.clear()

    def __repr__(self) -> str:
        """One line: on or off, and the limits."""
        limits = [f"{name}={limit}" for name, limit in self._limits.items() if limit is not None]
        return f"Monitor({', '.join(['on' if self._depth else 'off', *limits])})"


# compiles -------------------------------------------------------------------------------------------------------------
_on_off = threading.RLock()


def _turn_on(counts: Counts) -> None:
    with _on_off:
        if _watch.add(counts):
            jax.monitoring.register_event_duration_secs_listener(_listen)


def _turn_off(counts: Counts) -> None:
    with _on_off:
        if _watch.remove(counts):
            try:
                jax.monitoring.unregister_event_duration_listener(_listen)
            except (AssertionError, ValueError):  # somebody has cleared all listeners
                return


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Count what XLA compiles: for the call that this thread is in, else by JAX's name."""
    if event != COMPILED or _watch.is_muted():
        return
    call = _watch.current()
    for watcher in _watch.active if call is None else call.watchers:
        watcher.compiled(call, str(kwargs.get("fun_name", "")), duration_secs)

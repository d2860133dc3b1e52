"""The harness of the benchmarks: candidates take turns, and only ratios are believed.

On a shared machine an absolute time means little. Every candidate is called in every round, in a different order each
round, and what counts is the median over rounds of the ratio of two candidates in the *same* round. A candidate against
itself shows what difference is noise. With two threads the *work* of others changes even ratios (a program that needs
both cores loses its advantage), so rounds in which other processes took more than about a tenth of a core are left
out, where the system tells (Linux) and enough others remain.
"""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.monitoring

type Thunk = Callable[[], Any]


class Timings(NamedTuple):
    """Seconds per call: one list for each candidate, one entry for each round."""

    samples: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds per call: for orientation only."""
        return statistics.median(self.samples[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of time(name) / time(other), taken in the same round."""
        pairs = zip(self.samples[name], self.samples[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def spread(self, name: str, other: str) -> tuple[float, float]:
        """The quartiles of the same ratios."""
        ratios = sorted(a / b for a, b in zip(self.samples[name], self.samples[other], strict=True))
        return ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def interleaved(
    candidates: Mapping[str, Thunk],
    *,
    rounds: int = 31,
    target: float = 0.015,
    cap: float = 8.0,
    block_each: bool = True,
) -> Timings:
    """Time the candidates in turns.

    A sample is the mean of an inner loop of about `target` seconds. `block_each` waits for every result before the
    next call (what a person who needs the result sees); without it only the last one is waited for, as in a loop that
    lets JAX run ahead. Stops after `cap` seconds, but not before 7 rounds; disturbed rounds are repeated while there
    is time, and count only where fewer than 5 others are left.
    """
    counts: dict[str, int] = {}
    for name, call in candidates.items():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        counts[name] = max(1, min(500, int(target / max(time.perf_counter() - start, 1e-7))))
    order, shuffle = list(candidates), random.Random(0).shuffle
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(quiet) < rounds:
        done, spent = len(quiet) + len(disturbed), time.perf_counter() - begin
        if done >= 7 and (spent > cap or (len(quiet) >= 7 and spent > cap / 2)):
            break
        shuffle(order)
        watch = _Others()
        sample = {name: _sample(candidates[name], counts[name], block_each) for name in order}
        (disturbed if watch.disturbed() else quiet).append(sample)
    kept = quiet if len(quiet) >= 5 else quiet + disturbed
    _rounds["quiet"] += len(quiet)
    _rounds["disturbed"] += len(disturbed)
    _rounds["disturbed and used"] += len(kept) - len(quiet)
    return Timings({name: [sample[name] for sample in kept] for name in candidates})


_rounds = {"quiet": 0, "disturbed": 0, "disturbed and used": 0}


def footer() -> None:
    """Say how far the machine was our own."""
    print("\n  rounds: " + ", ".join(f"{count} {kind}" for kind, count in _rounds.items()), flush=True)


class _Others:
    """The time that other processes take from now on; none where the system does not say."""

    def __init__(self) -> None:
        self._start = self._busy(), time.process_time(), time.perf_counter()

    @staticmethod
    def _busy() -> float:
        try:
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return 0.0
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait

    def disturbed(self) -> bool:
        """True where they took more than a tenth of a core, and more than the clock's grain."""
        busy, own, wall = self._start
        others = self._busy() - busy - (time.process_time() - own)
        return others > 0.1 * (time.perf_counter() - wall) + 0.015


def _sample(call: Thunk, count: int, block_each: bool) -> float:
    out = None
    start = time.perf_counter()
    for _ in range(count):
        out = call()
        if block_each:
            jax.block_until_ready(out)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / count


def noise(call: Thunk, **options: Any) -> tuple[float, float]:
    """The quartiles of one candidate against itself: differences within them are noise."""
    return interleaved({"once": call, "again": call}, **options).spread("again", "once")


def per_call(call: Thunk, repeats: int = 5) -> float:
    """Seconds per call of a plain Python function: the best of several loops of about 20 ms."""
    count = 1
    while True:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if time.perf_counter() - start > 0.02:
            break
        count *= 2
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - start) / count)
    return best


# compiles -------------------------------------------------------------------------------------------------------------
class Compiles:
    """How often JAX traced a function, and how often XLA compiled a program."""

    traces = 0
    programs = 0


@contextlib.contextmanager
def compiles() -> Iterator[Compiles]:
    """Count what is traced and compiled inside the block."""
    seen = Compiles()

    def listen(event: str, duration: float, **_: Any) -> None:
        del duration
        seen.traces += event.endswith("/jaxpr_trace_duration")
        seen.programs += event.endswith("/backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# memory ---------------------------------------------------------------------------------------------------------------
def scratch(fun: Callable[..., Any], *args: Any) -> int:
    """Bytes of temporary memory of the compiled function, by XLA's own account."""
    return int(jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes)


def live_bytes() -> int:
    """Bytes of all arrays alive, a buffer that several arrays share being counted once."""
    buffers = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.live_arrays()}
    return sum(buffers.values())


# tables ---------------------------------------------------------------------------------------------------------------
def header(title: str) -> None:
    """A heading with the versions that the figures belong to."""
    print(f"\n{title}  [JAX {jax.__version__}, {jax.default_backend()}]", flush=True)


def row(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
    """One line: what was measured, the figure, the target, and whether it is met."""
    mark = {True: "ok", False: "MISSED", None: ""}[met]
    print(f"  {what:<58s} {figure:>26s}   {target:<16s} {mark}".rstrip(), flush=True)

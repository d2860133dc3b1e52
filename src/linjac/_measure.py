"""Time the modes that are possible on the caller's own arguments, and say which is faster.

Candidates take turns; what counts is the median over rounds of their ratio, and its spread says whether there is a
winner at all. With several processes, process 0 decides for all.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from linjac._choice import make_plan
from linjac._plan import OTHER, JacobianPlan
from linjac._program import Data, Program, TracedProgram
from linjac._sweeps import work

ROUNDS = 9
SECONDS = 1.0  # for the rounds, not counting compilation
SAMPLE = 0.002  # seconds of calls in one sample
HOPELESS = 8.0  # a first call this many times slower ends the comparison


def fastest(who: str, program: Program, data: Data, by_size: JacobianPlan) -> JacobianPlan:
    """The plan of the faster mode; the size rule's where only one is possible or none wins."""
    other = OTHER[by_size.mode]
    if other in dict(by_size.ruled_out):
        return with_note(by_size, f"not measured: {other} is ruled out")
    plans = [by_size, make_plan(who, program, data, by_size.options._replace(mode=other))]
    assert isinstance(program, TracedProgram)
    runs = [runner(program, data, plan) for plan in plans]
    firsts = [_first(run) for run in runs]
    hopeless = min(firsts) * HOPELESS < max(firsts)
    return _verdict(plans, [[first] for first in firsts] if hopeless else _rounds(runs, firsts))


def runner(program: TracedProgram, data: Data, plan: JacobianPlan) -> Callable[[], Any]:
    """A plan's compiled program as a function of nothing: the one that a later call uses."""
    key = ("jacobian", plan.recipe, plan.layout, False)
    function = functools.partial(work, program, plan.recipe, plan.layout, False)
    return lambda: program.run(key, function, data.constants, data.point)


def _first(run: Callable[[], Any]) -> float:
    """Seconds of one call, after one that compiles; infinite where it does not fit the memory."""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError:
        return float("inf")
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def _rounds(runs: list[Callable[[], Any]], firsts: list[float]) -> list[list[float]]:
    counts = [max(1, min(100, int(SAMPLE / max(first, 1e-7)))) for first in firsts]
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= 3 and time.perf_counter() - begin > SECONDS:
            break
        for run, count, row in zip(runs, counts, times, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                out = run()
                jax.block_until_ready(out)
            row.append((time.perf_counter() - start) / count)
    return times


def _verdict(plans: list[JacobianPlan], times: list[list[float]]) -> JacobianPlan:
    ratios = sorted(mine / theirs for mine, theirs in zip(*times, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    winner = _agreed(1 if statistics.median(ratios) > 1.0 and not low <= 1.0 <= high else 0)
    medians = [f"{plan.mode} {statistics.median(row) * 1e3:.3g} ms" for plan, row in zip(plans, times, strict=True)]
    clear = "" if not low <= 1.0 <= high else ", no clear winner"
    note = f"measured: {', '.join(medians)} (medians of {len(times[0])} rounds{clear})"
    return with_note(plans[winner], note)


def _agreed(winner: int) -> int:
    """Process 0's answer, for all processes."""
    if jax.process_count() == 1:
        return winner
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(jnp.asarray(winner)))


def with_note(plan: JacobianPlan, note: str) -> JacobianPlan:
    """The plan with what was measured, or why nothing was, instead of the advice to measure."""
    kept = [text for text in plan.notes if "consider mode=" not in text]
    return dataclasses.replace(plan, notes=(*kept, note))

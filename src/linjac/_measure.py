"""Time the modes that are possible on the caller's own arguments, and say which is faster.

Candidates take turns; what counts is the median over rounds of their ratio, and its spread says whether there is a
winner at all. With several processes, process 0 decides for all.
"""

import dataclasses
import functools
import statistics
from collections.abc import Sequence

import jax

from linjac._plan import JacobianPlan
from linjac._program import Data, Program, TracedProgram
from linjac._sweeps import work
from linjac._timing import Thunk, agreed, calls_in_sample, in_turns, seconds_of_call

ROUNDS = 9
SECONDS = 1.0  # for the rounds, not counting compilation
HOPELESS = 8.0  # a first call this many times slower ends the comparison


def fastest(program: Program, data: Data, plans: tuple[JacobianPlan, JacobianPlan]) -> JacobianPlan:
    """The plan of the faster mode; the first one where none wins."""
    assert isinstance(program, TracedProgram)
    runs = [runner(program, data, plan) for plan in plans]
    firsts = [_first(run) for run in runs]
    hopeless = agreed(min(firsts) * HOPELESS < max(firsts))
    return _verdict(plans, [[first] for first in firsts] if hopeless else _rounds(runs, firsts))


def runner(program: TracedProgram, data: Data, plan: JacobianPlan) -> Thunk:
    """A plan's compiled program as a function of nothing: the one that a later call uses."""
    key = ("jacobian", plan.recipe, plan.layout, False)
    function = functools.partial(work, program, plan.recipe, plan.layout, False)
    return lambda: program.run(key, function, data.constants, data.point)


def _first(run: Thunk) -> float:
    """Seconds of one call, after one that compiles; infinite where it does not fit the memory."""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError:
        return float("inf")
    return seconds_of_call(run)


def _rounds(runs: list[Thunk], firsts: list[float]) -> list[list[float]]:
    calls = [calls_in_sample(first) for first in firsts]
    return in_turns(runs, calls, rounds=ROUNDS, seconds=SECONDS, least=3)


def _verdict(plans: Sequence[JacobianPlan], times: list[list[float]]) -> JacobianPlan:
    ratios = sorted(mine / theirs for mine, theirs in zip(*times, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    winner = agreed(1 if statistics.median(ratios) > 1.0 and not low <= 1.0 <= high else 0)
    medians = [f"{plan.mode} {statistics.median(row) * 1e3:.3g} ms" for plan, row in zip(plans, times, strict=True)]
    clear = "" if not low <= 1.0 <= high else ", no clear winner"
    note = f"measured: {', '.join(medians)} (medians of {len(times[0])} rounds{clear})"
    return with_note(plans[winner], note)


def with_note(plan: JacobianPlan, note: str) -> JacobianPlan:
    """The plan with what was measured, or why nothing was, instead of the advice to measure."""
    kept = [text for text in plan.notes if "consider mode=" not in text]
    return dataclasses.replace(plan, notes=(*kept, note))

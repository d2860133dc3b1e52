"""Time thunks in turns, and say what their times tell: samples, paired ratios, an interval for the median.

On a machine that others use too an absolute time means little: every thunk is called in every round, in an order that
is shuffled anew, and what counts is the median over rounds of the ratio of two in the same round. This module must not
know what is timed.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SAMPLE = 0.002  # seconds of calls in one sample, so that the clock and the loop do not count
MOST = 100  # calls in one sample
LEAST = 6  # rounds from which on an interval of 95 % exists

type Thunk = Callable[[], Any]


class Ratio(NamedTuple):
    """The median of paired ratios and its interval of at least 95 %; without bounds where rounds are too few."""

    median: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether 1 lies outside."""
        return self.low > 1.0 or self.high < 1.0

    def __str__(self) -> str:
        """Median and interval."""
        if self.low <= 0.0:
            return f"{self.median:.3g} (too few rounds for an interval)"
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def seconds_of_call(run: Thunk) -> float:
    """Seconds of one call; call it before, or it compiles here."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def warm_seconds(run: Thunk) -> float:
    """Seconds of one call once it is warm: the least of a few, where they are short."""
    first = seconds_of_call(run)
    return min([first, *(seconds_of_call(run) for _ in range(4 if first < 0.1 else 0))])


def calls_in_sample(seconds: float) -> int:
    """How many calls of this length fill a sample; the same on every process."""
    return agreed(max(1, min(MOST, int(SAMPLE / max(seconds, 1e-7)))))


def in_turns(
    runs: Sequence[Thunk], calls: Sequence[int], *, rounds: int, seconds: float, least: int
) -> list[list[float]]:
    """For each thunk its seconds per call, one entry a round; ends after `seconds`, but not before `least` rounds."""
    order, shuffle = list(range(len(runs))), random.Random(0).shuffle
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    for turn in range(rounds):
        if turn >= least and agreed(time.perf_counter() - begin > seconds):
            break
        shuffle(order)
        for i in order:
            times[i].append(_sample(runs[i], calls[i]))
    return times


def _sample(run: Thunk, calls: int) -> float:
    """The mean of some calls, each waited for before the next, its result dropped."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(run())
    return (time.perf_counter() - start) / calls


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The ratio of two candidates, taken round by round; its bounds are 0 and infinity below six rounds."""
    # The bounds are order statistics: the k-th smallest and the k-th largest of n ratios, k being the largest number
    # for which they hold the median with a probability of 95 % at least (10 for n = 30), whatever the distribution.
    ratios = sorted(a / b if b else math.inf for a, b in zip(above, below, strict=True))
    n = len(ratios)
    tail, k = 1, 0  # tail: 2^n times the probability that at most k of n lie below the median
    while 40 * tail <= 2**n:
        k += 1
        tail += math.comb(n, k)
    low, high = (ratios[k - 1], ratios[n - k]) if k else (0.0, math.inf)
    return Ratio(statistics.median(ratios), low, high)


def agreed(value: int) -> int:
    """Process 0's answer, for all processes: they must make the same calls."""
    if jax.process_count() == 1:
        return int(value)
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(jnp.asarray(int(value))))

"""What was measured of the modes of a Jacobian: every sample, what it says, and a table to read.

How it was measured is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linjac._environment import Environment
from linjac._errors import SHOWN, compose
from linjac._options import is_number
from linjac._plan import JacobianPlan
from linjac._timing import Ratio, paired_ratio

DISAGREE = "no winner: the candidates disagree; linjac.testing.check_jacobian says where"


@dataclass(frozen=True)
class Timing:
    """One candidate: what it costs to compile and to run.

    Attributes:
        label: `"fwd"` or `"rev"`, with the chunk where several were asked for; `"jax.jacfwd"` or `"jax.jacrev"`.
        plan: What it does; None for a yardstick.
        compile_seconds: Seconds to lower and compile a fresh program, once; None where it runs op by op.
        from_cache: Whether JAX read the program from its compilation cache on disk instead of compiling it.
        scratch_bytes: Temporary memory by the compiler's account; None where it is not known.
        result_bytes: Bytes of the Jacobian.
        calls: Calls in one sample.
        seconds: Seconds of one call in each round: the mean of `calls` calls, each waited for before the next.
    """

    label: str
    plan: JacobianPlan | None
    compile_seconds: float | None
    from_cache: bool
    scratch_bytes: int | None
    result_bytes: int
    calls: int
    seconds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """Seconds below which a share `q` of the samples lies, interpolated.

        Returns:
            The seconds.

        Raises:
            ValueError: `q` is no number from 0 to 1.
        """
        if not (is_number(q) and 0 <= q <= 1):
            raise ValueError(compose("Timing.quantile", f"q must be a number from 0 to 1, got {q!r}"))
        return float(np.quantile(np.asarray(self.seconds), q))

    @property
    def median(self) -> float:
        """Median seconds of one call."""
        return self.quantile(0.5)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "label": self.label,
            "plan": None if self.plan is None else str(self.plan),
            "compile_seconds": self.compile_seconds,
            "from_cache": self.from_cache,
            "scratch_bytes": self.scratch_bytes,
            "result_bytes": self.result_bytes,
            "calls": self.calls,
            "n": len(self.seconds),
            **{name: self.quantile(q) for name, q in _QUANTILES.items()},
            "seconds": list(self.seconds),
        }

    def cells(self) -> list[str]:
        """Its row in the table."""
        mark = "*" if self.from_cache else ""
        compiled = "-" if self.compile_seconds is None else _time(self.compile_seconds) + mark
        scratch = "?" if self.scratch_bytes is None else _bytes(self.scratch_bytes)
        times = [_time(self.quantile(q)) for q in _QUANTILES.values()]
        return [self.label, compiled, *times, f"{len(self.seconds)}x{self.calls}", scratch, _bytes(self.result_bytes)]


_QUANTILES = {"min": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "p95": 0.95}
_HEADER = ["", "compile", *_QUANTILES, "samples", "scratch", "result"]


@dataclass(frozen=True)
class Agreement:
    """How far one block of a candidate is from that of the first one.

    Attributes:
        label: The candidate.
        output: Key path of the output leaf.
        input: Key path of the input leaf.
        difference: The largest difference of two finite elements, relative to the largest finite element of either.
        allowed: What the tolerance allows.
        same_nonfinite: Whether NaN and infinities are in the same places.
    """

    label: str
    output: str
    input: str
    difference: float
    allowed: float
    same_nonfinite: bool

    @property
    def agrees(self) -> bool:
        """Whether the two may stand for each other."""
        return self.same_nonfinite and self.difference <= self.allowed

    def __str__(self) -> str:
        """One line."""
        where = f"{self.label}: {self.output} with respect to {self.input}"
        places = "" if self.same_nonfinite else ", and NaN or infinities are in other places"
        return f"{where}: {self.difference:.2g} of the largest element, allowed {self.allowed:.2g}{places}"


@dataclass(frozen=True)
class ModeReport:
    """Time and memory of every possible mode of a Jacobian, measured in turns. Printed, it is a table.

    Attributes:
        title: The function, with the types of its arguments.
        m: Number of outputs.
        n: Number of inputs.
        candidates: One entry for each mode (and chunk size): `label`, `plan`, `compile_seconds`, `from_cache`,
            `scratch_bytes`, `result_bytes`, `calls` in a sample, `seconds` (every sample), `median`, `quantile(q)`.
        yardsticks: The same for jitted `jax.jacfwd` and `jax.jacrev`, where they were asked for.
        ruled_out: For each mode that was not measured, its name and the reason.
        agreement: For each candidate and yardstick but the first and each block: `label`, `output`, `input`,
            `difference` from the first candidate relative to the largest element, `allowed`, `same_nonfinite`, and
            whether it `agrees`.
        tolerances: Where `allowed` comes from: `"given"`, or the dtype.
        winner: The label of the candidate that is clearly the fastest; None where there is no clear winner.
        plan: What to give to `linjac.jacobian` as `mode`: the winner's plan; without a clear winner that of the first
            candidate in the mode that the rule of sizes prefers.
        compiled: False where the function branches on values, so that everything ran op by op.
        environment: Versions, device and settings.
    """

    __module__ = "linjac"

    title: str
    m: int
    n: int
    candidates: tuple[Timing, ...]
    yardsticks: tuple[Timing, ...]
    ruled_out: tuple[tuple[str, str], ...]
    agreement: tuple[Agreement, ...]
    tolerances: str
    winner: str | None
    plan: JacobianPlan
    compiled: bool
    environment: Environment

    def __getitem__(self, label: str) -> Timing:
        """The candidate or yardstick of this label."""
        for timing in (*self.candidates, *self.yardsticks):
            if timing.label == label:
                return timing
        raise KeyError(label)

    def ratio(self, label: str, other: str) -> Ratio:
        """How many times as long `label` takes as `other`, taken in the same round.

        Args:
            label: A candidate or yardstick.
            other: Another one.

        Returns:
            A triple (median, low, high): the median over the rounds, and an interval that holds the true median with a
            probability of at least 95 % (order statistics; 0 and infinity with less than six rounds).
        """
        return paired_ratio(self[label].seconds, self[other].seconds)

    @property
    def disagreements(self) -> tuple[Agreement, ...]:
        """The blocks that differ from those of the first candidate by more than is allowed, the worst first."""
        found = [entry for entry in self.agreement if not entry.agrees]
        return tuple(sorted(found, key=lambda entry: (entry.same_nonfinite, -entry.difference)))

    @property
    def verdict(self) -> str:
        """Which candidate is the fastest, or why that cannot be said."""
        if disagree(self.candidates, self.agreement):
            return DISAGREE
        if len(self.candidates) == 1:
            return f"{self.winner} is the only candidate"
        best = min(self.candidates, key=lambda timing: (timing.label != self.winner, timing.median)).label
        others = [timing.label for timing in self.candidates if timing.label != best]
        near = min(others, key=lambda label: self.ratio(label, best)[1:])  # the hardest to tell from the best
        times = f"{near} takes {self.ratio(near, best)} times as long as {best}"
        if self.winner is None:
            return f"no clear winner: {times}; by the rule of sizes {self._chosen}"
        return f"{self.winner} is the fastest: {times}"

    @property
    def _chosen(self) -> str:
        """The label of the plan."""
        return next(timing.label for timing in self.candidates if timing.plan == self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: every sample is in it."""
        return {
            "title": self.title,
            "m": self.m,
            "n": self.n,
            "candidates": [timing.to_dict() for timing in self.candidates],
            "yardsticks": [timing.to_dict() for timing in self.yardsticks],
            "ruled_out": dict(self.ruled_out),
            "agreement": [{**vars(entry), "agrees": entry.agrees} for entry in self.agreement],
            "tolerances": self.tolerances,
            "winner": self.winner,
            "verdict": self.verdict,
            "plan": str(self.plan),
            "compiled": self.compiled,
            "environment": self.environment.to_dict(),
        }

    def __str__(self) -> str:
        """The verdict, the table, agreement, and the environment."""
        rows = [timing.cells() for timing in (*self.candidates, *self.yardsticks)]
        lines = _table([_HEADER, *rows])
        if any(timing.from_cache for timing in (*self.candidates, *self.yardsticks)):
            lines.append("* read from the compilation cache, not compiled")
        if not self.compiled:
            lines.append("op by op: the function branches in Python on values, so nothing is compiled")
        mine = self._chosen
        lines += [f"{one.label} takes {self.ratio(one.label, mine)} times as long as {mine}" for one in self.yardsticks]
        lines += [f"{name} ruled out: {reason}" for name, reason in self.ruled_out]
        lines += self._agreement_lines()
        lines.append("ratios: median over rounds of pairs in the same round [95 % interval]; samples: rounds x calls")
        lines += str(self.environment).splitlines()
        head = f"linjac.measure_jacobian: {self.title}, {self.m} outputs, {self.n} inputs"
        return "\n".join([head, self.verdict, *(f"  {line}" for line in lines)])

    def _agreement_lines(self) -> list[str]:
        first = self.candidates[0].label
        lines: list[str] = []
        for label in dict.fromkeys(entry.label for entry in self.agreement):
            entries = [entry for entry in self.agreement if entry.label == label]
            if all(entry.agrees for entry in entries):
                worst = max(entries, key=lambda entry: entry.difference)
                lines.append(
                    f"{label} agrees with {first} to {worst.difference:.2g} of the largest element of a block "
                    f"(allowed {worst.allowed:.2g}, {self.tolerances})"
                )
        wrong = self.disagreements
        lines += [f"DIFFERS from {first}: {entry}" for entry in wrong[:SHOWN]]
        return lines + ([f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else [])


# what follows from the samples ----------------------------------------------------------------------------------------
def disagree(candidates: Sequence[Timing], agreement: Sequence[Agreement]) -> bool:
    """Whether two candidates (yardsticks aside) return different numbers."""
    labels = {timing.label for timing in candidates}
    return any(entry.label in labels and not entry.agrees for entry in agreement)


def clear_winner(candidates: Sequence[Timing], agreement: Sequence[Agreement]) -> int | None:
    """The place of the candidate that every other one takes clearly longer than; None where there is none."""
    if disagree(candidates, agreement):
        return None
    best = min(range(len(candidates)), key=lambda i: candidates[i].median)
    others = [timing for i, timing in enumerate(candidates) if i != best]
    slower = (paired_ratio(timing.seconds, candidates[best].seconds).low > 1.0 for timing in others)
    return best if all(slower) else None


# words ----------------------------------------------------------------------------------------------------------------
def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:  # what rounds to the unit is written in it
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:{'.3g' if count < 999 * size else '.0f'}} {unit}"
    return f"{count} B"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]

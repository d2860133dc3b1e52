"""The report of a check: one line a criterion, and for a failure where it is; never the arrays.

How a criterion is decided is not known here.
"""

from dataclasses import asdict, dataclass
from typing import Any

from linjac._environment import Environment
from linjac._errors import VerificationError

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

# Where two ways to one derivative can part, from the coarsest to the finest: the first that fails says where to look.
STAGES = (
    "structure",
    "shapes and dtypes",
    "value",
    "products",
    "precision",
    "linearity",
    "finite differences",
    "finite values",
    "keys",
    "jit",
    "vmap",
    "chunked",
    "recomputed",
    "other mode",
    "other backend",
)


@dataclass(frozen=True)
class Difference:
    """One place in which two answers differ: names and norms, never arrays.

    Attributes:
        output: Key path of the output leaf, or None.
        input: Key path of the input leaf, or None.
        index: Index of the worst element in the leaf, or None where shapes differ already.
        error: The largest absolute difference.
        allowed: The largest difference that the tolerances allow.
        expected_norm: Euclidean norm of what was expected.
        got_norm: Euclidean norm of what was got.
    """

    output: str | None
    input: str | None
    index: tuple[int, ...] | None
    error: float
    allowed: float
    expected_norm: float
    got_norm: float

    def __str__(self) -> str:
        """One line."""
        place = " with respect to ".join(name for name in (self.output, self.input) if name)
        if self.index is None:
            return f"{place}: another structure, shape or dtype"
        where = "" if self.index == () else f" at {list(self.index)}"
        return (
            f"{place}{where}: error {self.error:.3g}, allowed {self.allowed:.3g} "
            f"(norms: expected {self.expected_norm:.6g}, got {self.got_norm:.6g})"
        )


@dataclass(frozen=True)
class Criterion:
    """One criterion of a check and its outcome.

    Attributes:
        name: What was compared with what.
        stage: Its rung on the ladder of `CheckReport.where`.
        outcome: `"passed"`, `"failed"` or `"skipped"`.
        detail: Why it was skipped, what failed, or a figure worth knowing.
        differences: Where it failed, the worst first.
    """

    name: str
    stage: str
    outcome: str
    detail: str = ""
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        """One line, and one for each difference (five shown)."""
        lines = [f"{self.outcome:<7} {self.stage}: {self.name}" + (f" ({self.detail})" if self.detail else "")]
        lines += [f"        {difference}" for difference in self.differences[:5]]
        if len(self.differences) > 5:
            lines.append(f"        and {len(self.differences) - 5} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class CheckReport:
    """What a check found. True where nothing failed.

    Attributes:
        title: What was checked, with the types of the point.
        criteria: One entry a criterion, in the order of the ladder.
        rtol: Tolerance relative to the largest expected element of a leaf.
        atol: Absolute tolerance.
        tolerances: Where the tolerances come from: `"given"`, or the dtype.
        environment: Versions, device and settings.
    """

    __module__ = "linjac.testing"

    title: str
    criteria: tuple[Criterion, ...]
    rtol: float
    atol: float
    tolerances: str
    environment: Environment

    @property
    def failed(self) -> tuple[Criterion, ...]:
        """The criteria that failed."""
        return tuple(criterion for criterion in self.criteria if criterion.outcome == FAILED)

    @property
    def skipped(self) -> tuple[Criterion, ...]:
        """The criteria that were skipped, with their reasons."""
        return tuple(criterion for criterion in self.criteria if criterion.outcome == SKIPPED)

    @property
    def where(self) -> str | None:
        """The first stage that failed, or None."""
        return next((stage for stage in STAGES if any(c.stage == stage for c in self.failed)), None)

    def __bool__(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    def raise_if_failed(self) -> None:
        """Raise a `linjac.testing.VerificationError` with the whole report where something failed.

        Raises:
            VerificationError: A criterion failed.
        """
        if not self:
            raise VerificationError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "title": self.title,
            "passed": bool(self),
            "where": self.where,
            "criteria": [asdict(criterion) for criterion in self.criteria],
            "rtol": self.rtol,
            "atol": self.atol,
            "tolerances": self.tolerances,
            "environment": self.environment.to_dict(),
        }

    def __str__(self) -> str:
        """The verdict, a line a criterion, the tolerances and the environment."""
        counts = [sum(c.outcome == outcome for c in self.criteria) for outcome in (PASSED, FAILED, SKIPPED)]
        verdict = "passed" if self else f"FAILED, first at {self.where}"
        head = f"linjac.testing.{self.title}: {verdict} ({counts[0]} passed, {counts[1]} failed, {counts[2]} skipped)"
        lines = [f"  {line}" for criterion in self.criteria for line in str(criterion).splitlines()]
        limits = f"  tolerances: rtol={self.rtol:.3g}, atol={self.atol:.3g} ({self.tolerances})"
        return "\n".join([head, *lines, limits, *(f"  {line}" for line in str(self.environment).splitlines())])

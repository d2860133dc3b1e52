"""The exceptions and the warning that linjac raises.

Every message is built here in one form: a first line `linjac.<function>: what is wrong`, then the leaves, then one
remedy. This module must not know what a function, a tree or an array is.
"""

from collections.abc import Iterable

SHOWN = 5  # leaves listed in one message


class TangentError(TypeError, ValueError):
    """A tangent or cotangent does not fit the point: wrong structure, shape, dtype or kind of leaf.

    Attributes:
        kind: What is wrong, in a word: `"structure"`, `"shape"`, `"dtype"`, `"batch"` (a batch where one is taken, or
            the reverse, or axes that disagree), `"held leaf"` (something where nothing can move), `"no array"`. Of
            several bad leaves, the first.
    """

    def __init__(self, *args: object, kind: str = "") -> None:
        super().__init__(*args)
        self.kind = kind


class PointError(ValueError):
    """A linearization was used at another point than its own, or its point is gone."""


class ModeError(TypeError, ValueError):
    """The direction asked for, forward or reverse, cannot be had for this function."""


class MemoryBudgetError(ValueError):
    """The result cannot fit into the memory there is; raised before anything is allocated."""


class LimitError(ValueError):
    """A call is beyond a limit of an active `linjac.Monitor`; raised before any work."""


class VerificationError(AssertionError):
    """A check of `linjac.testing` failed, or a baseline cannot be trusted."""


class PerformanceWarning(UserWarning):
    """The result is right, but the way to it is needlessly slow; the text says what to do."""


def compose(who: str, what: str, leaves: Iterable[str] = (), remedy: str = "") -> str:
    """The text of a refusal: what is wrong, the first few leaves, one remedy."""
    leaves = list(leaves)
    lines = [f"linjac.{who}: {what}", *(f"  {leaf}" for leaf in leaves[:SHOWN])]
    if len(leaves) > SHOWN:
        lines.append(f"  and {len(leaves) - SHOWN} more")
    if remedy:
        lines.append(remedy)
    return "\n".join(lines)


for _public in (TangentError, PointError, ModeError, MemoryBudgetError, LimitError, PerformanceWarning):
    _public.__module__ = "linjac"
VerificationError.__module__ = "linjac.testing"

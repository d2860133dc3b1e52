"""Linearize a JAX function once, at one point, and get everything from its derivative."""

import importlib
from typing import TYPE_CHECKING, Any

from linjac._errors import LimitError, MemoryBudgetError, ModeError, PerformanceWarning, PointError, TangentError
from linjac._jacobian import jacobian, plan_jacobian, value_and_jacobian
from linjac._linearization import Linearization
from linjac._linearize import jvp_many, linearize_many, residual_bytes, vjp_many
from linjac._plan import JacobianPlan

if TYPE_CHECKING:
    from linjac import testing as testing
    from linjac._mode_report import ModeReport
    from linjac._modes import measure_jacobian
    from linjac._monitor import Monitor

__all__ = [
    "JacobianPlan",
    "LimitError",
    "Linearization",
    "MemoryBudgetError",
    "ModeError",
    "ModeReport",
    "Monitor",
    "PerformanceWarning",
    "PointError",
    "TangentError",
    "jacobian",
    "jvp_many",
    "linearize_many",
    "measure_jacobian",
    "plan_jacobian",
    "residual_bytes",
    "value_and_jacobian",
    "vjp_many",
]


# Loaded at their first use: model code seldom asks for them, and every import of linjac would pay for them.
_LATER = {"ModeReport": "_mode_report", "Monitor": "_monitor", "measure_jacobian": "_modes"}


def __getattr__(name: str) -> Any:
    """A name that is loaded at its first use, and `linjac.testing` without an import of its own."""
    if name == "testing":
        return importlib.import_module("linjac.testing")
    if name in _LATER:
        globals()[name] = found = getattr(importlib.import_module(f"linjac.{_LATER[name]}"), name)
        return found
    raise AttributeError(f"module 'linjac' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing"})

"""Linearize a JAX function once, at one point, and get everything from its derivative."""

from linjac._errors import MemoryBudgetError, ModeError, PerformanceWarning, PointError, TangentError
from linjac._linearization import Linearization
from linjac._linearize import jvp_many, linearize_many, residual_bytes, vjp_many

__all__ = [
    "Linearization",
    "MemoryBudgetError",
    "ModeError",
    "PerformanceWarning",
    "PointError",
    "TangentError",
    "jvp_many",
    "linearize_many",
    "residual_bytes",
    "vjp_many",
]

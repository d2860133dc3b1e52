"""Linearize a JAX function once, at one point, and get everything from its derivative."""

from linjac._errors import MemoryBudgetError, ModeError, PerformanceWarning, PointError, TangentError
from linjac._jacobian import jacobian, plan_jacobian, value_and_jacobian
from linjac._linearization import Linearization
from linjac._linearize import jvp_many, linearize_many, residual_bytes, vjp_many
from linjac._plan import JacobianPlan

__all__ = [
    "JacobianPlan",
    "Linearization",
    "MemoryBudgetError",
    "ModeError",
    "PerformanceWarning",
    "PointError",
    "TangentError",
    "jacobian",
    "jvp_many",
    "linearize_many",
    "plan_jacobian",
    "residual_bytes",
    "value_and_jacobian",
    "vjp_many",
]

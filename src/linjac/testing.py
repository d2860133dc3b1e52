"""Proof that a derivative is right, and that it stays right: checks, their reports, and baselines."""

from linjac._baseline import Refused, check_baseline, record_baseline
from linjac._bisect import Bisection, bisect_linearization
from linjac._check import check_jacobian, check_linearization
from linjac._environment import Environment
from linjac._errors import VerificationError
from linjac._report import CheckReport, Criterion, Difference

__all__ = [
    "Bisection",
    "CheckReport",
    "Criterion",
    "Difference",
    "Environment",
    "Refused",
    "VerificationError",
    "bisect_linearization",
    "check_baseline",
    "check_jacobian",
    "check_linearization",
    "record_baseline",
]

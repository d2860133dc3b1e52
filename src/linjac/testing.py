"""Proof that a derivative is right, and that it stays right: checks, their reports, and baselines."""

from linjac._environment import Environment
from linjac._errors import VerificationError
from linjac._report import CheckReport, Criterion, Difference

__all__ = ["CheckReport", "Criterion", "Difference", "Environment", "VerificationError"]

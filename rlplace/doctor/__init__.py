"""Checks whether this machine and this installation are fit for placing; no check raises.

`checks` has all ten, and `system` gives them access to the machine. Nothing heavy is imported here, and torch only
by the checks of it, so that a broken installation can still be examined.
"""

from __future__ import annotations

from rlplace.doctor.checks import CHECKS
from rlplace.doctor.system import Check, Finding, System, Verdict, run_checks, worst

__all__ = ["CHECKS", "Check", "Finding", "System", "Verdict", "run_checks", "worst"]

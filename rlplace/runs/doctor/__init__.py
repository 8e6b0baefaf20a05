"""Whether this machine and this installation are fit for placing: one small check a question, none of which raises.

Nothing heavy is imported here, and torch only by the checks of it, so that a broken installation can still be examined.
"""

from __future__ import annotations

from rlplace.runs.doctor.check import Check, Finding, Verdict, run_checks, worst
from rlplace.runs.doctor.checks import CHECKS
from rlplace.runs.doctor.system import System

__all__ = ["CHECKS", "Check", "Finding", "System", "Verdict", "run_checks", "worst"]

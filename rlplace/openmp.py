"""How long GNU OpenMP's threads spin after an op before they sleep; set before PyTorch loads OpenMP, or not at all."""

from __future__ import annotations

import os
import sys

SPIN_COUNT = 3000
"""A hundredth of OpenMP's own 300,000, with which the second thread of a gang goes on spinning on a member's core after
each op and slows what that core runs; with this one eager PyTorch was as fast, within noise (docs/capture-and-run.md).
"""


def spin_briefly() -> None:
    """Has teams of threads leave their cores soon after an op, unless the user chose how they wait.

    It is `GOMP_SPINCOUNT`, which OpenMP reads once, when PyTorch is imported: afterwards this does nothing.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)

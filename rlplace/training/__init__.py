"""Training: from a problem to the best placement that was measured, beside `portfolio` at the same budget.

`session` is what `rlplace train` runs, `config` says how, `run` does it: `searches` gives every method its budget,
`table` is what all are judged by, `outcome` what a run leaves behind, and with `resume` an interrupted one goes on.
`agent` is the method that learns the host, `policy_search` the one whose policy learns, `schedule_search` the one whose
policy schedules, `guide` lets a policy guide a search; `methods` registers all four.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.faces import lazy

if TYPE_CHECKING:
    from rlplace.training.config import SearchConfig, TrainConfig
    from rlplace.training.outputs import TrainResult
    from rlplace.training.run import train

__all__ = ["SearchConfig", "TrainConfig", "TrainResult", "train"]

__getattr__ = lazy(__name__, __file__)

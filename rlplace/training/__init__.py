"""Training: from a problem to the best placement that was measured, beside `portfolio` at the same budget.

`config` says how, `run` does it, `search_loop` gives one method its budget, `agent` is the method that learns the host,
`policy_search` the one whose policy learns, `guide` lets a policy guide a search, `methods` registers all three,
`candidates` and `table` keep what was tried and found, `outcome` is what a run leaves behind, `session` is what
`rlplace train` runs.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.training.config import SearchConfig, TrainConfig
    from rlplace.training.outcome import TrainResult
    from rlplace.training.run import train

__all__ = ["SearchConfig", "TrainConfig", "TrainResult", "train"]

_HOMES = {
    "SearchConfig": "rlplace.training.config",
    "TrainConfig": "rlplace.training.config",
    "TrainResult": "rlplace.training.outcome",
    "train": "rlplace.training.run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""Training: from a problem to the best placement that was measured, beside `portfolio` at the same budget.

`train_and_resume` runs `rlplace train`, `--resume` included. `config` has the options. `run` is the search itself, in
`phases`: `searches` gives every method its budget, and `outputs` measures the final table and writes the files of a
run. `forecast` says how long a run takes, `tracking` records it. `place_and_replace` is `rlplace place`, of a workload
and of a run on other devices; `elastic` carries the state of that run over. `agent` is the method that learns the host;
`policy_methods` are those whose policy learns, schedules, or guides a search; `method_choice` registers all four.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.training.config import SearchConfig, TrainConfig
    from rlplace.training.outputs import TrainResult
    from rlplace.training.run import train

__all__ = ["SearchConfig", "TrainConfig", "TrainResult", "train"]

__getattr__ = lazy(__name__, __file__)

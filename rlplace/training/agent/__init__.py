"""The agent: learns the host from few measured steps, plans in what it has learned, measures, and goes on.

`agent` proposes plans and learns from them: `proposals` searches for placements under given factors, `batches` chooses
which of them to measure together, `config` says how. `learning_loop` runs it on anything that measures, `on_host` on
the task of a run.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.training.agent.agent import AgentResult
    from rlplace.training.agent.config import AgentConfig
    from rlplace.training.agent.learning_loop import learn_host

__all__ = ["AgentConfig", "AgentResult", "learn_host"]

_HOMES = {
    "AgentConfig": "rlplace.training.agent.config",
    "AgentResult": "rlplace.training.agent.agent",
    "learn_host": "rlplace.training.agent.learning_loop",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

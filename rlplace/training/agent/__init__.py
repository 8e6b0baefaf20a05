"""The agent: learns the host from few measured steps, plans in what it has learned, measures, and goes on.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.training.agent.agent import AgentResult, learn_host
    from rlplace.training.agent.config import AgentConfig

__all__ = ["AgentConfig", "AgentResult", "learn_host"]

_HOMES = {
    "AgentConfig": "rlplace.training.agent.config",
    "AgentResult": "rlplace.training.agent.agent",
    "learn_host": "rlplace.training.agent.agent",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

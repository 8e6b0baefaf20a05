"""The agent: learns the host from few measured steps, plans with the learned model, measures, and goes on.

`agent` proposes plans and learns from them: `learn_host` runs it on anything that measures, `solve` on the task of a
run. `proposals` searches for placements under given factors and chooses which of them to measure together.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy

if TYPE_CHECKING:
    from rlplace.training.agent.agent import Agent, learn_host
    from rlplace.training.config import AgentConfig

__all__ = ["Agent", "AgentConfig", "learn_host"]

__getattr__ = lazy(__name__, __file__)

"""The agent: learns the host from few measured steps, plans in what it has learned, measures, and goes on.

`agent` proposes plans and learns from them: `proposals` searches for placements under given factors, `batches` chooses
which of them to measure together, `config` says how. `learning_loop` runs it on anything that measures, `on_host` on
the task of a run.

Importing this imports no torch: names are looked up when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.faces import lazy

if TYPE_CHECKING:
    from rlplace.training.agent.agent import AgentResult
    from rlplace.training.agent.config import AgentConfig
    from rlplace.training.agent.learning_loop import learn_host

__all__ = ["AgentConfig", "AgentResult", "learn_host"]

__getattr__ = lazy(__name__, __file__)

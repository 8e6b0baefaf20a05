"""The agent: learns the host from few measured steps, plans in what it has learned, measures, and goes on."""

from rlplace.training.agent.agent import AgentResult, learn_host
from rlplace.training.agent.config import AgentConfig

__all__ = ["AgentConfig", "AgentResult", "learn_host"]

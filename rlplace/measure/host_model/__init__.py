"""The host model: factors of a host learned from measured steps: factors on the figures of a problem, with their
uncertainty.

`scales` holds the factors and their prior, `fit` finds the factors that explain measured step times, `traced_steps`
those that explain timelines, `learned_host` is the record that a run keeps of them.
"""

from rlplace.measure.host_model.fit import FitConfig, HostModel
from rlplace.measure.host_model.learned_host import (
    LearnedHost,
    Posterior,
    describe,
    knowledge_of,
    load_learned_host,
    save_posterior,
)
from rlplace.measure.host_model.scales import (
    HostKnowledge,
    Prior,
    Priors,
    Scale,
    Scales,
    TracedPrior,
    load_priors,
    prior_of,
    save_priors,
)
from rlplace.measure.host_model.traced_steps import TraceConfig, TracedMedians, TracedSteps

__all__ = [
    "FitConfig",
    "HostKnowledge",
    "HostModel",
    "LearnedHost",
    "Posterior",
    "Prior",
    "Priors",
    "Scale",
    "Scales",
    "TraceConfig",
    "TracedMedians",
    "TracedPrior",
    "TracedSteps",
    "describe",
    "knowledge_of",
    "load_learned_host",
    "load_priors",
    "prior_of",
    "save_posterior",
    "save_priors",
]

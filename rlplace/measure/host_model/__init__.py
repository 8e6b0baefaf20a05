"""What measured steps teach about a host: factors on the figures of a problem, with their uncertainty.

`scales` says which factors there are and what they do, `priors` how far from 1 they are expected and from which sources
that is known, `fit` which factors explain measured step times, `learned_host` what a run keeps of them, and `refit`
fits priors to what runs kept. `knowledge` is what other workloads taught about one host.
"""

from rlplace.measure.host_model.fit import FitConfig, HostModel
from rlplace.measure.host_model.knowledge import HostKnowledge
from rlplace.measure.host_model.learned_host import LearnedHost, Posterior, describe, load_learned_host, save_posterior
from rlplace.measure.host_model.priors import Prior, Priors, load_priors, prior_of, save_priors
from rlplace.measure.host_model.refit import fit_priors, knowledge_of
from rlplace.measure.host_model.scales import Scale, Scales

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
    "describe",
    "fit_priors",
    "knowledge_of",
    "load_learned_host",
    "load_priors",
    "prior_of",
    "save_posterior",
    "save_priors",
]

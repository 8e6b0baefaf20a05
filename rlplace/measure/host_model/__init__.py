"""What measured steps teach about a host: factors on the figures of a problem, with their uncertainty.

`scales` says which factors there are and what they do, `prior` how far from 1 they are expected, `terms` what a step
time is the sum of, `fit` which factors explain measured step times, as a `posterior`, and `words` what that means.
`priors` holds the figures of priors with their sources, `learned_host` what a run keeps, and `refit` fits the former to
the latter. `knowledge` is what other workloads taught about one host, and `carried` makes it of what their runs kept.
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

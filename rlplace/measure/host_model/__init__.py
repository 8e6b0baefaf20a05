"""What measured steps teach about a host: factors on the figures of a problem, with their uncertainty.

`scales` says which factors there are and what they do, `prior` how far from 1 they are expected, `terms` what a step
time is the sum of, `fit` which factors explain measured step times, as a `posterior`, and `words` what that means.
"""

from rlplace.measure.host_model.fit import FitConfig, HostModel
from rlplace.measure.host_model.posterior import Posterior
from rlplace.measure.host_model.prior import Prior
from rlplace.measure.host_model.scales import Scale, Scales
from rlplace.measure.host_model.words import describe

__all__ = ["FitConfig", "HostModel", "Posterior", "Prior", "Scale", "Scales", "describe"]

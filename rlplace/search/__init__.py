"""Search: whatever finds placements of a `Problem`.

`registry.find` runs a method by name. Exported here are simple placements of ops, (N,) int32 devices (`single`,
`round_robin`, `random`, `blocks`, `eft`), and `anneal_from`, which improves devices of groups, (G,) int32.
"""

from rlplace.search.improve.anneal_settings import AnnealSettings
from rlplace.search.improve.metropolis import anneal_from
from rlplace.search.rules.baselines import blocks, random, round_robin, single
from rlplace.search.schedule.eft import eft
from rlplace.search.task import Budget

__all__ = ["AnnealSettings", "Budget", "anneal_from", "blocks", "eft", "random", "round_robin", "single"]

"""Search: whatever finds placements of a `Problem`.

A method works on a `task`, which scores placements and keeps the account; `registry` knows all methods by name. They
stand by what they do: `rules` place by hand, `schedule` op by op where each ends first, `parallel` by layouts of
micro-batches, `exact` proves what it finds, and `improve` searches until a budget ends. `op_order` moves no op but
changes when it runs.

`registry.find` runs a method by name. Exported here are simple placements of ops, (N,) int32 devices (`single`,
`round_robin`, `random`, `blocks`, `eft`), and `anneal_from`, which improves devices of groups, (G,) int32.
"""

from rlplace.search.improve.anneal import AnnealSettings, anneal_from
from rlplace.search.rules.baselines import blocks, random, round_robin, single
from rlplace.search.schedule.list_schedulers import eft
from rlplace.search.task import Budget

__all__ = ["AnnealSettings", "Budget", "anneal_from", "blocks", "eft", "random", "round_robin", "single"]

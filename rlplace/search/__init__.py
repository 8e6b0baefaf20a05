"""Search: methods that find placements of a `Problem`.

A method works on a `task`, which scores placements and counts evaluations; `methods` has all methods by name, and
`find` runs one. `rules` places by hand, `schedule` op by op where each ends first, `parallel` by layouts of
micro-batches, `cp_sat` proves the optimum, and `improve` searches until a budget ends. `groupings` hold ops that
searches move together, and `op_order` changes the order of ops alone.

Placements of ops are (N,) int32 devices (`single`, `round_robin`, `random`, `blocks`, `eft`); `anneal_from` improves
devices of groups, (G,) int32.
"""

from rlplace.search.improve.anneal import AnnealSettings, anneal_from
from rlplace.search.methods import METHODS, Method, SearchResult, find, register_method
from rlplace.search.rules.baselines import blocks, random, round_robin, single
from rlplace.search.schedule.list_schedulers import eft
from rlplace.search.task import Budget, Task

__all__ = [
    "METHODS",
    "AnnealSettings",
    "Budget",
    "Method",
    "SearchResult",
    "Task",
    "anneal_from",
    "blocks",
    "eft",
    "find",
    "random",
    "register_method",
    "round_robin",
    "single",
]

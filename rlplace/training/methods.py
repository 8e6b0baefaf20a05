"""`METHODS` as the face knows them: those of `rlplace.search`, and `learned`."""

from __future__ import annotations

from rlplace.search.registry import METHODS, Method, register_method

LEARNED = "learned"

if LEARNED not in METHODS:
    register_method(
        Method(LEARNED, "rlplace.training.learned:solve", "search", "a policy and annealing that learn from each other")
    )

__all__ = ["LEARNED", "METHODS"]

"""Searches: every method of a run gets its budget, and its result is a `MethodResult`.

A run calls `search_all`. On a host of this machine methods search in turn, and `racing_host` measures their plans in
races. On a simulated host they search at once: side by side here, or as tasks of a cluster.
"""

"""Searches: every method of a run gets its budget, and its result is a `MethodResult`.

`search_all` is what a run calls. On a host of this machine methods search in turn, and `racing_host` measures what they
ask for, in races. On a simulated host they search at once: `side_by_side` here, or as tasks of a cluster.
"""

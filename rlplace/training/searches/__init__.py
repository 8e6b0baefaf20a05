"""Searches: every method of a run gets its budget, and comes to a `MethodResult`.

`search_all` is what a run calls, with the `options` of each method. On a host of this machine methods search in turn:
`search_loop` gives one of them its `budget`, `racing_host` runs what it asks for in races and keeps that in `raced`,
which knows the `candidates` that are left. On a simulated host they search at once, `side_by_side` here or `on_cluster`
elsewhere; `task_state` says what each has come to.
"""

"""Searches: every method of a run gets its budget, and comes to a `MethodResult`.

`search_all` is what a run calls. On a host of this machine, methods search in turn: `search_loop` gives one of them its
budget, and `racing_host` measures what it asks for, in races. On a simulated host they search at once: `side_by_side`
here, or `on_cluster` elsewhere.
"""

"""List schedulers: ops or groups in order of priority, each where it would end first.

`inputs` holds the arrays that they share, `list_schedule` the schedule that they grow, `greedy` the one whose weights
are tuned.
"""

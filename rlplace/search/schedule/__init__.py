"""List schedulers: ops or groups in order of priority, each where it would end first.

`units` are the arrays that they share, `list_scheduling` is the schedule that they grow and the schedulers on it, and
`greedy` is the one whose weights are tuned. It places groups over a `partial_schedule`, and learners step through both.
"""

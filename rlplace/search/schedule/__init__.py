"""List schedulers: ops or groups in order of priority, each where it would end first.

`units` and `host_resources` are the arrays that they share, `list_schedule` is the schedule that they grow, `scoring`
scores what they make of ops and of groups, and `greedy` is the one whose weights are tuned. It places groups, over a
`group_layout` and a `partial_schedule`. Learners step through these, too: with `schedule_bounds` and
`decision_features`.
"""

"""List schedulers: ops or groups in order of priority, each where it would end first.

`list_schedule` is the arithmetic that all of them share, `list_schedulers` and `baechi` are schedulers on it, and
`greedy` is the one whose weights are tuned. It places groups over a `partial_schedule`; learners step through both.
"""

"""List schedulers: ops or groups in order of priority, each where it would end first.

`list_schedule` is the arithmetic that all of them share, and `list_schedulers` are schedulers on it. `partial_schedule`
grows group by group: learners step through it, and `Greedy`, the scheduler whose weights are tuned, works on it.
"""

"""What a placed step is made of: shares of devices, the critical path, the costliest cut edges, and what to do next.

`explain.explain(problem, plan, timeline, method="", step_time_s=None, alternatives=())` makes an `Explanation`.
"""

"""What a placed step is made of: shares of devices, the critical path, the costliest cut edges, and what to do next.

`explain_step` makes an `explanation.Explanation`; loading one that was kept needs neither numba nor torch.
"""

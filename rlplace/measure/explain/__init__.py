"""The parts of a placed step: shares of devices, the critical path, the costliest cut edges, and advice.

`explain_step` makes an `explanation.Explanation`; loading one that was kept needs neither numba nor torch.
"""

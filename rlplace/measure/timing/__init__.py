"""Measuring step times of plans on this machine.

`host_runner` measures plans in a `race`, which sets their order and the number of rounds, and turns results and errors
into measurements. `eager_step` is the same step without a placement, and `threads` sets cores and intra-op
threads.
"""

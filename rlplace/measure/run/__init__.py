"""Running a plan for real and timing it.

`runner` measures plans in a `race`, which says in which order and how often; `outcomes` says what became of each,
`failures` what an error means. `eager_step` is the same step without a placement, and `threads` sets cores and intra-op
threads.
"""

"""Running a plan for real and timing it.

`runner` measures, `race` says in which order and how often, `loaded_plans` which plans are in memory meanwhile, and
`outcomes` what became of each.
What runs is in subrooms: `codegen` turns a plan into Python, `crew` is the devices' threads and what passes between
them, `placed` is one plan bound to its tensors and threads, and `eager` the same step without a placement. `failures`
says what an error means, `first_losses` tells a placement that breaks the arithmetic, `memory_limits` keeps to what a
host says that there is, `threads` sets cores and intra-op threads, and `idle` tells how much of the machine is free.
"""

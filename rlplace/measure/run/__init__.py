"""Running a plan for real and timing it.

`runner` measures, `race` says in which order and how often, `placed_step` is one plan bound to its tensors and
threads; `codegen`, `channels`, `residents`, `clocks`, `workers` and `threads` are what it is made of; `eager` is the
same step without a placement, `eager_recipe` how it joins a race, and `first_losses` tells a placement that breaks the
arithmetic.
"""

"""Plain PyTorch: the same step without a placement.

`eager_step` runs it, `micro_steps` slice after slice where the batch is cut, and `eager_recipe` says in a few words how
it joins a race.
"""

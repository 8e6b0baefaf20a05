"""Searches that improve placements until their budget ends.

Where they start (`warm_starts`, `greedy_starts`), what they move (`moves`, `coarsening`), what several of them use
(`block_descent`, `metropolis`), and the searches themselves, one file each.
"""

"""Searches that improve placements until their budget ends.

Where they start (`warm_starts`, `greedy_starts`), what they move (`moves`, `coarsening`), the acceptance that several
of them use (`metropolis`), and the searches themselves, one file each.
"""

"""Searches that improve placements until their budget ends.

Where they start (`starting_points`), what they move (`moves`), and the searches: `anneal`, `portfolio`, `random_keys`.
"""

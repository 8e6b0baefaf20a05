"""Searches that improve placements until their budget ends.

Their starts (`starting_points`), their moves (`moves`), and the searches: `anneal`, `portfolio`, `cem_and_genetic`.
"""

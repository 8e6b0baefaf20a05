"""Searches that improve placements until their budget ends.

Their starts (`starting_points`), their moves (`moves`), and the searches: `anneal`, and in `portfolio` also `evolve`,
`cem` and `genetic`.
"""

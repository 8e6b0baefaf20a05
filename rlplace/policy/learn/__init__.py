"""How policies learn: PPO with a ratio for every group, imitation, and the best placements seen."""

"""Which ops move together.

Rules that make groups (`groups`, `rule`, `metis`), the coarsening that they share (`coarsen`, `merged_groups`,
`merging`), and what the user asks for: pins, exclusions and what stays together (`constraints`, `patterns`).
"""

"""Which ops move together.

Rules that make groups (`groups`, METIS among them, and `module_classes`), the coarsening that they share (`coarsen`,
`merging`), and the user's requests: pins, exclusions, and ops that stay together (`constraints`).
"""

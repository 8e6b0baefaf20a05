"""Placements of a step that is cut into micro-batches as people make them: data, pipeline and expert parallelism.

What follows what along the step (`step_roles`), where a chain of layers is cut into stages (`stages`), what is dealt
out by itself (`apart`), the layouts made of these and their placements (`layouts`), and the choice of how many
micro-batches there are and in which order their ops run (`choose`).
"""

"""Placements of a step that is cut into micro-batches as people make them: data, pipeline and expert parallelism.

What follows what along the step (`step_roles`), the layouts of stages and replicas and their placements (`layouts`,
`hybrid`, `bounded_stages`), the order of micro-batches (`micro_batch_orders`), starts for searches (`starts`), and the
choice of how many micro-batches there are (`choose`).
"""

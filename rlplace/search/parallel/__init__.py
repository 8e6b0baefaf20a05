"""Placements of a step that is cut into micro-batches as people make them: data, pipeline and expert parallelism.

`layouts` are stages and replicas with their placements, `pipelines` orders of micro-batches and the best pipeline,
`hybrid` plans both, and `choose_micro_batches` races numbers of micro-batches.
"""

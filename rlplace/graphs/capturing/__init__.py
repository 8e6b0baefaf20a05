"""From a model to its graph.

`capture` traces one step of an `nn.Module`; the other files say how: tracing (`trace`, `backward_ends`, `origins`,
`portable`), making it functional (`functional`, `versions`, `views`), lowering it to an `OpGraph` with its `Program`
(`lower`, `builder`), what each op costs in principle (`op_work`, `op_costs`), what is refused (`refusals`), and what a
failure means (`failures`).
"""

"""From a model to its graph.

`capture` traces one step of an `nn.Module`; the other files say how: tracing (`trace`, `portable`, `untouched`),
finding constants (`constants`), making the trace functional (`functional`), lowering it to an `OpGraph` with its
`Program` and the cost of each op (`lower`), and errors for models that are refused (`refusals`).
"""

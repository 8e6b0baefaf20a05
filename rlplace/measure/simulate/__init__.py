"""The step-time model as code.

`simulator` is its face. `compiled_problem` has the arrays that the numba kernels (`kernel_*`) read and write,
`transfer_time` the formula of a transfer. The rules stand in docs/step-time-model.md.
"""

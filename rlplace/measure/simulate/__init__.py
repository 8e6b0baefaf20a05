"""The step-time model as code.

`simulator` is its face, `evaluation` what it runs on every thread, and `simulated_timeline` what a run leaves behind;
`compiled` (of it `host_tables` and `updates`) and `scratch` are the arrays that the numba kernels (`kernel_*`) read and
write. The rules stand in docs/step-time-model.md.
"""

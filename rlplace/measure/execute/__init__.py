"""A plan as running code: straight-line Python, one function and one thread a device.

`rank_programs` makes of a plan one program for each device: ops, sends, receives, waits and frees, in order.
`launch_code` writes the lines of each program. `placed_step` binds them to their tensors and runs them.
`device_threads` are the threads, one a device, `residents` the tensors that stay between steps, and their channels,
which carry tensors between devices. The launch of op 3 is the line `f3(...)` of the generated code
(`launch_code.Expressions.call`).
"""

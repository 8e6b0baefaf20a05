"""A plan as running code: straight-line Python, one function and one thread a device.

`generate` writes it, in the order of the plan. `placed_step` binds it to its tensors and runs it. `residents` are the
tensors that stay between steps, `channels` carry tensors between devices, and `workers` are the threads.
"""

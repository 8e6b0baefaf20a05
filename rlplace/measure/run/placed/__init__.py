"""One plan bound to its tensors and threads.

`placed_step` runs it, `two_part_step` with the caller's own work between forward and backward. `binding` says what the
names in generated code stand for: `residents` that stay on a device from step to step, `random_ops` that draw the same
numbers wherever they are, `gradients_out` that leaves gradients to whoever asks. `step_timeline` is what a traced step
did when, `allocated` what it held in each memory.
"""

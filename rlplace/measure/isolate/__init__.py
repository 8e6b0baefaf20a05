"""Measuring in a process of its own, so that a placement that breaks it costs that placement alone.

`isolated_runner` is the side that asks: it has the interface of `HostRunner`, replaces a worker that died and races the
rest again. `worker` is the side that runs; `process` starts, watches and ends it and explains its death, `lifeline`
ends one whose starter is gone. `packing` sends a captured program, `messages` is the protocol between the two,
`memory_watch` limits the memory of placements. `profiling` profiles ops in a worker.
"""

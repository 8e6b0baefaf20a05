"""Measuring in a process of its own, so that a placement that breaks it costs that placement alone.

`runner` is the side that asks: it has the interface of `HostRunner`, replaces a worker that died and races the rest
again; `wait` is how it waits. `worker` is the side that runs; `process` starts, watches and ends it and explains its
death, `lifeline` ends one whose starter is gone. `packing` sends a captured program, `messages` is what the two say to
each other, `memory_watch` what memory a placement may take, and `choice` whether a worker is used at all. `profiling`
profiles ops in a worker.
"""

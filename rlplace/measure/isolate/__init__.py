"""Measuring in a process of its own, so that a placement that breaks it costs that placement alone.

`runner` is the side that asks: it has the interface of `HostRunner`, replaces a worker that died and races the rest
again; `wait` is how it waits. `worker` is the side that runs; `process` starts, watches and ends it, `lifeline` ends
one whose starter is gone. `packing`, `ops` and `settings` are how a captured program gets there, `messages` and `board`
what the two say to each other, `memory_watch` and `time_limits` what a placement may take, `post_mortem` how a death is
explained, and `choice` whether a worker is used at all. `profiling` has ops profiled there.
"""

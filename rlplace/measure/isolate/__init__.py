"""Measuring in a process of its own, so that a placement that breaks it costs that placement alone.

`multiprocessing` pools, loky and pebble fork or import the user's main module again, copy tensors through pipes, and
break the whole pool when one worker crashes. Here a worker starts without either, shares the tensors' memory, tells by
a shared page which op it runs while it hangs in native code, and stays pinned to its cores between measurements.

`isolated_runner` is the parent: it has the interface of `HostRunner`, replaces a worker that died and races the rest
again. `worker` is the child, with its start and the explanation of its end; `lifeline` ends a child whose parent is
gone. `messages` is the protocol between the two, `packing` sends a captured program, and `memory_watch` limits the
memory of placements.
"""

"""GPUs that are made up: `rlplace.cuda` on the CPU, with proof of order by vector clocks, and late execution.

A `Machine` stands in for `rlplace.cuda` (`fake_cuda`), its tensors say that they are on a GPU (`fake_tensors`), its
locks and threads carry clocks (`fake_threads`). `vector_clocks` holds every access against every other; `late_queues`
runs what was launched at the last moment, in orders that only streams and events bound. `gpu_plans` has hosts, graphs
and plans to run on it, `plan_runs` runs them, `mutants` breaks the code under test on purpose.
"""

"""`pipeline`: a run's workload as stages of `torch.distributed.pipelining`, and the script that runs them.

A step as stages (`stages`), the modules that a stage may begin with (`boundaries`), how many stages, micro-batches and
which schedule (`plan`), and the text (`script`).
"""

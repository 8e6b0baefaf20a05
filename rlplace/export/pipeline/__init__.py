"""`pipeline`: a run's workload as stages of `torch.distributed.pipelining`, and the script that runs them.

A step as stages (`stages`), which modules begin a stage, how many stages and micro-batches and which schedule (`plan`),
and the text (`script`).
"""

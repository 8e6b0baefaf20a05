"""The devices of a host at work: a thread each, and what passes between them.

`workers` are the threads, `channels` take a tensor from one device to another, `streams` are those of GPUs, and
`clocks` tell when work began and ended on a core or a GPU.
"""

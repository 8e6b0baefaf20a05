"""The stages of `make gpu` that are no command of rlplace: each checks one thing on the host that it is given.

A stage is a module with `run(host_word)`, which returns a `Verdict`. Most run on cores too (`cores:2`).
"""

"""Training of weights that suit any problem.

`config` says how much, `problems` what is trained on, `tables` keep what was simulated, and `run` is `rlplace
pretrain`, which learns from them.
"""

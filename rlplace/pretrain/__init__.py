"""Training of weights that suit any problem.

`training_problems` makes the problems to train on, `pretraining` is `rlplace pretrain`.
"""

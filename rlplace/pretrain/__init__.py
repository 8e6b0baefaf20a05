"""Training of weights that suit any problem.

`training_problems` are what is trained on, `pretraining` is `rlplace pretrain`.
"""

"""Training of weights that suit any problem: `pretraining` is `rlplace pretrain`, and makes its problems."""

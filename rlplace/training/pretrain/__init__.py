"""Training of weights that suit any problem: `config` says how much, `problems` and `hosts` what is trained on,
`tables` keep what was simulated, `components`, `fit` and `held_out` learn from it, `run` is `rlplace pretrain`."""

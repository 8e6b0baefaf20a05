"""How policies learn: PPO with a ratio for every group, imitation, and the best placements seen.

`ppo` is PPO, and `learners` has REINFORCE, cloning, the imitation that all share, and the state of a learner, from
which an interrupted search goes on. The loss of the pretrained policy is in `scripts/pretrain.py`.
"""

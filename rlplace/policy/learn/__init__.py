"""How policies learn: PPO with a ratio for every group, imitation, and the best placements seen.

`ppo` is PPO, and `learners` has REINFORCE, cloning and the imitation that all share; their losses are there.
`learner_state` keeps a learner's state, so that an interrupted search goes on. The loss of the pretrained policy is in
`rlplace.pretrain.pretraining`.
"""

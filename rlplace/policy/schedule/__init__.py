"""The policy `schedule`: which group next and where, over the partial schedule, and good guesses on unseen problems.

`components` are what it guesses first (groupings and weights of the list scheduler), `summary` and `group_features`
what it sees of a problem, `network` what is learned, `rollout` how groups are decided one after the other, `policy` the
distribution over placements, `proposals` the guesses.
"""

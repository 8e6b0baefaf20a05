"""The policy `schedule`: which group next and where, over the partial schedule, and good guesses on unseen problems.

`network` holds what it sees of a problem and what is learned, `policy` is the distribution over placements, decided one
group after the other, and `proposals` are the guesses.
"""

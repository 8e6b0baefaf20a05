"""The policy that places all groups at once: a graph neural network, a table of logits, and their distribution."""

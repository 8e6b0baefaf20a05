"""Micro-batches of a step: how its batch is cut, and which loss of the slices is that of the batch."""

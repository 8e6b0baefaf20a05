"""Largest sizes of networks: their options may come from a file, and weights are made before anything is learned."""

MOST_WIDTH = 4096
MOST_LAYERS = 16

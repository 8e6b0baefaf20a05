"""Synthetic graphs: seeded families with the shapes of known models, for training policies and for tests."""

from rlplace.graphs.synthetic.families import FAMILIES
from rlplace.graphs.synthetic.make import synthetic

__all__ = ["FAMILIES", "synthetic"]

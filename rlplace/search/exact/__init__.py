"""Solvers that prove what they find: the step's schedule as a constraint program."""

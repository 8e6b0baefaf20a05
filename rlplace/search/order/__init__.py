"""The order of ops for a given placement: a shorter step, or a lower peak of memory."""

"""The policy `improver`: a pass over a placement that moves one group at a time."""

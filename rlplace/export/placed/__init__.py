"""Models that run as placed: a captured step (`PlacedModel`) and a module (`PlacedModule`), and the parts of both.

Each compares a call, and what it reads of Python, with its capture (`step_arguments`). For inputs of another shape, it
captures its model again and carries the plan over (`graphs`). A step also has a state and an optimizer (`model_state`),
whose parameters may be in shards (`sharded_state`); one rank of a step has those of its device (`rank_model`).
"""

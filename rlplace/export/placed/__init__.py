"""Models that run as placed: a captured step (`PlacedModel`) and a module (`PlacedModule`), and the parts of both.

Each runs its graphs with the arguments of a call (`step_arguments`). For inputs of another shape, it captures its model
again and carries the plan over (`graphs`). A step also has a state and an optimizer (`model_state`).
"""

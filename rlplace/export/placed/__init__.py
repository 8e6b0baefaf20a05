"""What runs as placed: a captured step (`PlacedModel`) and a module (`PlacedModule`), and what both are made of.

Each runs its graphs (`graphs_by_shape`, `placed_module`) with the arguments of a call (`arguments`), captures its model
again for other inputs (`recapture`) and carries the plan over to what came of it (`carried`). A step also has a state
(`state`) and an optimizer (`optimizer`).
"""

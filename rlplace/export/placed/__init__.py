"""What runs as placed: a captured step (`PlacedModel`) and a module (`PlacedModule`), and what both are made of.

Each runs its graphs (`placed_graph`, `module_graph`) with the arguments of a call (`arguments`), captures its model
again for other inputs (`recapture`) and carries the plan over to what came of it (`carried`). A step also has a state
(`state`), an optimizer (`optimizer`), a file of both (`saved`), and a way without a graph (`eager_step`).
"""

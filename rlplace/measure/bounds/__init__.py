"""Lower bounds on the step time of any placement, and the figures, paths and loads that they are made of."""

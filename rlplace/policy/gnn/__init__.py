"""The policy `gnn`: a graph network that places all groups at once, on any number of devices."""

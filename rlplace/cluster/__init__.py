"""Many machines, on Ray (extra `cluster`): simulated work spread over their cores, placements measured on each of them.

`cluster` joins a Ray cluster or starts one here. `cluster_evaluator` measures on the nodes: it decides which node
measures which plan, and when learning goes on, and has the actor on a node. Ray schedules, transports and restarts; it
is imported when a cluster is asked for, never before.
"""

from rlplace.cluster.cluster import AUTO, OFF, Cluster, Node, check_cluster, reach

__all__ = ["AUTO", "OFF", "Cluster", "Node", "check_cluster", "reach"]

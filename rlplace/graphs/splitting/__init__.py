"""Ops of a step split into shards along other dimensions than its batch: tensor parallelism as placements.

`dimensions` says which dimensions of the traced ops are the same. `choice` finds those that a `SplitPlan` splits, from
chains of products. `rewrite` makes the trace with shards, `sharded_values` makes whole, split and partial values of
each other, and `shard_ops` has the ops that only shards need.
"""

"""A step cut along its batch: how it is cut, which loss of the slices is that of the batch, and the graph of it.

`slices` plans the cut and `verdict` judges the loss with a `trial` of the ways in `ways`. `micro_batches` captures:
each size of a slice once (`parts`), copies of which are put together (`assembly`) with sums of gradients (`gradients`),
a joined loss (`joining`) and running statistics (`norms`).
"""

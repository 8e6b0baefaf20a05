"""A step cut along its batch: how it is cut, which loss of the slices is that of the batch, and the graph of it.

`slices` plans the cut and `verdict` judges the loss (`trial`, `pinned`, `samples`, `ways`, `mixing`). `micro_batches`
captures: each size of a slice once (`parts`), copies of which are put together (`assembly`) with sums of gradients
(`gradients`, `sums`, `tables`), a joined loss (`joining`, `outputs`) and running statistics (`norms`, `running`).
"""

"""A step cut along its batch: how it is cut, which loss of the slices is that of the batch, and the graph of it.

`slices` plans the cut. `loss_verdict` decides how the slices make the loss: it computes a few samples in both ways
on a copy of the model. `cut_step` captures each size of a slice once and joins the outputs or
the losses of the slices; `assembly` puts copies of the captured slices together and adds up their gradients.
"""

"""Scaled-dot-product attention as one op a direction, on every device.

`intercept` puts the ops of `ops` in the place of `torch.nn.functional.scaled_dot_product_attention`; their kernels are
in `cpu` and `cuda`, and `formula` is what they compute, op by op, for every other backend.
"""

from rlplace.graphs.attention.intercept import fused_attention

__all__ = ["fused_attention"]

"""`op_kind`: what an op does, in a small vocabulary that does not change with PyTorch's names for its ops."""

from __future__ import annotations

import re

from rlplace.graphs.opgraph import RESIDENT_TARGETS, SOURCE_TARGETS

OP_KINDS = (
    "parameter",
    "input",
    "matmul",
    "attention",
    "convolution",
    "norm",
    "pool",
    "loss",
    "embedding",
    "reduction",
    "movement",
    "random",
    "update",
    "elementwise",
    "other",
)
"""Every kind, in the order of the features of groups; weights of trained policies depend on it."""

_MATMUL = re.compile(r"^([a-z]*mm|mv|addmv|dot|vdot|matmul|linear|bilinear|einsum|gemm|addr|ger|outer|lstm|gru|rnn)$")
_PARTS = (
    ("attention", ("attention",)),
    ("convolution", ("conv",)),
    ("loss", ("softmax", "logsumexp", "loss", "entropy")),
    ("norm", ("norm",)),
    ("pool", ("pool", "upsample", "interpolate")),
    ("embedding", ("embedding", "index", "gather", "scatter")),
    ("random", ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial")),
)
"""Parts of a name that tell its kind, the first that fits."""
_WORDS = {
    "reduction": {
        *("sum", "mean", "prod", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "cumsum", "cumprod"),
        *("topk", "sort", "argsort", "var", "std", "median", "any", "all", "nonzero", "bincount", "unique"),
    },
    "movement": {
        *("cat", "stack", "split", "chunk", "copy", "clone", "slice", "select", "pad", "zeros", "ones", "full"),
        *("empty", "fill", "view", "reshape", "permute", "transpose", "expand", "repeat", "roll", "flip", "tril"),
        *("triu", "arange", "squeeze", "unsqueeze", "unbind", "diagonal", "strided", "concat", "flatten", "tile"),
    },
}
"""Words of a name, between underscores, that tell its kind."""
_ELEMENTWISE = re.compile(
    r"^(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|tanh|sigmoid|relu|gelu|silu|where|erf|clip|clamp|sign|lerp)"
)


def op_kind(target: str) -> str:
    """The kind, one of `OP_KINDS`, of an op with that target; the backward of an op is of the op's kind.

    >>> op_kind("aten.convolution_backward.default"), op_kind("aten.addmm.default"), op_kind("update.adam")
    ('convolution', 'matmul', 'update')
    """
    if target in SOURCE_TARGETS:
        return "parameter" if target in RESIDENT_TARGETS else "input"
    if target.startswith("update."):
        return "update"
    namespace, _, rest = target.lower().rpartition("::")[2].partition(".")
    name = (rest or namespace).partition(".")[0].strip("_")
    words = set(name.split("_"))
    if "attention" not in name and any(_MATMUL.match(word) for word in words):
        return "matmul"
    for kind, parts in _PARTS:
        if any(part in name for part in parts):
            return kind
    for kind, listed in _WORDS.items():
        if words & listed:
            return kind
    return "elementwise" if namespace == "aten" or _ELEMENTWISE.match(name) else "other"
